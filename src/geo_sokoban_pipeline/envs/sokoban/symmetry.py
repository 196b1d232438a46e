"""The eight symmetries of a grid as permutations of row-major cells: turns by 90 degrees, with and without a mirror.

Symmetry `k` turns the grid `k % 4` times clockwise, after a mirror of the columns where `k >= 4`. Symmetry 0 is the
identity. Odd turns swap height and width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from operator import itemgetter

SYMMETRIES = range(8)

# Clockwise order: a turn moves each direction one place on.
_CLOCKWISE = ("up", "right", "down", "left")


@lru_cache(maxsize=4096)
def permutation(height: int, width: int, symmetry: int) -> tuple[int, ...]:
    """Row-major source cell of each cell of the transformed grid, (height · width) long."""
    grid = [list(range(row * width, (row + 1) * width)) for row in range(height)]
    if symmetry >= 4:
        grid = [row[::-1] for row in grid]
    for _ in range(symmetry % 4):
        grid = [list(row) for row in zip(*grid[::-1], strict=True)]
    return tuple(cell for row in grid for cell in row)


def transformed_size(height: int, width: int, symmetry: int) -> tuple[int, int]:
    """Height and width after a symmetry."""
    return (width, height) if symmetry % 2 else (height, width)


def transform_direction(direction: str, symmetry: int) -> str:
    """Direction that a move takes on the transformed grid."""
    if symmetry >= 4:
        direction = {"left": "right", "right": "left"}.get(direction, direction)
    return _CLOCKWISE[(_CLOCKWISE.index(direction) + symmetry) % 4]


def transform_bytes(codes: bytes, height: int, width: int, symmetry: int) -> bytes:
    """Row-major cells after a symmetry."""
    return bytes([codes[at] for at in permutation(height, width, symmetry)])


def canonical_bytes(codes: bytes, height: int, width: int) -> tuple[bytes, bytes]:
    """Size and cells of the smallest of the eight transforms, equal for all of them."""
    small, large = sorted((height, width))
    if len(codes) == 1:
        return b"1x1", codes
    return f"{small}x{large}".encode(), bytes(min(pick(codes) for pick in _canonical_pickers(height, width)))


@lru_cache(maxsize=1024)
def _canonical_pickers(height: int, width: int) -> tuple[Callable[[bytes], tuple[int, ...]], ...]:
    # A grid that is not square has two orientations; the flat one needs four transforms, not eight.
    flat = [k for k in SYMMETRIES if transformed_size(height, width, k) == (min(height, width), max(height, width))]
    # itemgetter: three times as fast as a comprehension, and hashing is half of the generator's time.
    return tuple(itemgetter(*permutation(height, width, k)) for k in flat)
