"""Metrics of evaluation: paired tests of two policies, and numbers of responses.

All are pure functions. A test compares the same prompts only, matched by `task_id`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from geo_sokoban_pipeline.envs.metrics import FinishedEpisode, mean_of
from geo_sokoban_pipeline.rewards.text import repetition
from geo_sokoban_pipeline.seeding import derive_seed
from geo_sokoban_pipeline.trajectories.types import Trajectory

# Paired comparison of two policies on the same prompts: does one solve more than the other?


Successes = Mapping[str, Sequence[bool]]  # by the prompt's content hash: success of each of its episodes
LEVEL = 0.05  # of the tests; the interval holds the other 95 %
_RESAMPLES = 10_000
_CHUNK = 500  # resamples at a time, which bounds the memory


@dataclass(frozen=True)
class PairedTest:
    """Comparison of two policies on the prompts that both were evaluated on.

    Attributes:
        prompts: number of these prompts.
        difference: solve rate of the second policy minus that of the first, all prompts weighted equally.
        low, high: 95 % interval of the difference, by a bootstrap over the prompts.
        gained, lost: prompts that only the second policy solved, and only the first; None where a prompt has several
            episodes.
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


def paired_test(first: Successes, second: Successes) -> PairedTest | None:
    """Compare two policies on the prompts that both were evaluated on; None where there are none."""
    shared = sorted(name for name in first if name in second and first[name] and second[name])
    if not shared:
        return None
    gaps = np.array([np.mean(second[name]) - np.mean(first[name]) for name in shared])
    low, high = _bootstrap(gaps)
    single = all(len(successes[name]) == 1 for successes in (first, second) for name in shared)
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


def read_finished(trajectory: Trajectory, row: Mapping[str, Any]) -> FinishedEpisode:
    """`FinishedEpisode` of a policy's episode."""
    return FinishedEpisode(
        row=row,
        metrics=trajectory.metrics,
        ret=trajectory.reward,
        responses=[turn.text for turn in trajectory.turns if turn.role == "assistant"],
        tokens=int(trajectory.loss_mask.sum()),
        truncated=trajectory.status == "truncated",
    )


def response_metrics(
    response_lengths: Sequence[int], truncated: Sequence[bool], texts: Sequence[str]
) -> dict[str, float | None]:
    """Length, truncation and repetition of responses, under slime's names without their group prefix.

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
