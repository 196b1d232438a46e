"""Images of boards: 7 kinds of tiles, drawn once per size, put side by side.

Colours and proportions are slime's at 64 px a cell; other sizes scale them, with no line thinner than one
pixel. Every image is RGB, (height · cell_px) × (width · cell_px) pixels, and depends on board and size alone.
One mark is our own: a box on a target has a red outline, where the original shows it like any other box. So an image
names its board exactly, and can be read back: an episode stores what the policy saw, not the board after its last move.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from geo_sokoban_pipeline.envs.images import ImagePart, encode_png
from geo_sokoban_pipeline.envs.sokoban import board
from geo_sokoban_pipeline.envs.sokoban.board import DIRECTIONS, MIN_CELL_PX, Board

# Cached images of one board size, about 450 of 6×6 cells of 16 px.
_IMAGE_BYTES = 16 << 20

_WALL, _FLOOR, _GRID = (176, 80, 50), (8, 8, 8), (255, 255, 255)
_TARGET_LINE, _TARGET_FILL = (220, 40, 40), (200, 30, 30)
_BOX_FILL, _BOX_LINE, _BOX_CROSS = (233, 184, 47), (180, 130, 20), (196, 140, 24)
_PLAYER, _EYE = (70, 200, 70), (0, 0, 0)
_WALKED, _PUSHED = (120, 230, 120), (255, 150, 40)


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


def render_solution(board: Board, moves: Sequence[str], cell_px: int = 64) -> Image.Image:
    """A board with moves drawn on it: green where the player walks, orange where it pushes, a dot where it ends.

    Args:
        moves: up, down, left or right; blocked ones are left out.

    Raises:
        ValueError: one is no move.
    """
    image = render(board, cell_px)
    draw = ImageDraw.Draw(image)
    here = _centre(board, cell_px)
    for action in moves:
        made = board.move(action)
        there = _centre(made.board, cell_px)
        if there != here:
            draw.line([here, there], fill=_PUSHED if made.pushed else _WALKED, width=_scaled(6, cell_px))
        board, here = made.board, there
    radius = _scaled(8, cell_px)
    draw.ellipse([here[0] - radius, here[1] - radius, here[0] + radius, here[1] + radius], fill=_PUSHED)
    return image


def _centre(board: Board, cell_px: int) -> tuple[int, int]:
    """Pixel in the middle of the player's cell."""
    row, column = board.player
    return column * cell_px + cell_px // 2, row * cell_px + cell_px // 2


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


# Boards read back from their images.


def play_moves(png: bytes, actions: Iterable[str]) -> bytes | None:
    """Image of a board after moves on it, which end where the board is solved.

    Args:
        png: image of the board before.
        actions: up, down, left or right; blocked ones change nothing.

    Returns:
        PNG of the same size; None where the image is no board of ours or an action no move.
    """
    if (found := read_board(png)) is None:
        return None
    board, cell_px = found
    for action in actions:
        if action not in DIRECTIONS:
            return None
        board = board.move(action).board
        if board.is_solved:
            break
    return render_png(board, cell_px)


@lru_cache(maxsize=1024)
def read_board(png: bytes) -> tuple[Board, int] | None:
    """Board and cell size in pixels of an image that our renderer drew; None for any other image."""
    with Image.open(io.BytesIO(png)) as image:
        pixels = np.asarray(image.convert("RGB"))
    height, width = pixels.shape[:2]
    for cell_px in range(MIN_CELL_PX, min(height, width) // 3 + 1):
        fits = height % cell_px == 0 and width % cell_px == 0
        if fits and (codes := _read_cells(pixels, cell_px)) is not None:
            return Board.from_codes(height // cell_px, width // cell_px, codes), cell_px
    return None


_CONTENTS = ("wall", "floor", "target", "box on target", "box", "player", "player on target")  # by code


def board_cells(png: bytes) -> list[ImagePart]:
    """The cells of a board's image, row by row; [] where the image is no board of ours."""
    if (found := read_board(png)) is None:
        return []
    board, size = found
    places = (divmod(at, board.width) for at in range(board.width * board.height))
    return [
        ImagePart(column * size, row * size, size, size, _CONTENTS[code])
        for (row, column), code in zip(places, board.codes(), strict=True)
    ]


def _read_cells(pixels: np.ndarray, cell_px: int) -> bytes | None:
    tiles = _tile_codes(cell_px)
    rows, columns = pixels.shape[0] // cell_px, pixels.shape[1] // cell_px
    cells = pixels.reshape(rows, cell_px, columns, cell_px, 3).swapaxes(1, 2)
    codes = [tiles.get(cells[row, column].tobytes()) for row in range(rows) for column in range(columns)]
    if None in codes or sum(code in (5, 6) for code in codes) != 1:
        return None
    return bytes(code for code in codes if code is not None)


@lru_cache(maxsize=16)
def _tile_codes(cell_px: int) -> dict[bytes, int]:
    """Code of each kind of cell by its pixels."""
    return {tile.tobytes(): code for code, tile in enumerate(_tiles(cell_px))}
