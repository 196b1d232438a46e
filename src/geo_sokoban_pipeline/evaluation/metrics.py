"""Confidence intervals of solve rates.

An interval always lies in [0, 1] and holds the observed share, also for no or all solved, where the usual normal
approximation has width 0.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from geo_sokoban_pipeline.rewards.geo3k import repetition
from geo_sokoban_pipeline.seeding import derive_seed
from geo_sokoban_pipeline.trajectories.types import Trajectory

# Two-sided 95 % quantile of the standard normal distribution.
Z_95 = 1.959964


def wilson_interval(successes: int, n: int, z: float = Z_95) -> tuple[float, float]:
    """Score interval of a share (Wilson, 1927); it assumes n independent trials.

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


# pass@k: the chance that at least one of k replies is right, estimated without bias from n >= k replies.


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate `1 - C(n - c, k) / C(n, k)` for one prompt (arXiv 2107.03374, eq. 1), in [0, 1].

    Args:
        n: replies sampled, 1 or more.
        c: right ones among them, in [0, n].
        k: replies that a user would draw, in [1, n].
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
        counts: (n, c) of each prompt: replies and right ones.
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


# Paired comparison of two policies that played the same prompts: does one solve more than the other?


Outcomes = Mapping[str, Sequence[bool]]  # by the prompt's content hash: success of each of its episodes
LEVEL = 0.05  # of the tests; the interval holds the other 95 %
_RESAMPLES = 10_000
_CHUNK = 500  # resamples at a time, which bounds the memory


@dataclass(frozen=True)
class PairedTest:
    """What two policies did on the prompts that both played.

    Attributes:
        prompts: number of them.
        difference: solve rate of the second policy minus that of the first, over those prompts, each weighed alike.
        low, high: 95 % interval of the difference, by a bootstrap over the prompts.
        gained, lost: prompts that only the second policy solved, and only the first; None where prompts were played
            several times.
        p_value: of McNemar's test on `gained` and `lost`; None with them.
    """

    prompts: int
    difference: float
    low: float
    high: float
    gained: int | None
    lost: int | None
    p_value: float | None

    @property
    def is_change(self) -> bool:
        """Whether the policies differ at the 5 % level: by McNemar's test, else by the interval."""
        if self.p_value is not None:
            return self.p_value < LEVEL
        return self.low > 0 or self.high < 0


def paired_test(first: Outcomes, second: Outcomes) -> PairedTest | None:
    """Compare two policies on the prompts that both played; None where there are none.

    Args:
        first, second: by prompt; prompts that only one of them played are left out.
    """
    shared = sorted(name for name in first if name in second and first[name] and second[name])
    if not shared:
        return None
    gaps = np.array([np.mean(second[name]) - np.mean(first[name]) for name in shared])
    low, high = _bootstrap(gaps)
    single = all(len(outcomes[name]) == 1 for outcomes in (first, second) for name in shared)
    gained, lost = int((gaps > 0).sum()), int((gaps < 0).sum())
    return PairedTest(
        prompts=len(shared),
        difference=float(gaps.mean()),
        low=low,
        high=high,
        gained=gained if single else None,
        lost=lost if single else None,
        p_value=mcnemar(gained, lost) if single else None,
    )


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided mid-p value of McNemar's test: how likely so uneven a split of the changed prompts is by chance.

    The exact test takes the observed split for wholly as extreme as itself and finds too little; the mid-p counts half
    of it (Fagerland, Lydersen and Laake, 2013).
    """
    changed, least = gained + lost, min(gained, lost)
    if gained == lost:
        return 1.0
    tail = sum(math.comb(changed, k) for k in range(least + 1))
    return (2 * tail - math.comb(changed, least)) / 2**changed


def _bootstrap(gaps: np.ndarray) -> tuple[float, float]:
    """Percentile interval of the mean; the same for the same gaps."""
    generator = np.random.default_rng(derive_seed(0, "paired bootstrap", len(gaps)))
    means = np.concatenate(
        [gaps[generator.integers(0, len(gaps), (_CHUNK, len(gaps)))].mean(axis=1) for _ in range(_RESAMPLES // _CHUNK)]
    )
    low, high = np.quantile(means, [LEVEL / 2, 1 - LEVEL / 2])
    return float(low), float(high)


# Endings: what the evaluation sees of a finished episode, whether a policy or somebody else has played it.


Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Ending:
    """A finished episode.

    Attributes:
        row: of the prompts.
        metrics: the environment's numbers; empty where the episode failed.
        ret: reward; None where it was not graded.
        replies: texts, in order.
        tokens: written by the policy; None where no policy played.
        truncated: cut off at a limit.
    """

    row: Mapping[str, Any]
    metrics: Mapping[str, float]
    ret: float | None
    replies: Sequence[str] = ()
    tokens: int | None = None
    truncated: bool = False


@dataclass(frozen=True)
class Disguise:
    """A way to show a policy pictures that tell it nothing.

    Attributes:
        suffix: of the name of its row in the summary.
        blank: black pictures.
        prompts: as they are then played.
    """

    suffix: str
    blank: bool
    prompts: Rows


def read_ending(trajectory: Trajectory, row: Mapping[str, Any]) -> Ending:
    """Ending of an episode that a policy has played."""
    return Ending(
        row=row,
        metrics=trajectory.metrics,
        ret=trajectory.reward,
        replies=[turn.text for turn in trajectory.turns if turn.role == "assistant"],
        tokens=int(trajectory.loss_mask.sum()),
        truncated=trajectory.status == "truncated",
    )


# Evaluation metrics: played episodes in, rows of the evaluation summary out.


class PromptOutcome(Protocol):
    """An episode's prompt and whether it succeeded."""

    @property
    def prompt_id(self) -> str: ...

    @property
    def success(self) -> bool: ...


