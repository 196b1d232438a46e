"""Boards read back from their images, to show what stored episodes leave out: the position after the last move.

An episode stores what the policy saw, so the solved board itself is on no stored image. Our renderer draws every cell
from one of seven tiles, so such an image names its board exactly; any other image is simply not read.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from PIL import Image

from geo_sokoban_pipeline.envs.sokoban import Board, render
from geo_sokoban_pipeline.envs.sokoban.board import DIRECTIONS
from geo_sokoban_pipeline.envs.sokoban.drawing import MIN_CELL_PX, render_png

_SAMPLES = ("#@ \n.$*", "+$$")  # together they hold all seven kinds of cell


def play_moves(png: bytes, actions: Iterable[str]) -> bytes | None:
    """Image of a board after moves on it, which end where the board is solved.

    Args:
        png: image of the board before.
        actions: up, down, left or right; blocked ones change nothing.

    Returns:
        PNG of the same size; None where the image is no board of ours or an action no move.
    """
    found = read_board(png)
    if found is None:
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
        if height % cell_px == 0 and width % cell_px == 0:
            codes = _read_cells(pixels, cell_px)
            if codes is not None:
                return Board.from_codes(height // cell_px, width // cell_px, codes), cell_px
    return None


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
    tiles: dict[bytes, int] = {}
    for sample in _SAMPLES:
        board = Board.from_text(sample)
        pixels = np.asarray(render(board, cell_px))
        for at, code in enumerate(board.codes()):
            row, column = divmod(at, board.width)
            cell = pixels[row * cell_px : (row + 1) * cell_px, column * cell_px : (column + 1) * cell_px]
            tiles[cell.tobytes()] = code
    return tiles
