"""Images of boards: 7 kinds of tiles, drawn once per size, put side by side.

Colours and proportions are slime's at 64 px a cell; other sizes scale them, with no line thinner than one
pixel. Every image is RGB, (height · cell_px) × (width · cell_px) pixels, and depends on board and size alone.
One mark is our own: a box on a target has a red outline, where the original shows it like any other box.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from geo_sokoban_pipeline.envs.images import encode_png
from geo_sokoban_pipeline.envs.sokoban import board
from geo_sokoban_pipeline.envs.sokoban.board import Board

MIN_CELL_PX = 8
# Cached images of one board size, about 450 of 6×6 cells of 16 px.
_IMAGE_BYTES = 16 << 20

_WALL, _FLOOR, _GRID = (176, 80, 50), (8, 8, 8), (255, 255, 255)
_TARGET_LINE, _TARGET_FILL = (220, 40, 40), (200, 30, 30)
_BOX_FILL, _BOX_LINE, _BOX_CROSS = (233, 184, 47), (180, 130, 20), (196, 140, 24)
_PLAYER, _EYE = (70, 200, 70), (0, 0, 0)


def render(board: Board, cell_px: int = 64) -> Image.Image:
    """RGB image of a board.

    Args:
        board: any position.
        cell_px: side of a cell in pixels, at least 8.

    Returns:
        A new image of mode RGB, width · cell_px wide and height · cell_px high.
    """
    return Image.fromarray(_pixels(board, cell_px))


def render_png(board: Board, cell_px: int = 64) -> bytes:
    """PNG file of `render`."""
    return encode_png(_pixels(board, cell_px))


class BoardImage(Image.Image):
    """`render` of a board, painted when Pillow is asked for its pixels.

    numpy gets them as an array, without a detour through Pillow: nine of ten boards that a rollout shows are new to
    every cache, and the policy's reader wants nothing but the array. `content_key` spares it the hashing.
    """

    _board: Board | None = None  # None: painted, or a copy by Pillow

    def __init__(self, board: Board, cell_px: int) -> None:
        super().__init__()
        self._board, self._cell_px = board, cell_px
        self._mode, self._size = "RGB", (board.width * cell_px, board.height * cell_px)
        self._content_key = f"sokoban:{cell_px}:{board.width}:{board.codes().hex()}"

    @property
    def content_key(self) -> str | None:
        """Key of the content; None once the image may have been drawn on."""
        return None if self._board is None else self._content_key

    def load(self) -> Any:
        """Paint the image on first use; every method of Pillow that reads pixels calls this first."""
        if self._board is not None:
            self.im = render(self._board, self._cell_px).im
            self._board = None
        return super().load()

    @property
    def __array_interface__(self) -> dict[str, Any]:
        if self._board is None:  # it may have been drawn on
            return super().__array_interface__
        pixels = _pixels(self._board, self._cell_px)
        return {"shape": pixels.shape, "typestr": pixels.dtype.str, "version": 3, "data": pixels.data}


def render_observation(board: Board, cell_px: int = 64) -> Image.Image:
    """`render` for a policy, with a content key.

    Equal boards share one image while it is cached: do not draw on it.
    """
    return _image_cache(4 * board.height * board.width * cell_px**2)(board, cell_px)


@lru_cache(maxsize=8)
def _image_cache(image_bytes: int) -> Callable[[Board, int], BoardImage]:
    return lru_cache(maxsize=max(64, _IMAGE_BYTES // image_bytes))(BoardImage)


def _pixels(board: Board, cell_px: int) -> np.ndarray:
    tiles = _tiles(cell_px)
    codes = np.frombuffer(board.codes(), dtype=np.uint8).reshape(board.height, board.width)
    return tiles[codes].transpose(0, 2, 1, 3, 4).reshape(board.height * cell_px, board.width * cell_px, 3)


@lru_cache(maxsize=64)
def _tiles(cell_px: int) -> np.ndarray:
    """(7, cell_px, cell_px, 3) uint8, one tile per cell code."""
    if cell_px < MIN_CELL_PX:
        raise ValueError(f"cell_px={cell_px}: must be at least {MIN_CELL_PX}, smaller cells cannot be told apart")
    tiles = np.stack([np.asarray(_draw_tile(code, cell_px)) for code in range(7)])
    tiles.setflags(write=False)
    return tiles


def _draw_tile(code: int, side: int) -> Image.Image:
    tile = Image.new("RGB", (side, side), _WALL if code == board.WALL else _FLOOR)
    if code == board.WALL:
        return tile
    draw = ImageDraw.Draw(tile)
    # The far edges lie in the neighbours, which draw over them, so only the two near lines remain.
    draw.line([(0, 0), (side - 1, 0)], fill=_GRID)
    draw.line([(0, 0), (0, side - 1)], fill=_GRID)
    if code in (board.TARGET, board.BOX_ON_TARGET, board.PLAYER_ON_TARGET):
        _draw_target(draw, side)
    if code in (board.BOX, board.BOX_ON_TARGET):
        # The box hides the target; without a mark, two boxes would make the image ambiguous.
        _draw_box(draw, side, _TARGET_LINE if code == board.BOX_ON_TARGET else _BOX_LINE)
    if code in (board.PLAYER, board.PLAYER_ON_TARGET):
        _draw_player(draw, side)
    return tile


def _scaled(pixels: float, side: int) -> int:
    """Length given for 64 px cells at another size, at least one pixel."""
    return max(1, round(pixels * side / 64))


def _draw_target(draw: ImageDraw.ImageDraw, side: int) -> None:
    quarter, middle, radius = side // 4, side // 2, _scaled(64 / 6, side)
    far = side - quarter
    draw.rectangle([quarter, quarter, far, far], outline=_TARGET_LINE, width=_scaled(3, side))
    diamond = [
        (middle, middle - radius),
        (middle + radius, middle),
        (middle, middle + radius),
        (middle - radius, middle),
    ]
    draw.polygon(diamond, fill=_TARGET_FILL)


def _draw_box(draw: ImageDraw.ImageDraw, side: int, outline: tuple[int, int, int]) -> None:
    edge, inset, middle = _scaled(4, side), _scaled(6, side), side // 2
    draw.rectangle([edge, edge, side - edge, side - edge], fill=_BOX_FILL, outline=outline, width=_scaled(3, side))
    # Through the centre pixel: on odd sides the exact diagonals would miss it.
    reach = min(middle - inset, side - inset - middle)
    for slope in (1, -1):
        ends = [(middle - reach, middle - slope * reach), (middle + reach, middle + slope * reach)]
        draw.line(ends, fill=_BOX_CROSS, width=_scaled(4, side))


def _draw_player(draw: ImageDraw.ImageDraw, side: int) -> None:
    def at(x: float, y: float) -> tuple[int, int]:
        return round(x * side / 64), round(y * side / 64)

    line = _scaled(3, side)
    for outward in (-1, 1):
        draw.line([at(32 + 7 * outward, 14), at(32 + 12 * outward, 7)], fill=_PLAYER, width=line)
        draw.rectangle([*at(32 + 8 * outward - 4, 46), *at(32 + 8 * outward + 4, 57)], fill=_PLAYER)
    draw.ellipse([*at(17, 10), *at(47, 34)], fill=_PLAYER)
    draw.rounded_rectangle([*at(19, 30), *at(45, 49)], radius=_scaled(5, side), fill=_PLAYER)
    for x in (25, 39):
        left, top = at(x - 3, 18)
        right, bottom = at(x + 3, 25)
        # On the smallest tiles rounding would pull the eyes over the centre pixel.
        draw.ellipse([left, top, right, max(top, min(bottom, side // 2 - 1))], fill=_EYE)
