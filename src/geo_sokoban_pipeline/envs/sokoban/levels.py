"""Level generator: solvable by construction, verified fewest moves, no level twice, the same in every process.

Level `i` is drawn from `derive_seed(seed, "sokoban", "levels", i)` alone; only the rule that no level comes twice
looks at the ones before it. A setting that holds fewer levels than wanted says so, with what it found and the way
out.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import comb

from geo_sokoban_pipeline.envs.sokoban.backward import distance_layers, levels_of_layout
from geo_sokoban_pipeline.envs.sokoban.board import Board
from geo_sokoban_pipeline.envs.sokoban.layout import Layout, bits
from geo_sokoban_pipeline.envs.sokoban.level_setting import LevelSetting
from geo_sokoban_pipeline.envs.sokoban.reverse_play import pulled_level
from geo_sokoban_pipeline.seeding import derive_seed, python_generator

# Positions per choice of targets up to which a draw searches them all; beyond, reverse play and the solver are faster.
_MAX_DRAW_STATES = 4_000
# Positions of a whole setting up to which the generator lists every level once random draws bring nothing new.
_MAX_LISTED_STATES = 3_000_000


@dataclass(frozen=True, slots=True)
class Level:
    """A board to be solved, the seed it was drawn from, and its fewest moves (None where no solver settled it)."""

    board: Board
    seed: int
    solution_length: int | None


class LevelsExhaustedError(ValueError):
    """A setting holds fewer distinct levels than wanted, or random draws stopped finding new ones.

    Attributes:
        levels: the levels found before.
        largest: largest number of fewest moves that was met, 0 if none.
    """

    def __init__(self, message: str, levels: list[Level], largest: int) -> None:
        super().__init__(message)
        self.levels = levels
        self.largest = largest


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
    layouts: Iterable[Layout | Board] | None = None,
    lengths: Sequence[int] | None = None,
    max_states: int = 5_000,
    max_attempts: int = 200,
    return_fewer: bool = False,
) -> list[Level]:
    """Distinct levels with connected floor; a shorter call's levels are the first of a longer call's.

    Args:
        count: levels wanted.
        seed: root seed; replaces the `rng_seed` of the seed system, whose levels depended on Python's string hashing.
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
        max_states: search limit of the solver that verifies levels too large to enumerate; what it cannot finish is
            discarded.
        max_attempts: draws in a row without a new level after which the setting counts as exhausted (small ones are
            then listed completely first).
        return_fewer: return what there is instead of raising `LevelsExhaustedError`.

    Returns:
        Levels with pairwise different canonical hashes and exact solution lengths.

    Raises:
        LevelsExhaustedError: there are too few levels and `return_fewer` is off.
        ValueError: a value is out of range; the message names it.
    """
    if count < 0:
        raise ValueError(f"count={count}: must be at least 0")
    setting = LevelSetting.of(height, width, boxes, min_solution, max_solution, inner_walls, layouts, lengths)
    source = _Source(setting, seed, max_states, max_attempts)
    levels: list[Level] = []
    for index in range(count):
        wanted = lengths[index % len(lengths)] if lengths else None
        level = source.draw(index, wanted)
        if level is not None:
            levels.append(level)
        elif not return_fewer:
            raise LevelsExhaustedError(source.explain(count, levels, wanted), levels, source.largest)
        elif wanted is None or source.empty.issuperset(lengths or ()):
            break
    return levels


@dataclass
class _Source:
    """Draws levels one by one and remembers which it gave."""

    setting: LevelSetting
    seed: int
    max_states: int
    max_attempts: int
    largest: int = 0
    exact: bool = False
    given: set[str] = field(default_factory=set)
    empty: set[int | None] = field(default_factory=set)
    rest: dict[int | None, list[tuple[Board, int]]] = field(default_factory=dict)

    def draw(self, index: int, wanted: int | None) -> Level | None:
        """A new level with the wanted length (None: any within bounds), or None where there is none left."""
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
        setting = self.setting
        low, high = (setting.low, setting.high) if wanted is None else (wanted, wanted)
        layout = setting.draw_layout(generator)
        floor = list(bits(layout.floor))
        if len(floor) <= setting.boxes:
            return None, 0
        if comb(len(floor), setting.boxes) * len(floor) > _MAX_DRAW_STATES:
            return pulled_level(layout, setting.boxes, (low, high), self.max_states, generator)
        targets = sum(1 << cell for cell in generator.sample(floor, setting.boxes))
        layers = list(distance_layers(layout, targets, high))
        if len(layers) <= low:
            return None, len(layers) - 1
        length = generator.randint(low, len(layers) - 1)
        box_mask, player = generator.choice(layers[length])
        return Board(layout, targets, box_mask, player), length

    def list_rest(self, wanted: int | None) -> list[tuple[Board, int]]:
        """Every level of a small setting in random order, mirror images among them; empty for a large one."""
        setting = self.setting
        layouts = setting.all_layouts()
        if layouts is None or sum(_positions(layout, setting.boxes) for layout in layouts) > _MAX_LISTED_STATES:
            return []
        low, high = (setting.low, setting.high) if wanted is None else (wanted, wanted)
        found = []
        for layout in layouts:
            for board, length in levels_of_layout(layout, setting.boxes, max_solution=high):
                self.largest = max(self.largest, length)
                if length >= low:
                    found.append((board, length))
        self.exact = True
        python_generator(self.seed, "sokoban", "levels", "rest").shuffle(found)
        return found

    def explain(self, count: int, levels: list[Level], wanted: int | None) -> str:
        """Why there is no further level, and the way out."""
        setting = self.setting
        size, boxes = f"{setting.height}×{setting.width}", _boxes(setting.boxes)
        least = setting.low if wanted is None else wanted
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
        length = f"{least} to {setting.high or 'any number of'} moves" if wanted is None else f"exactly {wanted} moves"
        return (
            f"count={count}: found only {len(same)} distinct {size} levels with {boxes} and a solution of {length}"
            f"{searched}; largest solution found: {self.largest}. Lower count, widen the solution lengths or "
            "inner_walls, or raise height, width or boxes."
        )


def _positions(layout: Layout, boxes: int) -> int:
    floor = layout.floor.bit_count()
    return comb(floor, boxes) ** 2 * floor


def _boxes(number: int) -> str:
    return "one box" if number == 1 else f"{number} boxes"