@dataclass(frozen=True)
class EpisodeRecord:
    """What the evaluation keeps of one episode.

    Attributes:
        prompt_id: of the level or problem; episodes of one prompt share it.
        success: solved within its limits; failed and aborted episodes count as not solved.
        ret: episode reward; None where it was not graded.
        steps: actions taken; None where the task has none.
        optimal_steps: fewest actions that solve the level; None where unknown.
        turns: replies that the environment was stepped with, 0 or more; one that was cut off is none.
        invalid_turns: those without a valid action.
    """

    prompt_id: str
    success: bool
    ret: float | None
    steps: int | None
    optimal_steps: int | None
    turns: int
    invalid_turns: int


def summarise_episodes(
    records: Sequence[EpisodeRecord], *, policy: str = "final", mode: str = "sampled", z: float = Z_95
) -> dict[str, Any]:
    """One row of the evaluation summary.

    Args:
        records: all episodes of one policy in one mode; none gives rates of None and the interval (0, 1).
        policy: name of the row, such as "warm_start", "final" or "random".
        mode: "sampled", "greedy", or "-" for players without the distinction.
        z: normal quantile of the Wilson intervals, which treat episodes as independent.

    Returns:
        `policy`, `mode`, `episodes`, `solved`, `solve_rate`, `low`, `high`, `mean_return` (graded episodes),
        `steps_over_optimal` (mean of steps / optimal over solved episodes that know both), `invalid_share` (of turns),
        `by_length` (see `by_length`) and `pass_at_k` (None unless every prompt was played twice or more).
    """
    graded = [record.ret for record in records if record.ret is not None]
    detours = [
        record.steps / record.optimal_steps
        for record in records
        if record.success and record.steps is not None and record.optimal_steps
    ]
    turns = sum(record.turns for record in records)
    return {
        "policy": policy,
        "mode": mode,
        **count_solved([record.success for record in records], z),
        "mean_return": mean_of(graded),
        "steps_over_optimal": mean_of(detours),
        "invalid_share": sum(record.invalid_turns for record in records) / turns if turns else None,
        "by_length": by_length(records, z=z),
        "pass_at_k": pass_at_k_by_prompt(records),
    }


def by_length(records: Iterable[EpisodeRecord], *, z: float = Z_95) -> list[dict[str, Any]]:
    """Solve rate per optimal length, ascending: `length`, `episodes`, `solved`, `solve_rate`, `low`, `high`.

    Episodes whose optimal length is unknown are in no row.
    """
    groups: dict[int, list[EpisodeRecord]] = defaultdict(list)
    for record in records:
        if record.optimal_steps is not None:
            groups[record.optimal_steps].append(record)
    return [
        {"length": length, **count_solved([record.success for record in groups[length]], z)}
        for length in sorted(groups)
    ]


def pass_at_k_by_prompt(records: Iterable[PromptOutcome]) -> dict[str, float] | None:
    """pass@k over prompts for k = 1, 2, 4, … up to the fewest episodes of a prompt; None if that is below 2."""
    outcomes: dict[str, list[bool]] = defaultdict(list)
    for record in records:
        outcomes[record.prompt_id].append(record.success)
    if not outcomes or min(len(successes) for successes in outcomes.values()) < 2:
        return None
    return mean_pass_at_k((len(successes), sum(successes)) for successes in outcomes.values())


def response_metrics(
    response_lengths: Sequence[int], truncated: Sequence[bool], texts: Sequence[str]
) -> dict[str, float | None]:
    """Length, truncation and repetition of responses, under the seed's names without their group prefix.

    Args:
        response_lengths: generated tokens (loss mask 1) of each episode.
        truncated: whether its status is `truncated`.
        texts: its decoded response.

    Returns:
        `response_len/mean`, `/median`, `/max`, `/min`, `truncated_ratio`, `repetition_frac`; None without episodes.
    """
    lengths = [float(length) for length in response_lengths]
    return {
        "response_len/mean": mean_of(lengths),
        "response_len/median": float(statistics.median(lengths)) if lengths else None,
        "response_len/max": max(lengths, default=None),
        "response_len/min": min(lengths, default=None),
        "truncated_ratio": mean_of([float(flag) for flag in truncated]),
        "repetition_frac": mean_of([float(repetition(text)) for text in texts]),
    }


def count_solved(outcomes: Sequence[bool], z: float = Z_95) -> dict[str, Any]:
    """`episodes`, `solved`, `solve_rate` (None without episodes) and its Wilson interval `low`, `high`."""
    solved = sum(outcomes)
    low, high = wilson_interval(solved, len(outcomes), z)
    return {
        "episodes": len(outcomes),
        "solved": solved,
        "solve_rate": solved / len(outcomes) if outcomes else None,
        "low": low,
        "high": high,
    }


def mean_of(values: Sequence[float]) -> float | None:
    """Arithmetic mean; None of nothing."""
    return math.fsum(values) / len(values) if values else None
