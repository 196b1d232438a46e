"""Parts of an evaluation's rows: finished episodes, solve rates with their intervals, pass@k.

Evidence counts once: episodes of one cluster (copies of a prompt, several samples of it, levels between the same walls)
are no independent trials, so every interval is one over clusters. It lies in [0, 1], contains the observed share, and
has a positive width even if none or all are solved.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from geo_sokoban_pipeline.config.base import refuse_first
from geo_sokoban_pipeline.seeding import derive_seed

if TYPE_CHECKING:
    import numpy as np

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class FinishedEpisode:
    """A finished episode.

    Attributes:
        row: of the prompts.
        metrics: the environment's numbers; empty if the episode failed.
        ret: reward; None if it was not graded.
        responses: texts, in order.
        tokens: number of sampled tokens; None for baselines.
        truncated: cut off at a limit.
        cluster: episodes with equal values are no independent evidence (`Task.cluster_of`); empty: those of one prompt.
    """

    row: Mapping[str, Any]
    metrics: Mapping[str, float]
    ret: float | None
    responses: Sequence[str] = ()
    tokens: int | None = None
    truncated: bool = False
    cluster: str = ""


# Two-sided 95 % quantile of the standard normal distribution.
Z_95 = 1.959964


def wilson_interval(successes: float, n: int, z: float = Z_95) -> tuple[float, float]:
    """Score interval of a share (Wilson, 1927); it assumes n independent trials.

    Eight lines instead of `scipy.stats`, whose import takes longer (1.8 CPU-seconds) than a whole command's start.

    Args:
        successes: trials that succeeded, in [0, n]; a fraction where trials are clusters.
        n: number of trials; 0 gives (0, 1), as nothing is known.
        z: quantile of the standard normal distribution, > 0; 1.959964 is two-sided 95 %.

    Returns:
        (low, high), 0 <= low <= successes / n <= high <= 1.

    Raises:
        ValueError: successes outside [0, n], or z not positive.
    """
    refuse_first(
        (not 0 <= successes <= n, f"successes={successes}, n={n}: successes must be in [0, n]."),
        (z <= 0.0, f"z={z}: it must be greater than 0."),
    )
    if n == 0:
        return 0.0, 1.0
    share = successes / n
    spread = z * z / n
    centre = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / n + spread / (4 * n))
    # At the ends the bounds are 0 and 1 in exact arithmetic; rounding must not push the share out of its interval.
    return min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half))


_FEWEST, _MOST = 20, 2000  # clusters of a bootstrap; above, the t interval is as good and needs no resamples
_SEEN = 5  # with fewer clusters that hold a success, or a failure, their spread says too little
_RESAMPLES = 2000
_FARTHEST = 36.0  # log-odds of a bound; the share is then 0 or 1 up to the last bits
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # two-sided 95 % quantiles of Student's t


def cluster_interval(successes: Sequence[float], sizes: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the share Σ successes / Σ sizes, where only whole clusters are independent of each other.

    From 20 clusters on it is a cluster bootstrap: whole clusters are drawn with replacement, and the log-odds of the
    share, divided by their cluster-robust standard error, give the quantiles (the bootstrap-t of Davison and Hinkley,
    1997, section 5.2; the scale keeps it in [0, 1]). Where fewer than five clusters hold a success, or a failure, it
    reaches as far as the Wilson interval over clusters. It holds the true share in 92 to 97 % of the simulated samples
    (`tests/evaluation/test_metrics.py`), also where hardly any is solved. Percentiles of the resampled shares would be
    simpler, but do so in 83 to 93 %.

    Below 20 clusters, and where too many resamples have no or only successes, it is Student's t interval of the same
    log-odds: one degree of freedom less than clusters, the variance by the jackknife over clusters (CV3 of MacKinnon,
    Nielsen and Webb, 2023). Equally large clusters that are solved as a whole or not at all are single trials and have
    the Wilson interval over clusters; so do clusters with equal shares, whose spread says nothing.

    Args:
        successes: of each cluster, in [0, its size].
        sizes: of each cluster, above 0.

    Returns:
        (low, high), 0 <= low <= share <= high <= 1; (0, 1) without clusters. Equal for equal clusters.
    """
    clusters, total = len(sizes), math.fsum(sizes)
    if not clusters:
        return 0.0, 1.0
    share = min(1.0, math.fsum(successes) / total)
    trials = len(set(sizes)) == 1 and all(won in (0, size) for won, size in zip(successes, sizes, strict=True))
    rests = [won - share * size for won, size in zip(successes, sizes, strict=True)]
    if trials or max(map(abs, rests)) < 1e-9 * total:
        return wilson_interval(share * clusters, clusters)
    variance = (clusters - 1) / clusters
    variance *= math.fsum((rest / (total - size)) ** 2 for rest, size in zip(rests, sizes, strict=True))
    odds, slope = math.log(share / (1 - share)), share * (1 - share)
    reach = _t_95(clusters - 1) * math.sqrt(variance) / slope
    low, high = odds - reach, odds + reach
    if _FEWEST <= clusters <= _MOST:
        error = math.sqrt(clusters / (clusters - 1) * math.fsum(rest * rest for rest in rests)) / total / slope
        least, most = _resampled_t(successes, sizes, share)
        low = odds - most * error if math.isfinite(most) else low
        high = odds - least * error if math.isfinite(least) else high
    low, high = max(low, -_FARTHEST), min(high, _FARTHEST)  # two clusters of very unequal size may reach farther
    low, high = min(share, 1 / (1 + math.exp(-low))), max(share, 1 / (1 + math.exp(-high)))
    solved, failed = sum(won > 0 for won in successes), sum(map(operator.lt, successes, sizes))
    if clusters >= _FEWEST and min(solved, failed) < _SEEN:
        least, most = wilson_interval(share * clusters, clusters)
        low, high = min(low, least), max(high, most)
    return low, high


