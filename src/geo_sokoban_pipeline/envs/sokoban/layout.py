"""Walls of a level as bit masks: the part of a board that never changes, shared by all boards on it.

Cells are small integers on a padded grid: `index = (row + 1) * (width + 1) + column`. The padding counts as wall, so
no move, push or flood fill ever needs a border check; a set of cells is one Python integer with a bit per index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from geo_sokoban_pipeline.envs.sokoban.symmetry import canonical_bytes, transform_bytes, transformed_size
from geo_sokoban_pipeline.seeding import content_hash

DIRECTIONS: tuple[str, ...] = ("up", "down", "left", "right")
STEPS: dict[str, tuple[int, int]] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}

Cell = tuple[int, int]


def bits(mask: int) -> Iterator[int]:
    """Indices of the set bits of a mask, ascending, which is row-major order of the cells."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


@dataclass(frozen=True)
class Layout:
    """Walls of a grid of `height` × `width` cells; `walls` is a mask over padded indices, padding included.

    Make one with `Layout.of` or `Layout.from_walls`: equal layouts are then one object and share their cached tables.
    """

    height: int
    width: int
    walls: int

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.height, self.width, self.walls))

    def __reduce__(self) -> tuple[object, ...]:
        return Layout.of, (self.height, self.width, self.walls)

    @staticmethod
    @lru_cache(maxsize=16384)
    def of(height: int, width: int, walls: int) -> Layout:
        """The shared layout of these walls; padding is added where the mask lacks it."""
        return Layout(height, width, walls | padding(height, width))

    @classmethod
    def from_walls(cls, height: int, width: int, walls: Iterable[Cell]) -> Layout:
        """Layout from (row, column) pairs of the walls, both counted from 0."""
        stride = width + 1
        return cls.of(height, width, sum(1 << ((row + 1) * stride + column) for row, column in set(walls)))

    @cached_property
    def stride(self) -> int:
        """Distance of two vertically adjacent indices."""
        return self.width + 1

    @cached_property
    def deltas(self) -> dict[str, int]:
        """Index difference of one step in each direction."""
        return {"up": -self.stride, "down": self.stride, "left": -1, "right": 1}

    @cached_property
    def floor(self) -> int:
        """Mask of every cell that is no wall."""
        return ((1 << ((self.height + 2) * self.stride)) - 1) & ~self.walls

    def index(self, cell: Cell) -> int:
        """Padded index of a (row, column) pair."""
        return (cell[0] + 1) * self.stride + cell[1]

    def cell(self, index: int) -> Cell:
        """(row, column) of a padded index."""
        return index // self.stride - 1, index % self.stride

    def mask(self, cells: Iterable[Cell]) -> int:
        """Mask of (row, column) pairs."""
        return sum(1 << self.index(cell) for cell in set(cells))

    def cells(self, mask: int) -> tuple[Cell, ...]:
        """(row, column) pairs of a mask in row-major order."""
        return tuple(self.cell(index) for index in bits(mask))

    @cached_property
    def codes(self) -> bytes:
        """Row-major cell codes, 0 wall and 1 floor, one byte each."""
        return bytes(self.floor >> self.index((r, c)) & 1 for r in range(self.height) for c in range(self.width))

    @cached_property
    def hash(self) -> str:
        """Hexadecimal hash of the walls, equal for all eight symmetries."""
        return content_hash(b"layout", *canonical_bytes(self.codes, self.height, self.width))

    def transform(self, symmetry: int) -> Layout:
        """The layout under one of the eight symmetries, 0…7 (see `symmetry`)."""
        height, width = transformed_size(self.height, self.width, symmetry)
        codes = transform_bytes(self.codes, self.height, self.width, symmetry)
        return Layout.from_walls(height, width, (divmod(at, width) for at, code in enumerate(codes) if not code))

    @cached_property
    def is_connected(self) -> bool:
        """Whether every floor cell can be reached from every other one on an empty board."""
        return self.floor != 0 and self.reach(self.floor & -self.floor, self.floor) == self.floor

    def reach(self, start: int, free: int) -> int:
        """Mask of the cells that a walk from the cells of `start` reaches within `free`."""
        seen, frontier, stride = start, start, self.stride
        while frontier:
            frontier = (frontier << 1 | frontier >> 1 | frontier << stride | frontier >> stride) & free & ~seen
            seen |= frontier
        return seen

    def __str__(self) -> str:
        rows = (self.codes[at : at + self.width] for at in range(0, len(self.codes), self.width))
        return "\n".join("".join("# "[code] for code in row) for row in rows)


@lru_cache(maxsize=1024)
def padding(height: int, width: int) -> int:
    """Mask of the padded indices outside the grid."""
    stride = width + 1
    row = (1 << width) - 1
    grid = sum(row << ((r + 1) * stride) for r in range(height))
    return ((1 << ((height + 2) * stride)) - 1) ^ grid
