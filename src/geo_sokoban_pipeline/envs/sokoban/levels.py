"""Level generator: solvable by construction, fewest moves verified, no level twice, the same in every process.

Small settings are enumerated by playing backwards from every solved position; larger ones pull boxes away from their
targets at random and let the solver count the moves.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations, islice
from math import comb

from geo_sokoban_pipeline.config.base import refuse_first
from geo_sokoban_pipeline.envs.sokoban.board import SYMMETRIES, Board, Layout, bits, canonical_bytes, transformed_size
from geo_sokoban_pipeline.envs.sokoban.solver import SearchLimitError, solve
from geo_sokoban_pipeline.seeding import derive_seed, python_generator

# Every solvable position of a layout with its fewest moves, by playing backwards from the solved positions.


_MAX_ENUMERATED_WALLS = 100_000

State = tuple[int, int]  # mask of boxes, index of the player


def distance_layers(layout: Layout, target_mask: int, max_moves: int | None = None) -> Iterator[list[State]]:
    """Positions with as many boxes as targets: layer d holds exactly those that need d moves, layer 0 the solved.

    Args:
        layout: the walls.
        target_mask: mask of the targets, all on floor.
        max_moves: last layer; None goes on until no new position is found.

    Yields:
        Lists of (mask of boxes, index of the player), in the same order in every process.
    """
    floor = layout.floor
    deltas = tuple(layout.deltas.values())
    layer = [(target_mask, player) for player in bits(floor & ~target_mask)]
    seen = set(layer)
    depth = 0
    while layer:
        yield layer
        if depth == max_moves:
            return
        depth += 1
        following: list[State] = []
        for state in layer:
            boxes, player = state
            free = floor & ~boxes
            for delta in deltas:
                back = player - delta
                if not free >> back & 1:
                    continue
                walked = (boxes, back)
                if walked not in seen:
                    seen.add(walked)
                    following.append(walked)
                if boxes >> (player + delta) & 1:
                    pulled = (boxes ^ 1 << player + delta ^ 1 << player, back)
                    if pulled not in seen:
                        seen.add(pulled)
                        following.append(pulled)
        layer = following


def levels_of_layout(
    layout: Layout, boxes: int = 1, min_solution: int = 1, max_solution: int | None = None
) -> Iterator[tuple[Board, int]]:
    """Every level on these walls with `boxes` boxes and targets, each with its fewest moves.

    Levels come by target positions, then by length. Mirror images of one level occur where the walls are symmetric.
    The number grows as floor cells to the power of 2 · boxes + 1: meant for one box, or two on small grids.

    Args:
        layout: walls.
        boxes: number of boxes, which is also the number of targets.
        min_solution: fewest moves wanted at least.
        max_solution: fewest moves wanted at most; None: no limit.
    """
    for cells in combinations(bits(layout.floor), boxes):
        targets = sum(1 << cell for cell in cells)
        for length, layer in islice(enumerate(distance_layers(layout, targets, max_solution)), min_solution, None):
            for box_mask, player in layer:
                yield Board(layout, targets, box_mask, player), length


def default_inner_walls(height: int, width: int) -> tuple[int, int]:
    """Fewest and most walls inside the border by default: 1 to a quarter of the inner cells, 1 to 4 for 6×6."""
    quarter = (height - 2) * (width - 2) // 4
    return min(1, quarter), quarter


def count_wall_choices(height: int, width: int, inner_walls: tuple[int, int]) -> int:
    """Number of ways to place that many walls inside the border, symmetric ones counted separately."""
    inner = (height - 2) * (width - 2)
    return sum(comb(inner, walls) for walls in range(inner_walls[0], inner_walls[1] + 1))


def bordered_layout(height: int, width: int, inner: Iterable[int]) -> Layout:
    """Layout with a closed border and the given inner cells (row-major numbers within the border) as walls."""
    border, inner_bits = _border_and_inner_bits(height, width)
    return Layout.of(height, width, border | sum(inner_bits[at] for at in inner))


@lru_cache(maxsize=256)
def _border_and_inner_bits(height: int, width: int) -> tuple[int, tuple[int, ...]]:
    inner = [(row, column) for row in range(1, height - 1) for column in range(1, width - 1)]
    border = {(row, column) for row in range(height) for column in range(width)} - set(inner)
    frame = Layout.from_walls(height, width, border)
    return frame.walls, tuple(1 << frame.index(cell) for cell in inner)


def list_layouts(height: int, width: int, inner_walls: tuple[int, int]) -> list[Layout] | None:
    """`enumerate_layouts`; None if they are too many to list."""
    is_short = count_wall_choices(height, width, inner_walls) <= _MAX_ENUMERATED_WALLS
    return enumerate_layouts(height, width, inner_walls) if is_short else None


def enumerate_layouts(height: int, width: int, inner_walls: tuple[int, int] | None = None) -> list[Layout]:
    """Distinct wall layouts with a closed border and connected floor, one per class of the eight symmetries.

    Args:
        height: rows, border included.
        width: columns, border included.
        inner_walls: fewest and most walls inside the border; None: `default_inner_walls`.

    Returns:
        Layouts by number of inner walls, in the same order in every process; 258 for 6×6 with 1 to 4.

    Raises:
        ValueError: more than `_MAX_ENUMERATED_WALLS` placements would have to be looked at.
    """
    low, high = inner_walls or default_inner_walls(height, width)
    choices = count_wall_choices(height, width, (low, high))
    if choices > _MAX_ENUMERATED_WALLS:
        raise ValueError(
            f"inner_walls=({low}, {high}): a {height}×{width} grid has {choices:,} such placements, more than "
            f"{_MAX_ENUMERATED_WALLS:,}; lower the walls or the size, or draw layouts at random with generate_levels"
        )
    seen: set[tuple[bytes, bytes]] = set()
    layouts = []
    for walls in range(low, high + 1):
        for inner in combinations(range((height - 2) * (width - 2)), walls):
            layout = bordered_layout(height, width, inner)
            key = canonical_bytes(layout.codes, height, width)
            if key not in seen:
                seen.add(key)
                if layout.is_connected:
                    layouts.append(layout)
    return layouts


# Levels too large to enumerate: pull boxes away from their targets at random, then let the solver count the moves.


# Longer drags of one box make longer solutions than boxes that jitter in turn.
_SAME_BOX_SHARE = 0.6


def pulled_board(layout: Layout, boxes: int, generator: random.Random) -> Board | None:
    """A board reached from a solved one by 3 to 12 random pulls per box; None if no box can be pulled.

    Args:
        layout: walls with connected floor of more than `boxes` cells.
        boxes: number of boxes and targets.
        generator: source of every random choice.
    """
    *targets, player = generator.sample(list(bits(layout.floor)), boxes + 1)
    target_mask = sum(1 << target for target in targets)
    state: State = (target_mask, player)
    seen, last = {target_mask}, -1
    for _ in range(generator.randint(3 * boxes, 12 * boxes)):
        if not (choices := [pull for pull in pulls(layout, state) if pull[0][0] not in seen]):
            break
        same = [pull for pull in choices if pull[1] == last]
        state, _, last = generator.choice(same if same and generator.random() < _SAME_BOX_SHARE else choices)
        seen.add(state[0])
    if state[0] == target_mask:
        return None
    reach = layout.reach(1 << state[1], layout.floor & ~state[0])
    return Board(layout, target_mask, state[0], generator.choice(list(bits(reach))))


def pulls(layout: Layout, state: State) -> list[tuple[State, int, int]]:
    """Every pull the player can walk to, as (state after it, index of the box before it, index after it)."""
    boxes, player = state
    free = layout.floor & ~boxes
    reach = layout.reach(1 << player, free)
    return [
        ((boxes ^ 1 << box ^ 1 << stand, back), box, stand)
        for delta in layout.deltas.values()
        for stand in bits(reach)
        if boxes >> (box := stand + delta) & 1 and free >> (back := stand - delta) & 1
    ]


def pulled_level(
    layout: Layout, boxes: int, bounds: tuple[int, int | None], max_states: int, generator: random.Random
) -> tuple[Board | None, int]:
    """A verified level whose fewest moves lie within bounds, drawn uniformly from what its longest form allows.

    Args:
        layout: walls with connected floor of more than `boxes` cells.
        boxes: number of boxes and targets.
        bounds: fewest moves, lowest and highest; highest None: the longest form itself.
        max_states: limit of the verifying search.
        generator: source of every random choice.

    Returns:
        (level, its fewest moves), or (None, fewest moves of what was found) where that is too short, 0 beyond the
        search limit.
    """
    if (board := pulled_board(layout, boxes, generator)) is None:
        return None, 0
    try:
        solution = solve(board, max_states)
    except SearchLimitError:
        return None, 0
    low, high = bounds
    if solution is None or len(solution) < low:
        return None, len(solution or [])
    length = len(solution) if high is None else generator.randint(low, min(high, len(solution)))
    for action in solution[: len(solution) - length]:
        board = board.move(action).board
    return board, length


# Level generator: solvable by construction, verified fewest moves, no level twice, the same in every process.


# Positions per choice of targets up to which a draw searches them all; beyond, reverse play and the solver are faster.
_MAX_DRAW_STATES = 4_000
# Positions of a whole setting up to which the generator lists every level once random draws bring nothing new.
_MAX_LISTED_STATES = 3_000_000
_MAX_LAYOUT_DRAWS = 10_000


@dataclass(frozen=True, slots=True)
class Level:
    """A board to be solved, the seed it was drawn from, and its fewest moves (None if the solver reached its limit)."""

    board: Board
    seed: int
    solution_length: int | None


class LevelsExhaustedError(ValueError):
    """A setting has fewer distinct levels than wanted, or random draws find no new ones."""


def check_room(height: int, width: int, boxes: int, inner_walls: tuple[int, int]) -> None:
    """See that boards have room for their inner walls, their boxes and the player.

    Raises:
        ValueError: they have not; the message has the way out.
    """
    inner, (fewest, most) = (height - 2) * (width - 2), inner_walls
    refuse_first(
        (
            not 0 <= fewest <= most <= inner,
            f"inner_walls={[fewest, most]}: a {height}×{width} board has {inner} inner cells; lower it, and give two "
            "numbers in rising order.",
        ),
        (
            boxes + 1 > inner - fewest,
            f"boxes={boxes}: a {height}×{width} board with {fewest} inner walls has {inner - fewest} floor cells, and "
            "boxes and player need one each; lower boxes, or raise height or width.",
        ),
    )


def generate_levels(
    count: int,
    seed: int,
    height: int,
    width: int,
    boxes: int = 1,
    min_solution: int = 1,
    max_solution: int | None = None,
    *,
    inner_walls: tuple[int, int] | None = None,
    layouts: Sequence[Layout] | None = None,
    lengths: Sequence[int] | None = None,
    max_states: int = 5_000,
    max_attempts: int = 200,
    return_fewer: bool = False,
) -> list[Level]:
    """Distinct levels with connected floor; a shorter call's levels are the first of a longer call's.

    Args:
        count: levels wanted.
        seed: root seed; replaces slime's `rng_seed`, whose levels depended on Python's string hashing.
        height: rows, border included.
        width: columns, border included.
        boxes: boxes, and as many targets.
        min_solution: fewest moves of a level at least.
        max_solution: fewest moves of a level at most; None: no limit.
        inner_walls: fewest and most walls inside the border; None: 1 to a quarter of the inner cells.
        layouts: draw walls from these only, in a random orientation; `inner_walls` then has no effect. None: random
            walls with a closed border.
        lengths: level i gets fewest moves `lengths[i % len(lengths)]`, so that `range(1, 9)` gives equal counts; None:
            any length within the bounds, about uniform over those that the drawn walls and targets offer.
        max_states: search limit of the solver that verifies levels too large to enumerate; levels that it
            cannot finish are discarded.
        max_attempts: draws in a row without a new level after which the setting counts as exhausted (small ones are
            then listed completely first).
        return_fewer: return what there is instead of raising `LevelsExhaustedError`.

    Returns:
        Levels with pairwise different canonical hashes and exact solution lengths.

    Raises:
        LevelsExhaustedError: there are too few levels and `return_fewer` is off.
        ValueError: a value is out of range; the message names it.
    """
    for name, value, least in (
        ("count", count, 0),
        ("height", height, 3),
        ("width", width, 3),
        ("boxes", boxes, 1),
        ("min_solution", min_solution, 1),
    ):
        if value < least:
            raise ValueError(f"{name}={value}: must be at least {least}")
    walls = inner_walls or default_inner_walls(height, width)
    check_room(height, width, boxes, walls)
    source = _Source(height, width, boxes, min_solution, max_solution, walls, layouts, seed, max_states, max_attempts)
    source.check(lengths)
    levels: list[Level] = []
    for index in range(count):
        wanted = lengths[index % len(lengths)] if lengths else None
        if (level := source.draw(index, wanted)) is not None:
            levels.append(level)
        elif not return_fewer:
            raise LevelsExhaustedError(source.explain(count, levels, wanted))
        elif wanted is None or source.empty.issuperset(lengths or ()):
            break
    return levels


@dataclass
class _Source:
    """Draws levels one by one, none of them twice; low and high are the bounds on the solution."""

    height: int
    width: int
    boxes: int
    low: int
    high: int | None
    inner_walls: tuple[int, int]
    layouts: Sequence[Layout] | None
    seed: int
    max_states: int
    max_attempts: int
    largest: int = 0
    exact: bool = False
    given: set[str] = field(default_factory=set)
    empty: set[int | None] = field(default_factory=set)
    rest: dict[int | None, list[tuple[Board, int]]] = field(default_factory=dict)

    def check(self, lengths: Sequence[int] | None) -> None:
        """Check the solution lengths and the layouts; errors name the argument of `generate_levels`."""
        if self.high is not None and self.high < self.low:
            raise ValueError(
                f"max_solution={self.high} is below min_solution={self.low}; raise max_solution or lower min_solution"
            )
        for name, given in (("lengths", lengths), ("layouts", self.layouts)):
            if given is not None and not given:
                raise ValueError(f"{name}=[]: there is nothing to draw; give at least one, or None for any")
        for length in lengths or ():
            if length < self.low or (self.high is not None and length > self.high):
                raise ValueError(
                    f"lengths: {length} lies outside min_solution={self.low} … max_solution={self.high}; "
                    "widen the bounds"
                )
        for layout in self.layouts or ():
            if {layout.height, layout.width} != {self.height, self.width}:
                raise ValueError(
                    f"layouts: one is {layout.height}×{layout.width}, the levels are {self.height}×{self.width}; "
                    "make the sizes equal"
                )

    def draw_layout(self, generator: random.Random) -> Layout:
        """Connected walls: one of the given layouts in a random orientation, or random inner walls."""
        if self.layouts is not None:
            layout = generator.choice(self.layouts)
            size = (layout.height, layout.width)
            return layout.transform(
                generator.choice([k for k in SYMMETRIES if transformed_size(*size, k) == (self.height, self.width)])
            )
        low, high = self.inner_walls
        inner = (self.height - 2) * (self.width - 2)
        for _ in range(_MAX_LAYOUT_DRAWS):
            walls = generator.sample(range(inner), generator.randint(low, min(high, inner - self.boxes - 1)))
            layout = bordered_layout(self.height, self.width, walls)
            if layout.is_connected:
                return layout
        raise ValueError(
            f"inner_walls=({low}, {high}): no connected floor among {_MAX_LAYOUT_DRAWS:,} random "
            f"{self.height}×{self.width} grids; lower inner_walls"
        )

    def draw(self, index: int, wanted: int | None) -> Level | None:
        """A new level with the wanted length (None: any within bounds), or None if there is none left."""
        seed = derive_seed(self.seed, "sokoban", "levels", index)
        generator = random.Random(seed)
        for _ in range(0 if wanted in self.rest or wanted in self.empty else self.max_attempts):
            board, length = self.attempt(generator, wanted)
            self.largest = max(self.largest, length)
            if board is not None and self.is_new(board):
                return Level(board, seed, length)
        if wanted not in self.rest:
            self.rest[wanted] = self.list_rest(wanted)
        while self.rest[wanted]:
            board, length = self.rest[wanted].pop()
            if self.is_new(board):
                return Level(board, seed, length)
        self.empty.add(wanted)
        return None

    def is_new(self, board: Board) -> bool:
        before = len(self.given)
        self.given.add(board.canonical_hash)
        return len(self.given) > before

    def attempt(self, generator: random.Random, wanted: int | None) -> tuple[Board | None, int]:
        low, high = (self.low, self.high) if wanted is None else (wanted, wanted)
        layout = self.draw_layout(generator)
        floor = list(bits(layout.floor))
        if len(floor) <= self.boxes:
            return None, 0
        if comb(len(floor), self.boxes) * len(floor) > _MAX_DRAW_STATES:
            return pulled_level(layout, self.boxes, (low, high), self.max_states, generator)
        targets = sum(1 << cell for cell in generator.sample(floor, self.boxes))
        layers = list(distance_layers(layout, targets, high))
        if len(layers) <= low:
            return None, len(layers) - 1
        length = generator.randint(low, len(layers) - 1)
        box_mask, player = generator.choice(layers[length])
        return Board(layout, targets, box_mask, player), length

    def list_rest(self, wanted: int | None) -> list[tuple[Board, int]]:
        """Every level of a small setting in random order, mirror images among them; empty for a large one."""
        layouts = self.layouts or list_layouts(self.height, self.width, self.inner_walls)
        if layouts is None or sum(count_positions(layout, self.boxes) for layout in layouts) > _MAX_LISTED_STATES:
            return []
        low, high = (self.low, self.high) if wanted is None else (wanted, wanted)
        found = []
        for layout in layouts:
            for board, length in levels_of_layout(layout, self.boxes, max_solution=high):
                self.largest = max(self.largest, length)
                if length >= low:
                    found.append((board, length))
        self.exact = True
        python_generator(self.seed, "sokoban", "levels", "rest").shuffle(found)
        return found

    def explain(self, count: int, levels: list[Level], wanted: int | None) -> str:
        """Why there is no further level, and the way out."""
        size, boxes = f"{self.height}×{self.width}", "one box" if self.boxes == 1 else f"{self.boxes} boxes"
        least = self.low if wanted is None else wanted
        searched = (
            ""
            if self.exact
            else f" ({self.max_attempts} draws in a row brought nothing new; max_attempts={self.max_attempts})"
        )
        if self.largest < least:
            name = "min_solution" if wanted is None else "lengths"
            return (
                f"{name}={least}: no {size} level with {boxes} needs {least} moves or more under these walls"
                f"{searched}; largest found: {self.largest}. Lower {name}, or raise height, width or boxes."
            )
        same = [level for level in levels if wanted is None or level.solution_length == wanted]
        length = f"{least} to {self.high or 'any number of'} moves" if wanted is None else f"exactly {wanted} moves"
        return (
            f"count={count}: found only {len(same)} distinct {size} levels with {boxes} and a solution of {length}"
            f"{searched}; largest solution found: {self.largest}. Lower count, widen the solution lengths or "
            "inner_walls, or raise height, width or boxes."
        )


def count_positions(layout: Layout, boxes: int) -> int:
    """Positions of so many boxes and as many targets."""
    floor = layout.floor.bit_count()
    return comb(floor, boxes) ** 2 * floor
