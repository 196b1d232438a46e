"""Parts of an evaluation's rows: finished episodes, solve rates with their intervals, pass@k.

A confidence interval lies in [0, 1] and contains the observed share. It has a positive width even if none or all are
solved, unlike the usual normal approximation.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    """

    row: Mapping[str, Any]
    metrics: Mapping[str, float]
    ret: float | None
    responses: Sequence[str] = ()
    tokens: int | None = None
    truncated: bool = False


# Two-sided 95 % quantile of the standard normal distribution.
Z_95 = 1.959964


def wilson_interval(successes: int, n: int, z: float = Z_95) -> tuple[float, float]:
    """Score interval of a share (Wilson, 1927); it assumes n independent trials.

    Eight lines instead of `scipy.stats`, whose import takes longer (1.8 CPU-seconds) than a whole command's start.

    Args:
        successes: trials that succeeded, in [0, n].
        n: number of trials; 0 gives (0, 1), as nothing is known.
        z: quantile of the standard normal distribution, > 0; 1.959964 is two-sided 95 %.

    Returns:
        (low, high), 0 <= low <= successes / n <= high <= 1.

    Raises:
        ValueError: successes outside [0, n], or z not positive.
    """
    if n < 0 or not 0 <= successes <= n:
        raise ValueError(f"successes={successes}, n={n}: successes must be in [0, n].")
    if z <= 0.0:
        raise ValueError(f"z={z}: it must be greater than 0.")
    if n == 0:
        return 0.0, 1.0
    share = successes / n
    spread = z * z / n
    centre = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / n + spread / (4 * n))
    # At the ends the bounds are 0 and 1 in exact arithmetic; rounding must not push the share out of its interval.
    return min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half))


@dataclass(frozen=True)
class EpisodeRecord:
    """Record of one episode in the evaluation, for every task.

    Attributes:
        prompt_id: of the prompt; episodes of one prompt share it.
        success: solved within its limits; failed and aborted episodes count as not solved.
        ret: episode reward; None if it was not graded.
        turns: responses that the environment was stepped with, 0 or more; truncated ones do not count.
        invalid_turns: those without a valid action.
    """

    prompt_id: str
    success: bool
    ret: float | None
    turns: int
    invalid_turns: int


def read_record(episode: FinishedEpisode) -> dict[str, Any]:
    """Fields of `EpisodeRecord` of a finished episode."""
    return {
        "prompt_id": str(episode.row["id"]),
        "success": episode.metrics.get("success", 0.0) >= 0.5,
        "ret": episode.ret,
        "turns": int(episode.metrics.get("turns", len(episode.responses))),
        "invalid_turns": int(episode.metrics.get("invalid_turns", 0.0)),
    }


def summarise_records(records: Sequence[EpisodeRecord]) -> dict[str, Any]:
    """Entries of a row of the summary, for every task.

    Returns:
        `episodes`, `solved`, `solve_rate`, `low`, `high`, `mean_return` (of graded episodes), `invalid_share` (of
        turns) and `pass_at_k` (None unless every prompt has two episodes or more). Without records rates are None and
        the interval is (0, 1).
    """
    turns = sum(record.turns for record in records)
    return {
        **count_solved([record.success for record in records]),
        "mean_return": mean_of([record.ret for record in records if record.ret is not None]),
        "invalid_share": sum(record.invalid_turns for record in records) / turns if turns else None,
        "pass_at_k": pass_at_k_by_prompt(records),
    }


def count_solved(successes: Sequence[bool], z: float = Z_95) -> dict[str, Any]:
    """`episodes`, `solved`, `solve_rate` (None without episodes) and its Wilson interval `low`, `high`."""
    solved = sum(successes)
    low, high = wilson_interval(solved, len(successes), z)
    return {
        "episodes": len(successes),
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
    return [1 << exponent for exponent in range(n.bit_length())] if n > 0 else []


def mean_pass_at_k(counts: Iterable[tuple[int, int]], ks: Sequence[int] | None = None) -> dict[str, float]:
    """pass@k averaged over prompts, keyed by k as text (JSON objects have no other keys).

    Args:
        counts: (n, c) of each prompt: responses and right ones.
        ks: values of k; None: the powers of two up to the smallest n.

    Returns:
        `{"1": …, "2": …}`; empty without prompts.

    Raises:
        ValueError: a k is larger than some prompt's n.
    """
    pairs = list(counts)
    if not pairs:
        return {}
    if ks is None:
        ks = powers_of_two(min(n for n, _ in pairs))
    return {str(k): math.fsum(pass_at_k(n, c, k) for n, c in pairs) / len(pairs) for k in ks}


def pass_at_k_by_prompt(records: Iterable[EpisodeRecord]) -> dict[str, float] | None:
    """pass@k over prompts for k = 1, 2, 4, … up to the fewest episodes of a prompt; None if that is below 2."""
    by_prompt: dict[str, list[bool]] = defaultdict(list)
    for record in records:
        by_prompt[record.prompt_id].append(record.success)
    if not by_prompt or min(map(len, by_prompt.values())) < 2:
        return None
    return mean_pass_at_k((len(successes), sum(successes)) for successes in by_prompt.values())
