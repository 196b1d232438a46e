"""Paired comparison of two policies on the same prompts: does one solve more than the other?

All are pure functions. A test compares the same prompts only, matched by `task_id`, and its evidence are clusters of
prompts, as in the intervals of the rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from geo_sokoban_pipeline.envs.metrics import cluster_interval

Successes = Mapping[str, Sequence[Sequence[bool]]]  # by the prompt's key: for each of its rows, success of each episode
LEVEL = 0.05  # of the test


@dataclass(frozen=True)
class PairedTest:
    """Comparison of two policies on the prompts that both were evaluated on, their episodes paired in order.

    Attributes:
        prompts: number of these rows; copies of a prompt are rows of their own.
        difference: solve rate of the second policy minus that of the first, over all pairs.
        low, high: 95 % interval of the difference over clusters, see `cluster_interval`.
        gained, lost: pairs that only the second policy solved, and only the first.
        p_value: of McNemar's test over clusters.
        clusters: how many there are, 1 or more and at most the pairs.
    """

    prompts: int
    difference: float
    low: float
    high: float
    gained: int
    lost: int
    p_value: float
    clusters: int

    @property
    def is_change(self) -> bool:
        """Whether the policies differ at the 5 % level."""
        return self.p_value < LEVEL


def group_successes(episodes: Iterable[tuple[str, int, bool]]) -> dict[str, list[list[bool]]]:
    """Successes of episodes in order, for `paired_test`.

    Args:
        episodes: of each its prompt's key, the number of that prompt's row, and whether it succeeded.
    """
    found: dict[str, dict[int, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for key, row, success in episodes:
        found[key][row].append(success)
    return {key: list(rows.values()) for key, rows in found.items()}


def paired_test(first: Successes, second: Successes, clusters: Mapping[str, str] | None = None) -> PairedTest | None:
    """Compare two policies on the prompts that both were evaluated on; None where there are none.

    Args:
        clusters: of a prompt, by its key; a prompt without an entry is a cluster of its own.
    """
    pairs: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
    rows = 0
    for name in sorted(first.keys() & second.keys()):
        matched = [list(zip(*both, strict=False)) for both in zip(first[name], second[name], strict=False)]
        matched = [found for found in matched if found]
        pairs[(clusters or {}).get(name, name)] += [pair for found in matched for pair in found]
        rows += len(matched)
    if not (known := [found for found in pairs.values() if found]):
        return None
    sizes = [len(found) for found in known]
    gains = [sum(later - earlier for earlier, later in found) for found in known]
    low, high = _difference_interval(gains, sizes)
    every = [pair for found in known for pair in found]
    return PairedTest(
        prompts=rows,
        clusters=len(known),
        difference=sum(gains) / len(every),
        low=low,
        high=high,
        gained=every.count((False, True)),
        lost=every.count((True, False)),
        p_value=mcnemar(gains),
    )


def mcnemar(gains: Sequence[int]) -> float:
    """Two-sided mid-p value of McNemar's test over clusters: how likely so large a net gain is by chance.

    If the policies do not differ, each cluster's net gain is as likely with the other sign. The value is exact over all
    these signs, so it holds for few clusters too; for many its normal approximation is the statistic of Yang, Sun and
    Hardin (2010), (Σ gain)² / Σ gain², which simplifies that of Obuchowski (1998). With one pair in each cluster it is
    McNemar's test. The exact test takes what was observed for wholly as extreme as itself and finds too little; the
    mid-p counts half of it (Fagerland, Lydersen and Laake, 2013).

    Args:
        gains: of each cluster, the pairs that only the second policy solved minus those that only the first did.
    """
    import numpy as np

    sizes, total = [abs(gain) for gain in gains if gain], abs(sum(gains))
    if not total:
        return 1.0
    chances = np.ones(1)  # of the sums −Σ sizes, −Σ sizes + 2, … of the clusters so far
    for size in sizes:
        chances = np.pad(chances / 2, (0, size)) + np.pad(chances / 2, (size, 0))
    at = (sum(sizes) + total) // 2
    return float(min(1.0, 2 * chances[at + 1 :].sum() + chances[at]))


def _difference_interval(gains: Sequence[int], sizes: Sequence[int]) -> tuple[float, float]:
    """95 % interval of Σ gains / Σ sizes, in [−1, 1]: that of the share of pairs won, half of the ties among them.

    One cluster of mean size that gained and one that lost are added first (Bonett and Price, 2012): where few pairs
    changed, or none, their spread alone would say too little.
    """
    difference, mean = sum(gains) / sum(sizes), sum(sizes) / len(sizes)
    counted = [*zip(gains, sizes, strict=True), (mean, mean), (-mean, mean)]
    low, high = cluster_interval([(gain + size) / 2 for gain, size in counted], [size for _, size in counted])
    return min(difference, 2 * low - 1), max(difference, 2 * high - 1)
