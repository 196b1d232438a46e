"""Rollouts for evaluation: a fixed number of episodes per prompt, without training; and numbers of responses.

An episode's seed follows from the run's seed, the prompt's id and the sample number, so equal runs evaluate equally.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.rollout import SamplingOptions
from geo_sokoban_pipeline.console import track
from geo_sokoban_pipeline.envs.base import Task
from geo_sokoban_pipeline.envs.metrics import FinishedEpisode, mean_of, summarise_records
from geo_sokoban_pipeline.formats import in_percent
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rewards.text import repetition
from geo_sokoban_pipeline.rollout.engines.base import EngineControl
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.rollout.rollout import RolloutFn, load_rollout_fn
from geo_sokoban_pipeline.seeding import derive_seed
from geo_sokoban_pipeline.tasks import task_of
from geo_sokoban_pipeline.trajectories.types import Trajectory

Rows = Sequence[dict[str, Any]]


def rollout_prompts(
    label: str,
    seed: int,
    options: TrainOptions,
    prompts: Rows,
    policy: Policy,
    engine: EngineControl,
    *,
    sampling: SamplingOptions,
    samples: int = 1,
    iteration: int = 0,
    blank: bool = False,
    rollout_fn: RolloutFn | None = None,
) -> list[Trajectory]:
    """Roll out prompts under the run's own limits.

    Args:
        label: first part of the trajectory ids, unique within a file.
        samples: episodes per prompt, numbered by `sample_index`.
        iteration: recorded as the iteration; the policy version comes from the engine.
        blank: replace every image by a black one of its size.
        rollout_fn: rolls out the episodes; None: `rollout.function`, in this process.

    Returns:
        Trajectories, prompt by prompt; `group_index` is the number of the prompt.
    """
    requests = [
        EpisodeRequest(
            trajectory_id=f"{label}/p{index:04d}/s{sample:02d}",
            prompt=row,
            group_index=index,
            sample_index=sample,
            seed=derive_seed(seed, "evaluation", str(row["id"]), sample),
        )
        for index, row in enumerate(prompts)
        for sample in range(samples)
    ]
    settings = RolloutSettings(
        options.env,
        options.reward,
        options.rollout,
        sampling,
        iteration,
        options.task,
        engine.version,
        blank_image if blank else None,
    )
    rollout_fn = rollout_fn or load_rollout_fn(options.rollout)
    with track(f"evaluating {label}", len(requests), keep=False) as progress:
        return rollout_fn(engine, policy, requests, settings, progress.advance)


def blank_image(image: Image.Image) -> Image.Image:
    """A black image of the same size."""
    return Image.new("RGB", image.size)


def summary_row(task: Task, records: Sequence[Any], *, policy: str, mode: str) -> dict[str, Any]:
    """One row of the evaluation summary: the columns of all tasks, then those of this task.

    Args:
        policy: name of the row, such as "warm_start", "final" or "random".
        mode: "sampled", "greedy", or "-" for agents without the distinction.
    """
    return {"policy": policy, "mode": mode, **summarise_records(records), **task.summarise(records)}


# Validation between iterations: the same held-out prompts every time, sampled and greedy.


START = "eval/start/"  # in place of `eval/validation/` in the metrics of version 0, before training
_PREFIX = "eval/validation/"


def start_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a validation of version 0 under the names `eval/start/…`."""
    return {name.replace(_PREFIX, START): value for name, value in metrics.items()}


def describe_rates(metrics: Mapping[str, float]) -> str:
    """Solve rates of a validation as text: `53.1 % sampled, 50.6 % greedy`."""
    rates = {mode: metrics.get(f"{_PREFIX}{mode}_solve_rate") for mode in ("sampled", "greedy")}
    return ", ".join(f"{in_percent(rate)} % {mode}" for mode, rate in rates.items() if rate is not None)


def validate_policy(
    run: str,
    seed: int,
    options: TrainOptions,
    prompts: Sequence[dict[str, Any]],
    policy: Policy,
    engine: EngineControl,
    version: int,
    rollout_fn: RolloutFn | None = None,
) -> tuple[list[Trajectory], dict[str, float]]:
    """Roll out validation prompts once sampled and once greedily.

    Args:
        rollout_fn: rolls out the episodes; None: `rollout.function`, in this process.

    Returns:
        Trajectories, and metrics `eval/validation/{sampled,greedy}_<name>`: the task's numbers, with `solve_rate`.
    """
    task = task_of(options.task).evaluated_in(options.env.factory)
    trajectories: list[Trajectory] = []
    metrics: dict[str, float] = {}
    for mode in ("sampled", "greedy"):
        sampling = SamplingOptions(greedy=True) if mode == "greedy" else options.evaluation_sampling
        episodes = rollout_prompts(
            f"{run}/e{version:05d}/{mode}",
            seed,
            options,
            prompts,
            policy,
            engine,
            sampling=sampling,
            iteration=version,
            rollout_fn=rollout_fn,
        )
        records = [task.record(read_finished(task, episode, prompts[episode.group_index])) for episode in episodes]
        numbers = task.validation_numbers(summary_row(task, records, policy="", mode=mode))
        metrics |= {f"{_PREFIX}{mode}_{name}": float(value) for name, value in numbers.items() if value is not None}
        trajectories += episodes
    return trajectories, metrics


def read_finished(task: Task, trajectory: Trajectory, row: Mapping[str, Any]) -> FinishedEpisode:
    """`FinishedEpisode` of a policy's episode."""
    return FinishedEpisode(
        row=row,
        metrics=trajectory.metrics,
        ret=trajectory.reward,
        responses=[turn.text for turn in trajectory.turns if turn.role == "assistant"],
        tokens=int(trajectory.loss_mask.sum()),
        truncated=trajectory.status == "truncated",
        cluster=task.cluster_of(row),
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
