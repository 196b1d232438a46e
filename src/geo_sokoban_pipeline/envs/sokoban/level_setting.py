"""What kind of levels is wanted, checked before the first draw, and the walls that such levels stand on.

Every layout a setting yields has a floor in one piece; random ones have a closed border too.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from geo_sokoban_pipeline.envs.sokoban.backward import (
    MAX_ENUMERATED_WALLS,
    bordered_layout,
    count_wall_choices,
    default_inner_walls,
    enumerate_layouts,
)
from geo_sokoban_pipeline.envs.sokoban.board import Board
from geo_sokoban_pipeline.envs.sokoban.layout import Layout
from geo_sokoban_pipeline.envs.sokoban.symmetry import SYMMETRIES, transformed_size

_MAX_LAYOUT_DRAWS = 10_000


@dataclass(frozen=True)
class LevelSetting:
    """What `generate_levels` was asked for, under its names; low and high are its bounds on the solution."""

    height: int
    width: int
    boxes: int
    low: int
    high: int | None
    inner_walls: tuple[int, int]
    layouts: tuple[Layout, ...] | None

    @classmethod
    def of(
        cls,
        height: int,
        width: int,
        boxes: int,
        low: int,
        high: int | None,
        inner_walls: tuple[int, int] | None,
        layouts: Iterable[Layout | Board] | None,
        lengths: Sequence[int] | None,
    ) -> LevelSetting:
        """A checked setting; errors name the argument of `generate_levels`, its value and the way out."""
        for name, value, least in (
            ("height", height, 3),
            ("width", width, 3),
            ("boxes", boxes, 1),
            ("min_solution", low, 1),
        ):
            if value < least:
                raise ValueError(f"{name}={value}: must be at least {least}")
        walls = default_inner_walls(height, width) if inner_walls is None else (inner_walls[0], inner_walls[1])
        setting = cls(height, width, boxes, low, high, walls, _as_layouts(layouts, height, width))
        setting._check_lengths(lengths)
        setting._check_room()
        return setting

    def _check_lengths(self, lengths: Sequence[int] | None) -> None:
        if self.high is not None and self.high < self.low:
            raise ValueError(
                f"max_solution={self.high} is below min_solution={self.low}; raise max_solution or lower min_solution"
            )
        if lengths is None:
            return
        if not lengths:
            raise ValueError("lengths=[]: give at least one solution length, or None for any")
        for length in lengths:
            if length < self.low or (self.high is not None and length > self.high):
                raise ValueError(
                    f"lengths: {length} lies outside min_solution={self.low} … max_solution={self.high}; "
                    "widen the bounds"
                )

    def _check_room(self) -> None:
        inner = (self.height - 2) * (self.width - 2)
        low, high = self.inner_walls
        if not 0 <= low <= high <= inner:
            raise ValueError(f"inner_walls=({low}, {high}): must rise from 0 to at most the {inner} inner cells")
        if self.boxes + 1 > inner - low:
            raise ValueError(
                f"boxes={self.boxes}: {self.height}×{self.width} with {low} inner walls has {inner - low} floor cells, "
                "and boxes and player need one each; lower boxes, or raise height or width"
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

    def all_layouts(self) -> list[Layout] | None:
        """Every layout of the setting, None where they are too many to list."""
        if self.layouts is not None:
            return list(self.layouts)
        choices = count_wall_choices(self.height, self.width, self.inner_walls)
        return enumerate_layouts(self.height, self.width, self.inner_walls) if choices <= MAX_ENUMERATED_WALLS else None


def _as_layouts(layouts: Iterable[Layout | Board] | None, height: int, width: int) -> tuple[Layout, ...] | None:
    if layouts is None:
        return None
    chosen = tuple(item.layout if isinstance(item, Board) else item for item in layouts)
    if not chosen:
        raise ValueError("layouts=[]: no walls to draw levels on; give at least one layout, or None for random walls")
    for layout in chosen:
        if sorted((layout.height, layout.width)) != sorted((height, width)):
            raise ValueError(
                f"layouts: one is {layout.height}×{layout.width}, the levels are {height}×{width}; make the sizes equal"
            )
    return chosen
