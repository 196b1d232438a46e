"""Boards are values: a move returns a new board and the old one stays as it was.

The dynamics are Sokoban's: a step onto floor moves the player, a step against a box pushes it if the cell behind is
free, anything else changes nothing. A board is equal to another exactly if walls, targets, boxes and player are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from geo_sokoban_pipeline.envs.sokoban import text as texts
from geo_sokoban_pipeline.envs.sokoban.config import codes_from_config, config_from_codes
from geo_sokoban_pipeline.envs.sokoban.distance import assignment_distance, greedy_distance
from geo_sokoban_pipeline.envs.sokoban.layout import DIRECTIONS, Cell, Layout, bits
from geo_sokoban_pipeline.envs.sokoban.push_table import frozen_boxes, push_table
from geo_sokoban_pipeline.envs.sokoban.symmetry import canonical_bytes, transform_bytes, transformed_size
from geo_sokoban_pipeline.seeding import content_hash


@dataclass(frozen=True, slots=True)
class MoveRewards:
    """What a move, a turn without a move, success, and an end as a lost level are worth; defaults as in the seed."""

    blocked: float = -0.05
    moved: float = 0.01
    box_on: float = 1.0
    box_off: float = -0.5
    malformed: float = 0.0
    success_bonus: float = 5.0
    lost: float = 0.0


DEFAULT_REWARDS = MoveRewards()


class Move(NamedTuple):
    """Result of one move: the board after it, whether the player moved, whether a box did, and the reward."""

    board: Board
    moved: bool
    pushed: bool
    reward: float


@dataclass(frozen=True, slots=True)
class Board:
    """A position: a layout of walls, masks of targets and boxes, and the player's index (see `layout` for both)."""

    layout: Layout
    target_mask: int
    box_mask: int
    player_index: int

    @classmethod
    def from_text(cls, text: str) -> Board:
        """Board from XSB (`#@+$*. -_`) or the data set's symbols (`# _ O X √ P S`, tabs and spaces allowed).

        Raises:
            ValueError: see `text.parse_codes`.
        """
        return cls.from_codes(*texts.parse_codes(text))

    @classmethod
    def from_codes(cls, height: int, width: int, codes: bytes) -> Board:
        """Board from row-major cell codes with exactly one player."""
        stride = width + 1
        walls = targets = boxes = player = 0
        for at, code in enumerate(codes):
            index = (at // width + 1) * stride + at % width
            if code == texts.WALL:
                walls |= 1 << index
            elif code in (texts.TARGET, texts.BOX_ON_TARGET, texts.PLAYER_ON_TARGET):
                targets |= 1 << index
            if code in (texts.BOX, texts.BOX_ON_TARGET):
                boxes |= 1 << index
            elif code in (texts.PLAYER, texts.PLAYER_ON_TARGET):
                player = index
        return cls(Layout.of(height, width, walls), targets, boxes, player)

    @classmethod
    def from_env_config(cls, config: dict[str, Any]) -> Board:
        """Board from the seed's `env_config`; the inverse of `to_env_config`. Errors name the key."""
        return cls.from_codes(*codes_from_config(config))

    def to_env_config(
        self, max_steps: int = 100, render_mode: str = "vision", wall_fraction: float = 0.0
    ) -> dict[str, Any]:
        """The seed's `env_config`: base grid (0 wall, 1 floor, 2 target), sorted boxes, player, sizes and limits."""
        state = config_from_codes(self.height, self.width, self.codes())
        return state | {"render_mode": render_mode, "max_steps": max_steps, "wall_fraction": wall_fraction}

    def move(self, direction: str, rewards: MoveRewards = DEFAULT_REWARDS) -> Move:
        """The board after one step of the player, with the reward of that step.

        Args:
            direction: up, down, left or right.
            rewards: what a blocked step, a step, and a box that comes onto or leaves a target are worth.
        """
        layout = self.layout
        delta = layout.deltas.get(direction)
        if delta is None:
            raise ValueError(f"direction={direction!r}: a move is one of {', '.join(DIRECTIONS)}")
        to = self.player_index + delta
        bit = 1 << to
        if layout.walls & bit:
            return Move(self, False, False, rewards.blocked)
        if not self.box_mask & bit:
            return Move(Board(layout, self.target_mask, self.box_mask, to), True, False, rewards.moved)
        behind = 1 << (to + delta)
        if (layout.walls | self.box_mask) & behind:
            return Move(self, False, False, rewards.blocked)
        reward = rewards.moved
        if self.target_mask & behind:
            reward += rewards.box_on
        if self.target_mask & bit:
            reward += rewards.box_off
        return Move(Board(layout, self.target_mask, self.box_mask ^ bit ^ behind, to), True, True, reward)

    def legal_actions(self) -> list[str]:
        """Directions that change the board, in the order up, down, left, right."""
        return [direction for direction in DIRECTIONS if self.move(direction).moved]

    @property
    def is_solved(self) -> bool:
        """Whether every box stands on a target; with more targets than boxes too, and trivially without boxes."""
        return not self.box_mask & ~self.target_mask

    @property
    def is_lost(self) -> bool:
        """Whether a box can never reach a target: it stands on a dead cell, or is stuck off the targets for good.

        True is a proof that the board has no solution; False promises nothing.
        """
        layout, off_target = self.layout, self.box_mask & ~self.target_mask
        dead = push_table(layout, self.target_mask).dead
        return bool(off_target & dead) or any(
            frozen_boxes(box, self.box_mask, layout.walls, dead, layout.stride) & off_target for box in bits(off_target)
        )

    @property
    def height(self) -> int:
        """Rows of the grid."""
        return self.layout.height

    @property
    def width(self) -> int:
        """Columns of the grid."""
        return self.layout.width

    @property
    def player(self) -> Cell:
        """(row, column) of the player."""
        return self.layout.cell(self.player_index)

    @property
    def boxes(self) -> tuple[Cell, ...]:
        """(row, column) of each box, sorted."""
        return self.layout.cells(self.box_mask)

    @property
    def targets(self) -> tuple[Cell, ...]:
        """(row, column) of each target, sorted."""
        return self.layout.cells(self.target_mask)

    @property
    def walls(self) -> tuple[Cell, ...]:
        """(row, column) of each wall inside the grid, sorted."""
        codes, width = self.layout.codes, self.layout.width
        return tuple(divmod(at, width) for at, code in enumerate(codes) if code == texts.WALL)

    @property
    def boxes_on_target(self) -> int:
        """How many boxes stand on a target."""
        return (self.box_mask & self.target_mask).bit_count()

    def box_target_distance(self, kind: str = "greedy") -> int:
        """Summed Manhattan distance from boxes to targets, walls ignored.

        Args:
            kind: `greedy`, the seed's rule (see `distance.greedy_distance`), or `assignment`, the smallest sum over
                matchings.
        """
        if kind not in ("greedy", "assignment"):
            raise ValueError(f"distance={kind!r}: must be 'greedy' or 'assignment'")
        return _distance(self.layout, self.box_mask, self.target_mask, kind)

    def codes(self) -> bytes:
        """Row-major cell codes, (height · width) bytes in 0…6 (see `text`)."""
        layout = self.layout
        width, stride = layout.width, layout.stride
        cells = bytearray(layout.codes)
        # A box on a target is 3 = 2 + 1, not 2 + 3; every other sum is the code already.
        on_target = self.box_mask & self.target_mask
        parts = ((self.target_mask, 1), (on_target, 1), (self.box_mask ^ on_target, 3), (1 << self.player_index, 4))
        for mask, add in parts:
            for index in bits(mask):
                row, column = divmod(index, stride)
                cells[(row - 1) * width + column] += add
        return bytes(cells)

    def to_xsb(self) -> str:
        """XSB text, floor as spaces (as `-` in rows of nothing else), all rows of full width."""
        return texts.print_xsb(self.codes(), self.width)

    def to_symbols(self) -> str:
        """The data set's text, such as ` # \\t _ \\t P ` per row."""
        return texts.print_symbols(self.codes(), self.width)

    def to_grid(self) -> str:
        """The data set's symbols with nothing between the cells, one line per row."""
        return texts.print_compact(self.codes(), self.width)

    def transform(self, symmetry: int) -> Board:
        """The board under one of the eight symmetries, 0…7 (see `symmetry`)."""
        height, width = transformed_size(self.height, self.width, symmetry)
        return Board.from_codes(height, width, transform_bytes(self.codes(), self.height, self.width, symmetry))

    @property
    def canonical_hash(self) -> str:
        """Hexadecimal hash of the whole position, equal for all eight symmetries."""
        return _canonical_hash(self)

    @property
    def layout_hash(self) -> str:
        """Hexadecimal hash of the walls alone, equal for all eight symmetries; splits go by it."""
        return self.layout.hash

    def __str__(self) -> str:
        return self.to_xsb()


@lru_cache(maxsize=16384)
def _canonical_hash(board: Board) -> str:
    return content_hash(b"level", *canonical_bytes(board.codes(), board.height, board.width))


@lru_cache(maxsize=4096)
def _distance(layout: Layout, boxes: int, targets: int, kind: str) -> int:
    distance = greedy_distance if kind == "greedy" else assignment_distance
    return distance(layout.cells(boxes), layout.cells(targets))
