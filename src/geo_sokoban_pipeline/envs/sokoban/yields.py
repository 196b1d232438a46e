"""How many levels a setting holds, counted without drawing any: by solution length, and by split.

Counts are exact, up to symmetry. Settings with too many layouts or positions to list in about a second have none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb

from geo_sokoban_pipeline.envs.sokoban.backward import levels_of_layout
from geo_sokoban_pipeline.envs.sokoban.generation import deal_layouts, known_layouts
from geo_sokoban_pipeline.envs.sokoban.layout import Layout
from geo_sokoban_pipeline.envs.splits import SPLITS, wanted_splits
from geo_sokoban_pipeline.options.sokoban import SokobanDataOptions

# About a second of listing.
_MAX_COUNTED_POSITIONS = 1_000_000


def setting_yield(options: SokobanDataOptions) -> dict[str, int] | None:
    """Distinct levels of the setting by solution length; None where they are too many to count."""
    layouts = _countable_layouts(options)
    return None if layouts is None else _count_levels(options, layouts)


def split_yields(options: SokobanDataOptions) -> dict[str, int] | None:
    """Distinct levels that each split can have; None where they are too many to count.

    Where there are fewer layouts than splits, all splits share the levels of all layouts.
    """
    layouts = _countable_layouts(options)
    if layouts is None:
        return None
    if len(layouts) < len(wanted_splits(options.shares)):
        return dict.fromkeys(SPLITS, sum(_count_levels(options, layouts).values()))
    parts = deal_layouts(options, layouts)
    return {split: sum(_count_levels(options, part).values()) for split, part in parts.items()}


def _countable_layouts(options: SokobanDataOptions) -> list[Layout] | None:
    layouts = known_layouts(options)
    if layouts is None or sum(_positions(layout, options.boxes) for layout in layouts) > _MAX_COUNTED_POSITIONS:
        return None
    return layouts


def _count_levels(options: SokobanDataOptions, layouts: Sequence[Layout]) -> dict[str, int]:
    found: Counter[int] = Counter()
    for layout in layouts:
        levels = levels_of_layout(layout, options.boxes, options.min_solution, options.max_solution)
        if any(layout.transform(symmetry) == layout for symmetry in range(1, 8)):
            # Only on symmetric walls can two of the listed levels be one.
            lengths = {board.canonical_hash: length for board, length in levels}
            found.update(lengths.values())
        else:
            found.update(length for _, length in levels)
    return {str(length): found[length] for length in sorted(found)}


def _positions(layout: Layout, boxes: int) -> int:
    floor = layout.floor.bit_count()
    return comb(floor, boxes) ** 2 * floor
