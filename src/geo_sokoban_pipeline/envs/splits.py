"""The splits of every task, the assignment of distinct items to them, and the count of what they share.

All choices are drawn from the data's own seed; none depends on the order of a set.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from geo_sokoban_pipeline.config.data import SplitShares

SPLITS: tuple[str, ...] = ("train", "validation", "eval")
T = TypeVar("T")


def share_out(items: Sequence[T], shares: SplitShares, generator: random.Random) -> dict[str, list[T]]:
    """Assign distinct items to the splits in random order, as near to the shares as whole items allow.

    Every split with a share above 0 gets at least one item if there are enough.
    """
    order = list(items)
    generator.shuffle(order)
    sizes = _sizes(len(order), {split: getattr(shares, split) for split in SPLITS})
    assigned, start = {}, 0
    for split in SPLITS:
        assigned[split] = order[start : start + sizes[split]]
        start += sizes[split]
    return assigned


def wanted_splits(shares: SplitShares) -> list[str]:
    """Splits with a share above 0."""
    return [split for split in SPLITS if getattr(shares, split) > 0]


def overlaps(rows: Mapping[str, Iterable[str]]) -> int:
    """How many keys (hashes of layouts, levels or problems) occur in more than one split."""
    seen = Counter(key for keys in rows.values() for key in set(keys))
    return sum(1 for times in seen.values() if times > 1)


def _sizes(count: int, shares: Mapping[str, float]) -> dict[str, int]:
    """Whole numbers nearest to the shares that add up to `count` (largest remainders)."""
    exact = {split: share * count for split, share in shares.items()}
    sizes = {split: int(value + 1e-9) for split, value in exact.items()}
    for split in sorted(shares, key=lambda name: sizes[name] - exact[name])[: count - sum(sizes.values())]:
        sizes[split] += 1
    for split, share in shares.items():
        if share > 0 and sizes[split] == 0:
            largest = max(sizes, key=lambda name: sizes[name])
            if sizes[largest] > 1:
                sizes[largest] -= 1
                sizes[split] = 1
    return sizes
