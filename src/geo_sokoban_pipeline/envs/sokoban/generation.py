"""Generated levels, split from the start: a setting's layouts are dealt out first, then each split draws on its own.

So the splits are disjoint by construction, and a split's levels do not change when another split's count does. Where a
setting has fewer layouts than splits, its levels are dealt out instead. Solution lengths come equally often, as far as
the setting has levels of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from geo_sokoban_pipeline.envs.sokoban.backward import (
    MAX_ENUMERATED_WALLS,
    count_wall_choices,
    enumerate_layouts,
)
from geo_sokoban_pipeline.envs.sokoban.layout import Layout
from geo_sokoban_pipeline.envs.sokoban.level_rows import LevelRow, data_source_name
from geo_sokoban_pipeline.envs.sokoban.levels import Level, LevelsExhaustedError, generate_levels
from geo_sokoban_pipeline.envs.sokoban.splits import SplitRule, spread_by_length
from geo_sokoban_pipeline.envs.splits import SPLITS, share_out, wanted_splits
from geo_sokoban_pipeline.options.sokoban import SokobanDataOptions
from geo_sokoban_pipeline.seeding import derive_seed, python_generator

Draw = Callable[[int, Sequence[int] | None], list[Level]]
# Rounds in which levels of random layouts are drawn until every split has enough; each doubles the number.
_MAX_ROUNDS = 6


def generate_rows(options: SokobanDataOptions) -> tuple[list[tuple[LevelRow, str]], SplitRule]:
    """Levels of all splits, with the rule of the split.

    Raises:
        LevelsExhaustedError: a split's count is above what the setting yields; the message says how many that is.
    """
    counts = _counts(options)
    layouts = known_layouts(options)
    if layouts is None:
        drawn, rule = _from_random_layouts(options, counts)
    elif len(layouts) < len([split for split in SPLITS if counts[split]]):
        drawn, rule = _by_level(options, counts, layouts), "level"
    else:
        drawn, rule = _by_layout(options, counts, layouts), "layout"
    return [(_row(level, f"{split}_{i:05d}"), split) for split in SPLITS for i, level in enumerate(drawn[split])], rule


def known_layouts(options: SokobanDataOptions) -> list[Layout] | None:
    """Every wall layout of the setting, one per class of the symmetries; None where they are too many to list."""
    if count_wall_choices(options.height, options.width, options.inner_walls) > MAX_ENUMERATED_WALLS:
        return None
    layouts = enumerate_layouts(options.height, options.width, options.inner_walls)
    # Too little floor for boxes and player gives no level; such layouts would leave a split empty.
    return [layout for layout in layouts if layout.floor.bit_count() > options.boxes]


def deal_layouts(options: SokobanDataOptions, layouts: list[Layout]) -> dict[str, list[Layout]]:
    """The wall layouts of each split."""
    return share_out(layouts, options.shares, python_generator(options.seed, "sokoban", "splits", "layout"))


def spread_draw(draw: Draw, count: int, lengths: Sequence[int] | None) -> list[Level]:
    """Draw levels with equal counts per length; lengths that run out are made up for by the others.

    Args:
        draw: gives up to so many levels with lengths from a list in turn, fewer where lengths run out.
        count: levels wanted.
        lengths: solution lengths wanted; None: as they come.

    Returns:
        Up to `count` levels; fewer only if all lengths ran out.
    """
    if lengths is None:
        return draw(count, None)
    used_up: list[Level] = []
    open_lengths = list(lengths)
    while open_lengths:
        missing = count - len(used_up)
        levels = draw(missing, open_lengths)
        if len(levels) >= missing:
            return used_up + levels
        found = Counter(level.solution_length for level in levels)
        quota = {length: len(range(i, missing, len(open_lengths))) for i, length in enumerate(open_lengths)}
        short = [length for length in open_lengths if found[length] < quota[length]]
        used_up += [level for level in levels if level.solution_length in short]
        open_lengths = [length for length in open_lengths if length not in short]
    return used_up


def _by_layout(options: SokobanDataOptions, counts: dict[str, int], layouts: list[Layout]) -> dict[str, list[Level]]:
    parts = deal_layouts(options, layouts)
    drawn = {}
    for split in SPLITS:
        part = parts[split]
        drawn[split] = spread_draw(_draw(options, split, part), counts[split], _lengths(options)) if part else []
        _check(options, split, counts[split], drawn[split], f"on the {len(part)} wall layouts of this split")
    return drawn


def _by_level(options: SokobanDataOptions, counts: dict[str, int], layouts: list[Layout]) -> dict[str, list[Level]]:
    total = sum(counts.values())
    levels = spread_draw(_draw(options, "all", layouts), total, _lengths(options)) if layouts else []
    drawn: dict[str, list[Level]] = {}
    # Held-out splits choose first, so that they get equal counts per length.
    for split in reversed(SPLITS):
        generator = python_generator(options.seed, "sokoban", "deal", split)
        drawn[split] = spread_by_length(levels, [level.solution_length for level in levels], counts[split], generator)
        _check(options, split, counts[split], drawn[split], f"beyond those of other splits, {len(levels)} in all")
        taken = {level.board.canonical_hash for level in drawn[split]}
        levels = [level for level in levels if level.board.canonical_hash not in taken]
    return drawn


def _from_random_layouts(
    options: SokobanDataOptions, counts: dict[str, int]
) -> tuple[dict[str, list[Level]], SplitRule]:
    """Levels on random walls, routed by a hash of their layout until every split has enough."""
    draw, total, drawn = _draw(options, "all", None), sum(counts.values()), {}
    for round_number in range(_MAX_ROUNDS):
        levels = spread_draw(draw, (total * 5 // 4 + 8) << round_number, _lengths(options))
        pools: dict[str, list[Level]] = {split: [] for split in SPLITS}
        for level in levels:
            pools[_split_of(level.board.layout_hash, options)].append(level)
        drawn = {split: pools[split][: counts[split]] for split in SPLITS}
        if all(len(drawn[split]) == counts[split] for split in SPLITS):
            return drawn, "layout"
    for split in SPLITS:
        _check(options, split, counts[split], drawn[split], "on the layouts of this split; raise its share")
    return drawn, "layout"


def _split_of(layout_hash: str, options: SokobanDataOptions) -> str:
    point = derive_seed(options.seed, "sokoban", "split", layout_hash) / 2**63
    splits = wanted_splits(options.shares)
    for split in splits[:-1]:
        point -= getattr(options.shares, split)
        if point < 0:
            return split
    return splits[-1]


def _draw(options: SokobanDataOptions, name: str, layouts: Sequence[Layout] | None) -> Draw:
    def draw(count: int, lengths: Sequence[int] | None) -> list[Level]:
        return generate_levels(
            count,
            derive_seed(options.seed, "sokoban", name),
            options.height,
            options.width,
            options.boxes,
            options.min_solution,
            options.max_solution,
            inner_walls=options.inner_walls,
            layouts=layouts,
            lengths=lengths,
            return_fewer=True,
        )

    return draw


def _lengths(options: SokobanDataOptions) -> range | None:
    return range(options.min_solution, options.max_solution + 1) if options.equal_lengths else None


def _counts(options: SokobanDataOptions) -> dict[str, int]:
    counts = {split: getattr(options.counts, split) for split in SPLITS}
    for split, count in counts.items():
        if count is None:
            raise ValueError(
                f"sokoban.counts.{split}=null: how many levels to generate must be said. "
                f"Set sokoban.counts.{split} to a number; null is for levels that are read."
            )
        if count and not getattr(options.shares, split):
            raise ValueError(
                f"sokoban.counts.{split}={count}, but sokoban.shares.{split}=0: raise the share or set the count to 0."
            )
    return counts


def _check(options: SokobanDataOptions, split: str, count: int, found: list[Level], where: str) -> None:
    if len(found) >= count:
        return
    low, high = options.inner_walls
    largest = max((level.solution_length or 0 for level in found), default=0)
    raise LevelsExhaustedError(
        f"sokoban.counts.{split}={count}: {options.height}×{options.width} levels with {options.boxes} "
        f"{'box' if options.boxes == 1 else 'boxes'}, {low} to {high} inner walls and solutions of "
        f"{options.min_solution} to {options.max_solution} moves yield {len(found)} distinct ones {where}; "
        f"longest solution among them: {largest}. "
        f"Lower sokoban.counts.{split}, widen the solution lengths or inner_walls, or raise height, width or boxes.",
        found,
        largest,
    )


def _row(level: Level, row_id: str) -> LevelRow:
    return LevelRow(
        row_id,
        "generate",
        data_source_name(level.board),
        level.board,
        seed=level.seed,
        solution_length=level.solution_length,
    )
