"""Which level goes to training, validation and evaluation: no wall layout (up to symmetry) is ever in two splits.

Where a source has fewer layouts than splits, whole levels (up to symmetry) are dealt out instead, and the rule is kept
with every row. All choices are drawn from the data's own seed; none depends on the order of a set.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

from geo_sokoban_pipeline.envs.sokoban.level_rows import LevelRow
from geo_sokoban_pipeline.envs.splits import SPLITS, share_out, wanted_splits
from geo_sokoban_pipeline.options.data import SplitCounts, SplitShares
from geo_sokoban_pipeline.seeding import python_generator

SplitRule = Literal["layout", "level"]
T = TypeVar("T")


def split_levels(
    levels: Sequence[LevelRow], shares: SplitShares, counts: SplitCounts, seed: int
) -> tuple[list[tuple[LevelRow, str]], SplitRule]:
    """Splits of levels that were read from a file or the hub.

    Args:
        levels: any levels; equal ones (`collapse=rows`) stay together.
        shares: parts of the layouts, or of the levels where there are fewer layouts than splits.
        counts: most levels of each split; the ones left out are chosen so that solution lengths stay spread.
        seed: of the data.

    Returns:
        (level, split) in the order of the levels, and the rule that was used.
    """
    rule: SplitRule = (
        "layout" if len({level.board.layout_hash for level in levels}) >= len(wanted_splits(shares)) else "level"
    )
    keys = [level.board.layout_hash if rule == "layout" else level.board.canonical_hash for level in levels]
    dealt = share_out(sorted(set(keys)), shares, python_generator(seed, "sokoban", "splits", rule))
    split_of = {key: split for split, members in dealt.items() for key in members}
    kept: set[int] = set()
    for split in SPLITS:
        members = [index for index, key in enumerate(keys) if split_of[key] == split]
        generator = python_generator(seed, "sokoban", "pick", split)
        kept.update(
            spread_by_length(members, [levels[i].solution_length for i in members], getattr(counts, split), generator)
        )
    return [(level, split_of[keys[index]]) for index, level in enumerate(levels) if index in kept], rule


def spread_by_length(
    items: Sequence[T], lengths: Sequence[int | None], count: int | None, generator: random.Random
) -> list[T]:
    """Choose items so that every solution length comes as nearly equally often as there are items of it.

    Args:
        items: to choose from.
        lengths: solution length of each item; unknown ones form a class of their own.
        count: how many; None or more than there are: all.
    """
    if count is None or count >= len(items):
        return list(items)
    pools: dict[int, list[T]] = defaultdict(list)
    for item, length in zip(items, lengths, strict=True):
        pools[-1 if length is None else length].append(item)
    for length in sorted(pools):
        generator.shuffle(pools[length])
    chosen: list[T] = []
    while len(chosen) < count:
        for length in sorted(pools):
            if pools[length] and len(chosen) < count:
                chosen.append(pools[length].pop())
    return chosen


def collapse_rows(levels: Iterable[LevelRow], mode: str) -> list[LevelRow]:
    """Rows (state, next action) become levels.

    Args:
        levels: in the order of the source.
        mode: `levels` keeps the first state of each path (a row that the row before it leads to is part of its path),
            each once; `states` keeps every distinct state; `rows` keeps all.

    Returns:
        Levels, different under all symmetries but for `rows`; `copies` says how many rows each stands for.
    """
    if mode == "rows":
        return list(levels)
    counts: dict[str, int] = {}
    first: dict[str, LevelRow] = {}
    start, previous = "", None
    for level in levels:
        follows = mode == "levels" and previous is not None and leads_to(previous, level)
        if not follows:
            start = level.board.canonical_hash
            first.setdefault(start, level)
        counts[start] = counts.get(start, 0) + level.copies
        previous = level
    return [replace(level, copies=counts[key]) for key, level in first.items()]


def leads_to(before: LevelRow, after: LevelRow) -> bool:
    """Whether the labelled action of a row gives the board of the next one."""
    action = labelled_action(before.columns)
    return action is not None and before.board.move(action).board == after.board


def labelled_action(columns: Mapping[str, Any]) -> str | None:
    """The next action in `reward_model.ground_truth` (1 up, 2 down, 3 left, 4 right), None without such a label."""
    model = columns.get("reward_model")
    label = model.get("ground_truth") if isinstance(model, Mapping) else None
    number = label[0] if isinstance(label, list) and len(label) == 1 else label
    return {1: "up", 2: "down", 3: "left", 4: "right"}.get(number) if isinstance(number, int) else None
