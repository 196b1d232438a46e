"""Updating: one iteration's trajectories become optimizer steps. The loop and `update_*` run this same function, on
trajectories in memory or read back from disk, with the same result bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from geo_sokoban_pipeline.grpo.batching import split_steps
from geo_sokoban_pipeline.grpo.schedules import learning_rate
from geo_sokoban_pipeline.options.training import GrpoOptions, OptimizerOptions
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.seeding import python_generator
from geo_sokoban_pipeline.training.backends.base import TrainBackend
from geo_sokoban_pipeline.training.objectives import GrpoObjective
from geo_sokoban_pipeline.training.samples import TrainSample, build_sample, spread
from geo_sokoban_pipeline.training.scoring import newest_version
from geo_sokoban_pipeline.trajectories import Trajectory

_GAP = "train_rollout_logprob_abs_diff"
Scorer = Callable[[Sequence[TrainSample]], list[np.ndarray]]


class LogProbGapError(RuntimeError):
    """Trainer and engine disagree about log-probs by more than `grpo.max_log_prob_difference`."""


def update_policy(
    trajectories: Sequence[Trajectory],
    policy: Policy,
    backend: TrainBackend,
    grpo: GrpoOptions,
    optimizer: OptimizerOptions,
    iteration: int,
    seed: int,
    reference: Scorer | None = None,
) -> dict[str, float]:
    """Train on the trajectories marked `trained`; sets their old and reference log-probs.

    Args:
        trajectories: scored episodes of one iteration.
        reference: log-probs of the reference policy; needed where `grpo.kl_coefficient` is above 0.
        iteration: number of the iteration, which is the step of the learning-rate schedule.
        seed: seed of the run; with `grpo.passes` above 1 it decides the order of the groups in the later passes.

    Returns:
        Metrics `train/…`: means over the optimizer steps, of `train_rollout_logprob_abs_diff` the first one's;
        `train/skipped` is the number of steps without a finite gradient. `train/steps` 0.0 and the learning rate alone
        where nothing is trained.

    Raises:
        LogProbGapError: see there.
    """
    chosen = [episode for episode in trajectories if episode.trained]
    rate = scheduled_rate(optimizer, iteration)
    if not chosen:
        return {"train/steps": 0.0, "train/lr-pg_0": rate}
    version = newest_version(trajectories) if grpo.mixed_versions == "mask" else None
    _recompute(chosen, policy, backend, grpo, reference, version)
    samples = {id(episode): build_sample(episode, policy, version) for episode in chosen}
    groups: dict[int, list[TrainSample]] = {}
    for episode in chosen:
        groups.setdefault(episode.group_index, []).append(samples[id(episode)])
    objective = GrpoObjective(grpo)
    rows: list[dict[str, float]] = []
    sizes: list[int] = []
    for number in range(grpo.passes):
        order = list(groups.values())
        if number:
            python_generator(seed, "pass", iteration, number).shuffle(order)
        for step in split_steps(order, groups_per_step=grpo.groups_per_step):
            members = [sample for group in step for sample in group]
            rows.append(backend.step(members, objective, rate))
            sizes.append(len(members))
    means = {f"train/{name}": float(np.mean([row[name] for row in rows])) for name in rows[0]}
    # Later steps have moved the weights: only the first one compares trainer and engine.
    means[f"train/{_GAP}"] = rows[0][_GAP]
    skipped = sum(row["skipped"] for row in rows)
    size = float(np.mean(sizes))
    return {
        **means,
        "train/global_batch_size": size,
        "train/skipped": skipped,
        "train/steps": float(len(rows)),
        "train/lr-pg_0": rate,
    }


def scheduled_rate(options: OptimizerOptions, iteration: int) -> float:
    """Learning rate of an iteration: linear warm-up, constant, linear decay over the last share of the schedule."""
    decays = options.decay_fraction > 0
    return learning_rate(
        iteration,
        base=options.learning_rate,
        warmup_steps=options.warmup_iterations,
        total_steps=options.schedule_iterations,
        decay_fraction=options.decay_fraction if decays else 1.0,
        decay_to=options.decay_to,
        kind="linear" if decays else "constant",
    )


def _recompute(
    chosen: Sequence[Trajectory],
    policy: Policy,
    backend: TrainBackend,
    grpo: GrpoOptions,
    reference: Scorer | None,
    version: int | None,
) -> None:
    lengths = [len(episode.token_ids) for episode in chosen]
    if grpo.old_log_probs == "recompute":
        samples = [build_sample(episode, policy, version) for episode in chosen]
        values = backend.log_probs(samples)
        _check_gap(values, samples, grpo.max_log_prob_difference)
        for episode, row in zip(chosen, spread(values, samples, lengths), strict=True):
            episode.old_log_probs = row
    if grpo.kl_coefficient > 0:
        if reference is None:
            raise ValueError(
                f"grpo.kl_coefficient={grpo.kl_coefficient} needs the reference policy, but none is there."
            )
        samples = [build_sample(episode, policy, version) for episode in chosen]
        for episode, row in zip(chosen, spread(reference(samples), samples, lengths), strict=True):
            episode.ref_log_probs = row


def _check_gap(values: Sequence[np.ndarray], samples: Sequence[TrainSample], allowed: float | None) -> None:
    if allowed is None:
        return
    gaps = np.concatenate([np.abs(row - sample.rollout_log_probs) for row, sample in zip(values, samples, strict=True)])
    if gaps.mean() > allowed:
        raise LogProbGapError(
            f"trainer and engine log-probs differ by {gaps.mean():.2e} on average, more than "
            f"grpo.max_log_prob_difference={allowed}; check engine precision, weights and picture encoding."
        )
