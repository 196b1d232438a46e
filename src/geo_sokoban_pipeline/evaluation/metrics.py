"""Evaluation metrics: played episodes in, rows of the evaluation summary out.

Every solve rate is a quotient of counts that stand beside it, so a reader can check it and pool rows; what cannot be
measured is None, never 0.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from geo_sokoban_pipeline.evaluation.intervals import Z_95, wilson_interval
from geo_sokoban_pipeline.evaluation.passk import mean_pass_at_k
from geo_sokoban_pipeline.rewards.answer_text import repetition


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
