"""Boards are values: a move returns a new board and the old one stays as it was.

The file holds what a board is made of: symmetries, walls, texts, distances, and the facts about pushes that show when a
level is lost. `canonical_hash` and `layout_hash` are equal for all eight symmetries of a board.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

from pydantic import Field

from geo_sokoban_pipeline.config.base import Reward, StrictModel, refuse_first
from geo_sokoban_pipeline.seeding import content_hash

SYMMETRIES = range(8)
MIN_CELL_PX = 8  # side of a cell in an image


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


# Walls of a level as bit masks: the part of a board that never changes, shared by all boards on it.


DIRECTIONS: tuple[str, ...] = ("up", "down", "left", "right")

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


@lru_cache(maxsize=1024)
def padding(height: int, width: int) -> int:
    """Mask of the padded indices outside the grid."""
    stride = width + 1
    row = (1 << width) - 1
    grid = sum(row << ((r + 1) * stride) for r in range(height))
    return ((1 << ((height + 2) * stride)) - 1) ^ grid


# Pushes that a lone box needs to each target, and dead cells: they depend on walls and targets alone.


@dataclass(frozen=True, eq=False)
class PushTable:
    """Push counts of a layout with targets.

    Attributes:
        pushes: by box index, the pushes to each target in row-major order, `INFINITE` where it cannot get there.
            Equal rows are one object: thousands of tables may be kept, and most rows of a table are equal.
        dead: mask of cells, walls included, from which a box reaches no target.
    """

    pushes: tuple[tuple[int, ...], ...]
    dead: int


@lru_cache(maxsize=4096)
def push_table(layout: Layout, target_mask: int) -> PushTable:
    """The push table of these walls and targets."""
    cells = (layout.height + 2) * layout.stride
    columns = [_pulls_from(layout, target, cells) for target in bits(target_mask)]
    shared: dict[tuple[int, ...], tuple[int, ...]] = {}
    rows = zip(*columns, strict=True) if columns else [()] * cells
    pushes = tuple(shared.setdefault(row, row) for row in rows)
    live = sum(1 << index for index, row in enumerate(pushes) if any(count < INFINITE for count in row))
    return PushTable(pushes, (1 << cells) - 1 & ~live)


def _pulls_from(layout: Layout, target: int, cells: int) -> list[int]:
    counts = [INFINITE] * cells
    if not layout.floor >> target & 1:
        return counts
    counts[target] = 0
    reached = [target]
    for box in reached:
        for delta in layout.deltas.values():
            source, player = box - delta, box - 2 * delta
            # The pusher stands one cell behind the box's source; outside the padding there is no cell at all.
            if player >= 0 and layout.floor >> source & 1 and layout.floor >> player & 1 and counts[source] == INFINITE:
                counts[source] = counts[box] + 1
                reached.append(source)
    return counts


def frozen_boxes(box: int, boxes: int, solid: int, dead: int, stride: int) -> int:
    """Mask of boxes that can never move again because of the one at index `box`, itself included; 0 if it may move.

    A box is stuck along an axis where a wall or a stuck box touches it, or where both cells are dead. A box under
    examination counts as solid, so that boxes which hold each other are found.

    Args:
        box: index of the box in question.
        boxes: mask of all boxes.
        solid: mask of walls and of boxes under examination.
        dead: mask of dead cells.
        stride: index difference of vertical neighbours.
    """
    bit = 1 << box
    solid |= bit
    frozen = bit
    for step in (1, stride):
        low, high = bit >> step, bit << step
        if (low | high) & solid or (low & dead and high & dead):
            continue
        for side in (low, high):
            held = frozen_boxes(side.bit_length() - 1, boxes, solid, dead, stride) if side & boxes else 0
            if held:
                frozen |= held
                break
        else:
            return 0
    return frozen


# Two texts for one grid of cell codes, XSB and the symbols of the dataset; parsing is the inverse of printing.


WALL, FLOOR, TARGET, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = range(7)

XSB = "# .*$@+"
SYMBOLS = "#_O√XPS"
_SPACED = [f" {symbol} " for symbol in SYMBOLS]

Place = tuple[int, int]  # row, column

_XSB_CODES = {symbol: code for code, symbol in enumerate(XSB)} | {"-": FLOOR, "_": FLOOR}
_SYMBOL_CODES = {symbol: code for code, symbol in enumerate(SYMBOLS)}
# Letters and signs that only one of the two texts uses decide which one it is; "#", "_" and blanks occur in both.
_ONLY_XSB = frozenset(".*$@+-")
_ONLY_SYMBOLS = frozenset("O√XPS\t")


def parse_codes(text: str) -> tuple[int, int, bytes]:
    """Height, width and row-major cell codes of a level given as XSB or in the dataset's symbols.

    Blank lines before and after the grid are ignored. In XSB a space is floor within the walls and wall outside of
    them, and columns that hold nothing else are left out; in the data set's text blanks and tabs only separate.

    Raises:
        ValueError: empty grid, symbols of both texts or of neither, a blank row, rows of different width in the data
            set's symbols, not exactly one player.
    """
    lines = _grid_lines(text)
    used = set().union(*lines)
    if used & _ONLY_SYMBOLS and used & _ONLY_XSB:
        raise ValueError(
            f"level text mixes XSB {_show(used & _ONLY_XSB)} with the data set's symbols "
            f"{_show(used & _ONLY_SYMBOLS)}; write it in one of the two: {XSB!r} or {SYMBOLS!r}"
        )
    if used & _ONLY_SYMBOLS:
        rows = ["".join(line.split()) for line in lines]
        _check_symbols(rows, _SYMBOL_CODES)
        _check_widths(rows)
        grid = [[_SYMBOL_CODES[symbol] for symbol in row] for row in rows]
    else:
        _check_symbols(lines, _XSB_CODES)
        grid = _xsb_grid(lines)
    codes = bytes(code for row in grid for code in row)
    players = sum(code in (PLAYER, PLAYER_ON_TARGET) for code in codes)
    if players != 1:
        raise ValueError(
            f"level has {players or 'no'} player{'s' if players else ''}; it needs exactly one ('@', '+', 'P' or 'S')"
        )
    return len(grid), len(grid[0]), codes


def print_xsb(codes: bytes, width: int) -> str:
    """XSB text of row-major codes, rows joined by newlines; floor outside of the walls is written with `-`."""
    grid = grid_rows(codes, width)
    if not any(FLOOR in edge for edge in (grid[0], grid[-1], codes[::width], codes[width - 1 :: width])):
        return "\n".join("".join(XSB[code] for code in row) for row in grid)
    floor = {(r, c) for r, row in enumerate(grid) for c, code in enumerate(row) if code == FLOOR}
    explicit = _outside(floor, len(grid), width, lambda r, c: grid[r][c] == WALL)
    rows = [
        "".join("-" if (r, c) in explicit else XSB[code] for c, code in enumerate(row)) for r, row in enumerate(grid)
    ]
    # Only grids without a border have rows of floor alone; as spaces they would be read as blank lines.
    return "\n".join(row if row.strip() else "-" * width for row in rows)


def grid_rows(codes: Sequence[int], width: int) -> list[Any]:
    """Row-major cells by row."""
    return [codes[at : at + width] for at in range(0, len(codes), width)]


def _grid_lines(text: str) -> list[str]:
    # Not str.splitlines: it would also cut at form feeds and other rare separators, which are unknown symbols here.
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    filled = [number for number, line in enumerate(lines) if line.strip()]
    if not filled:
        raise ValueError(
            f"empty level text {text!r}; give one line per row, in XSB {XSB!r} or the data set's symbols {SYMBOLS!r}"
        )
    return lines[filled[0] : filled[-1] + 1]


def _xsb_grid(lines: list[str]) -> list[list[int]]:
    """Codes of XSB rows, outside and the missing ends of rows as wall."""
    if (blank := next((number for number, line in enumerate(lines) if not line.strip()), None)) is not None:
        raise ValueError(f"row {blank} of the level is blank; write a row of nothing but floor as '-'")
    height, width = len(lines), max(map(len, lines))
    rows = [line.ljust(width, "\0") for line in lines]  # \0: the row has ended
    empty = {(r, c) for r, row in enumerate(rows) for c, symbol in enumerate(row) if symbol in " \0"}
    outside = _outside(empty, height, width, lambda r, c: rows[r][c] == "#")
    left = next(c for c in range(width) if any((r, c) not in outside for r in range(height)))
    right = next(c for c in reversed(range(width)) if any((r, c) not in outside for r in range(height)))

    def code(r: int, c: int) -> int:
        return WALL if rows[r][c] == "\0" or (r, c) in outside else _XSB_CODES[rows[r][c]]

    return [[code(r, c) for c in range(left, right + 1)] for r in range(height)]


def _outside(empty: set[Place], height: int, width: int, is_wall: Callable[[int, int], bool]) -> set[Place]:
    """Empty cells outside the walls: those that reach the edge of the grid and border on walls alone."""
    found: set[Place] = set()
    left = set(empty)
    for start in [(r, c) for r, c in empty if r in (0, height - 1) or c in (0, width - 1)]:
        if start not in left:
            continue
        left.discard(start)
        part, closed = [start], True
        for row, column in part:
            for place in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
                if place in left:
                    left.discard(place)
                    part.append(place)
                elif place not in empty and 0 <= place[0] < height and 0 <= place[1] < width:
                    closed = closed and is_wall(*place)
        if closed:
            found.update(part)
    return found


def _check_widths(rows: list[str]) -> None:
    for number, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise ValueError(
                f"ragged level: row {number} has {len(row)} cells, row 0 has {len(rows[0])}; pad the rows with walls "
                "or floor"
            )


def _check_symbols(rows: list[str], table: dict[str, int]) -> None:
    for number, row in enumerate(rows):
        for column, symbol in enumerate(row):
            if symbol not in table:
                raise ValueError(
                    f"unknown symbol {symbol!r} in row {number}, column {column}; known are {''.join(table)!r}"
                )


def _show(symbols: set[str]) -> str:
    return repr("".join(sorted(symbols)))


# Distance of boxes from targets as sums of Manhattan distances: slime's greedy rule, and the smallest matching.


INFINITE = 1 << 30


def greedy_distance(boxes: Sequence[Cell], targets: Sequence[Cell]) -> int:
    """Slime's rule (docs/deviations.md): each box in sorted order goes to its nearest remaining target.

    That target is then taken, while more than one remains. Ties go to the first target in row-major order.
    """
    if not boxes or not targets:
        return 0
    left, total = sorted(targets), 0
    for row, column in sorted(boxes):
        distances = [abs(row - r) + abs(column - c) for r, c in left]
        nearest = min(distances)
        total += nearest
        if len(left) > 1:
            del left[distances.index(nearest)]
    return total


def assignment_distance(boxes: Sequence[Cell], targets: Sequence[Cell]) -> int:
    """Smallest summed Manhattan distance over matchings; boxes beyond the number of targets are left out."""
    if not boxes or not targets:
        return 0
    rows, columns = (boxes, targets) if len(boxes) <= len(targets) else (targets, boxes)
    return smallest_matching([[abs(r - s) + abs(c - d) for s, d in columns] for r, c in rows])


def smallest_matching(costs: Sequence[Sequence[int]]) -> int:
    """Smallest sum that gives every row a column of its own; `INFINITE` or more where that needs an infinite entry.

    There must be at least as many columns as rows.
    """
    if len(costs) == 1:
        return min(costs[0])
    # Levels of one box, such as the default ones, do without the import, which takes 0.35 CPU-seconds.
    import numpy as np
    from scipy.optimize import linear_sum_assignment

    table = np.array(costs)
    return int(table[linear_sum_assignment(table)].sum())


# Slime's `env_config`: a level as plain numbers, checked on reading, sorted on writing.


_STATE_KEYS = ("initial_base_grid", "initial_boxes", "initial_player")
_BASE = {BOX_ON_TARGET: TARGET, BOX: FLOOR, PLAYER: FLOOR, PLAYER_ON_TARGET: TARGET}


def codes_from_config(config: dict[str, Any]) -> tuple[int, int, bytes]:
    """Height, width and row-major cell codes of an `env_config`; nested lists, tuples and numpy arrays are fine.

    Raises:
        ValueError: a key is missing, a grid value or coordinate is out of range, a box or the player stands in a wall,
            or the stated grid_size or num_boxes contradicts the grid. The message names the key and the value.
    """
    if missing := [key for key in _STATE_KEYS if config.get(key) is None]:
        raise ValueError(f"env_config: {', '.join(missing)} missing; the level needs all of {', '.join(_STATE_KEYS)}")
    grid = [[int(value) for value in row] for row in config["initial_base_grid"]]
    _check_grid(grid)
    height, width = len(grid), len(grid[0])
    codes = bytearray(value for row in grid for value in row)
    boxes = [_free_cell("initial_boxes", box, grid) for box in config["initial_boxes"]]
    player = _free_cell("initial_player", config["initial_player"], grid)
    if len(set(boxes)) != len(boxes) or player in boxes:
        raise ValueError(
            f"env_config: initial_boxes={boxes}, initial_player={player} share a cell; each needs one of its own"
        )
    for row, column in boxes:
        codes[row * width + column] = BOX_ON_TARGET if grid[row][column] == TARGET else BOX
    codes[player[0] * width + player[1]] = PLAYER_ON_TARGET if grid[player[0]][player[1]] == TARGET else PLAYER
    _check_stated(config, (height, width), len(boxes))
    return height, width, bytes(codes)


def _check_grid(grid: list[list[int]]) -> None:
    widths = {len(row) for row in grid}
    unknown = {value for row in grid for value in row} - {WALL, FLOOR, TARGET}
    known = "0 (wall), 1 (floor), 2 (target)"
    refuse_first(
        (widths <= {0}, f"env_config: initial_base_grid is empty; give rows of {known}"),
        (len(widths) > 1, f"env_config: initial_base_grid has rows of {sorted(widths)} cells; make them equal"),
        (bool(unknown), f"env_config: initial_base_grid holds {sorted(unknown)}; only {known} are known"),
    )


def _free_cell(key: str, value: Any, grid: list[list[int]]) -> Cell:
    pair = [int(number) for number in value]
    if len(pair) != 2:
        raise ValueError(f"env_config: {key}={pair}: a cell is [row, column]")
    row, column = pair
    if not (0 <= row < len(grid) and 0 <= column < len(grid[0])):
        raise ValueError(f"env_config: {key}={pair} lies outside the {len(grid)}×{len(grid[0])} grid")
    if grid[row][column] == WALL:
        raise ValueError(f"env_config: {key}={pair} stands in a wall; move it to a floor or target cell")
    return row, column


def _check_stated(config: dict[str, Any], size: tuple[int, int], boxes: int) -> None:
    stated_size, stated_boxes = config.get("grid_size"), config.get("num_boxes")
    if stated_size is not None and tuple(int(side) for side in stated_size) != size:
        raise ValueError(
            f"env_config: grid_size={list(stated_size)}, but initial_base_grid is {list(size)}; "
            "drop grid_size or correct it"
        )
    if stated_boxes is not None and int(stated_boxes) != boxes:
        raise ValueError(
            f"env_config: num_boxes={stated_boxes}, but initial_boxes holds {boxes}; drop num_boxes or correct it"
        )


# Boards are values: a move returns a new board and the old one stays as it was.


class MoveRewards(StrictModel):
    """Rewards of the turns of Sokoban; defaults are slime's."""

    blocked: Reward = Field(-0.05, description="A move into a wall or a box that cannot be pushed.")
    moved: Reward = Field(0.01, description="Every move of the player, pushes included.")
    box_on: Reward = Field(1.0, description="Added where a move pushes a box onto a target.")
    box_off: Reward = Field(-0.5, description="Added where a move pushes a box off a target.")
    malformed: Reward = Field(0.0, description="A turn whose response holds no move.")
    success_bonus: Reward = Field(5.0, description="Added once, when the level is solved.")
    lost: Reward = Field(0.0, description="Added to the turn that deadlocks the level, with `end_when_lost`.")


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
        """Board from XSB (`#@+$*. -_`) or the dataset's symbols (`# _ O X √ P S`, tabs and spaces allowed).

        Raises:
            ValueError: see `text.parse_codes`.
        """
        return cls.from_codes(*parse_codes(text))

    @classmethod
    def from_codes(cls, height: int, width: int, codes: bytes) -> Board:
        """Board from row-major cell codes with exactly one player."""
        stride = width + 1
        walls = targets = boxes = player = 0
        for at, code in enumerate(codes):
            index = (at // width + 1) * stride + at % width
            if code == WALL:
                walls |= 1 << index
            elif code in (TARGET, BOX_ON_TARGET, PLAYER_ON_TARGET):
                targets |= 1 << index
            if code in (BOX, BOX_ON_TARGET):
                boxes |= 1 << index
            elif code in (PLAYER, PLAYER_ON_TARGET):
                player = index
        return cls(Layout.of(height, width, walls), targets, boxes, player)

    @classmethod
    def from_env_config(cls, config: dict[str, Any]) -> Board:
        """Board from slime's `env_config`; the inverse of `to_env_config`. Errors name the key."""
        return cls.from_codes(*codes_from_config(config))

    def to_env_config(self, max_steps: int = 100, render_mode: str = "vision") -> dict[str, Any]:
        """Slime's `env_config`: base grid (0 wall, 1 floor, 2 target), sorted boxes, player, sizes and limits."""
        return {
            "grid_size": [self.height, self.width],
            "num_boxes": len(self.boxes),
            "initial_base_grid": grid_rows([_BASE.get(code, code) for code in self.codes()], self.width),
            "initial_boxes": list(map(list, self.boxes)),
            "initial_player": list(self.player),
            "render_mode": render_mode,
            "max_steps": max_steps,
            "wall_fraction": 0.0,
        }

    def move(self, direction: str, rewards: MoveRewards = DEFAULT_REWARDS) -> Move:
        """The board after one step of the player, with the reward of that step.

        Args:
            direction: up, down, left or right.
            rewards: what a blocked step, a step, and a box that comes onto or leaves a target are worth.
        """
        layout = self.layout
        if (delta := layout.deltas.get(direction)) is None:
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
        """Whether the level is deadlocked: a box stands on a dead cell, or is stuck off the targets for good.

        True is a proof that the board has no solution; False promises nothing.
        """
        return _is_lost(self.layout, self.target_mask, self.box_mask)

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
    def boxes_on_target(self) -> int:
        """Number of boxes on a target."""
        return (self.box_mask & self.target_mask).bit_count()

    def box_target_distance(self, kind: str = "greedy") -> int:
        """Summed Manhattan distance from boxes to targets, walls ignored.

        Args:
            kind: `greedy`, slime's rule (see `greedy_distance`), or `assignment`, the smallest sum over matchings.
        """
        if kind not in ("greedy", "assignment"):
            raise ValueError(f"distance={kind!r}: must be 'greedy' or 'assignment'")
        return _distance(self.layout, self.box_mask, self.target_mask, kind)

    def codes(self) -> bytes:
        """Row-major cell codes, (height · width) bytes in 0…6 (`WALL` to `PLAYER_ON_TARGET`)."""
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
        return print_xsb(self.codes(), self.width)

    def to_symbols(self) -> str:
        """The dataset's text, such as ` # \\t _ \\t P ` per row."""
        return "\n".join("\t".join([_SPACED[code] for code in row]) for row in grid_rows(self.codes(), self.width))

    def to_grid(self) -> str:
        """The dataset's symbols with nothing between the cells, one line per row."""
        return "\n".join("".join(SYMBOLS[code] for code in row) for row in grid_rows(self.codes(), self.width))

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


@lru_cache(maxsize=16384)
def _canonical_hash(board: Board) -> str:
    return content_hash(b"level", *canonical_bytes(board.codes(), board.height, board.width))


@lru_cache(maxsize=4096)
def _is_lost(layout: Layout, targets: int, boxes: int) -> bool:
    off_target, dead = boxes & ~targets, push_table(layout, targets).dead
    return bool(off_target & dead) or any(
        frozen_boxes(box, boxes, layout.walls, dead, layout.stride) & off_target for box in bits(off_target)
    )


@lru_cache(maxsize=4096)
def _distance(layout: Layout, boxes: int, targets: int, kind: str) -> int:
    distance = greedy_distance if kind == "greedy" else assignment_distance
    return distance(layout.cells(boxes), layout.cells(targets))
