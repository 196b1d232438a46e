"""Validation between iterations: the same held-out prompts every time, sampled and greedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from geo_sokoban_pipeline.evaluation.endings import read_ending
from geo_sokoban_pipeline.evaluation.playing import play_prompts
from geo_sokoban_pipeline.evaluation.scorers import scorer_of
from geo_sokoban_pipeline.options.rollout import SamplingOptions
from geo_sokoban_pipeline.options.training import TrainOptions
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.engines.base import RolloutEngine
from geo_sokoban_pipeline.rollout.episode import Play
from geo_sokoban_pipeline.trajectories import Trajectory

START = "eval/start/"  # what the metrics `eval/validation/…` of version 0, before training, are called
_PREFIX = "eval/validation/"


def start_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a validation of version 0 under the names `eval/start/…`."""
    return {name.replace(_PREFIX, START): value for name, value in metrics.items()}


def describe_rates(metrics: Mapping[str, float]) -> str:
    """Solve rates of a validation as people read them: `53.1 % sampled, 50.6 % greedy`."""
    rates = {mode: metrics.get(f"{_PREFIX}{mode}_solve_rate") for mode in ("sampled", "greedy")}
    return ", ".join(f"{rate:.1%}".replace("%", " %") + f" {mode}" for mode, rate in rates.items() if rate is not None)


def validate_policy(
    run: str,
    seed: int,
    options: TrainOptions,
    prompts: Sequence[dict[str, Any]],
    policy: Policy,
    engine: RolloutEngine,
    version: int,
    play: Play | None = None,
) -> tuple[list[Trajectory], dict[str, float]]:
    """Play validation prompts once sampled and once greedily.

    Args:
        play: plays the episodes; None: `rollout.function`, in this process.

    Returns:
        Trajectories, and metrics `eval/validation/{sampled,greedy}_<name>`: the scorer's numbers, with `solve_rate`.
    """
    scorer = scorer_of(options.task)
    trajectories: list[Trajectory] = []
    metrics: dict[str, float] = {}
    for mode in ("sampled", "greedy"):
        sampling = SamplingOptions(greedy=True) if mode == "greedy" else options.evaluation_sampling
        played = play_prompts(
            f"{run}/e{version:05d}/{mode}",
            seed,
            options,
            prompts,
            policy,
            engine,
            sampling=sampling,
            iteration=version,
            play=play,
        )
        records = [scorer.record(read_ending(episode, prompts[episode.group_index])) for episode in played]
        numbers = scorer.numbers(scorer.summarise(records, policy="", mode=mode))
        metrics |= {f"{_PREFIX}{mode}_{name}": float(value) for name, value in numbers.items() if value is not None}
        trajectories += played
    return trajectories, metrics