def _t_95(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t (Abramowitz and Stegun, 1964, 26.7.5); `scipy.stats` loads too slowly."""
    if freedom <= len(_T_95):
        return _T_95[freedom - 1]
    return Z_95 + (Z_95**3 + Z_95) / (4 * freedom) + (5 * Z_95**5 + 16 * Z_95**3 + 3 * Z_95) / (96 * freedom**2)


def _resampled_t(successes: Sequence[float], sizes: Sequence[float], share: float) -> tuple[float, float]:
    """2.5 % and 97.5 % quantiles of the studentised log-odds of resampled clusters; infinite where most have none."""
    import numpy as np

    drawn = _draw_clusters(len(sizes))
    won, size = np.asarray(successes, float), np.asarray(sizes, float)
    sums = drawn @ np.stack([won, size, won * won, won * size, size * size], axis=1)
    wins, total, squares, products, square_sizes = sums.T
    shares = wins / total
    spread = np.maximum(squares - 2 * shares * products + shares**2 * square_sizes, 0) * len(sizes) / (len(sizes) - 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = np.sqrt(spread) / total / (shares * (1 - shares))
        values = (np.log(shares / (1 - shares)) - math.log(share / (1 - share))) / errors
    values[wins <= 0], values[wins >= total] = -np.inf, np.inf
    at = round(0.025 * _RESAMPLES)
    ordered = np.partition(np.where(np.isnan(values), 0.0, values), (at - 1, -at))
    return float(ordered[at - 1]), float(ordered[-at])


@lru_cache(maxsize=8)
def _draw_clusters(clusters: int) -> np.ndarray:
    """(resamples, clusters) float64: how often each cluster is in a resample; the same for equally many clusters."""
    import numpy as np

    generator = np.random.default_rng(derive_seed(0, "cluster bootstrap", clusters))
    return generator.multinomial(clusters, np.full(clusters, 1 / clusters), size=_RESAMPLES).astype(float)


@dataclass(frozen=True)
class EpisodeRecord:
    """Record of one episode in the evaluation, for every task.

    Attributes:
        prompt_id: of the prompt; episodes of one prompt share it.
        success: solved within its limits; failed and aborted episodes count as not solved.
        ret: episode reward; None if it was not graded.
        turns: responses that the environment was stepped with, 0 or more; truncated ones do not count.
        invalid_turns: those without a valid action.
        cluster: episodes with equal values are no independent evidence; empty: those of one prompt.
    """

    prompt_id: str
    success: bool
    ret: float | None
    turns: int
    invalid_turns: int
    cluster: str = field(default="", kw_only=True)


def read_record(episode: FinishedEpisode) -> dict[str, Any]:
    """Fields of `EpisodeRecord` of a finished episode."""
    return {
        "prompt_id": str(episode.row["id"]),
        "cluster": episode.cluster,
        "success": episode.metrics.get("success", 0.0) >= 0.5,
        "ret": episode.ret,
        "turns": int(episode.metrics.get("turns", len(episode.responses))),
        "invalid_turns": int(episode.metrics.get("invalid_turns", 0.0)),
    }


def summarise_records(records: Sequence[EpisodeRecord]) -> dict[str, Any]:
    """Entries of a row of the summary, for every task.

    Returns:
        Those of `count_solved`, `mean_return` (of graded episodes), `invalid_share` (of turns) and `pass_at_k` (None
        unless every prompt has two episodes or more). Without records rates are None and the interval is (0, 1).
    """
    turns = sum(record.turns for record in records)
    return {
        **count_solved([record.success for record in records], clusters_of(records)),
        "mean_return": mean_of([record.ret for record in records if record.ret is not None]),
        "invalid_share": sum(record.invalid_turns for record in records) / turns if turns else None,
        "pass_at_k": pass_at_k_by_prompt(records),
    }


def clusters_of(records: Iterable[EpisodeRecord]) -> list[str]:
    """Cluster of each record, for `count_solved`."""
    return [record.cluster or record.prompt_id for record in records]


def count_solved(successes: Sequence[bool], clusters: Sequence[str]) -> dict[str, Any]:
    """`episodes`, `clusters`, `solved`, `solve_rate` (None without episodes) and its 95 % interval `low`, `high`.

    Args:
        clusters: of each episode; those of one cluster are one piece of evidence.
    """
    won: dict[str, int] = defaultdict(int)
    sizes: dict[str, int] = defaultdict(int)
    for name, success in zip(clusters, successes, strict=True):
        won[name] += bool(success)
        sizes[name] += 1
    low, high = cluster_interval(list(won.values()), list(sizes.values()))
    solved = sum(won.values())
    return {
        "episodes": len(successes),
        "clusters": len(sizes),
        "solved": solved,
        "solve_rate": solved / len(successes) if successes else None,
        "low": low,
        "high": high,
    }


def mean_of(values: Sequence[float]) -> float | None:
    """Arithmetic mean; None of nothing."""
    return math.fsum(values) / len(values) if values else None


# pass@k: the chance that at least one of k responses is right, estimated without bias from n >= k responses.


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate `1 - C(n - c, k) / C(n, k)` for one prompt (arXiv 2107.03374, eq. 1), in [0, 1].

    Args:
        n: responses sampled, 1 or more.
        c: right ones among them, in [0, n].
        k: responses of which one must be right, in [1, n].
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"n={n}, c={c}, k={k}: c must be in [0, n] and k in [1, n].")
    # Exact integers: the quotient of two large binomials loses nothing, unlike a product of n factors.
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def powers_of_two(n: int) -> list[int]:
    """1, 2, 4, … up to n."""
    return [1 << exponent for exponent in range(n.bit_length())]


def mean_pass_at_k(counts: Iterable[tuple[int, int]]) -> dict[str, float]:
    """pass@k averaged over prompts for the powers of two up to the smallest n, keyed by k as text for JSON.

    Args:
        counts: (n, c) of each prompt: responses and right ones.

    Returns:
        `{"1": …, "2": …}`; empty without prompts.
    """
    if not (pairs := list(counts)):
        return {}
    return {
        str(k): math.fsum(pass_at_k(n, c, k) for n, c in pairs) / len(pairs)
        for k in powers_of_two(min(n for n, _ in pairs))
    }


def pass_at_k_by_prompt(records: Iterable[EpisodeRecord]) -> dict[str, float] | None:
    """pass@k over prompts for k = 1, 2, 4, … up to the fewest episodes of a prompt; None if that is below 2."""
    by_prompt: dict[str, list[bool]] = defaultdict(list)
    for record in records:
        by_prompt[record.prompt_id].append(record.success)
    if not by_prompt or min(map(len, by_prompt.values())) < 2:
        return None
    return mean_pass_at_k((len(successes), sum(successes)) for successes in by_prompt.values())
