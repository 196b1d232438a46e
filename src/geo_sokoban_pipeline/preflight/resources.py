"""Resources of a run: planned disk space compared with the free one, and one timed iteration.

The timed iteration gives an estimate of the run's duration and its peak memory.
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.config.grpo import LoopOptions, TrainOptions
from geo_sokoban_pipeline.envs.inspection import Check
from geo_sokoban_pipeline.formats import size
from geo_sokoban_pipeline.policies.policy import Policy, save_policy
from geo_sokoban_pipeline.preflight.checks import Subject, find_cases
from geo_sokoban_pipeline.preflight.model import ModelShape
from geo_sokoban_pipeline.preflight.own_code import EpisodeShape
from geo_sokoban_pipeline.preflight.stored import Stored
from geo_sokoban_pipeline.runs.policy_folder import open_policy
from geo_sokoban_pipeline.runs.storage import free_bytes, nearest_folder, write_folder
from geo_sokoban_pipeline.training.backends.base import MOST_SKIPPED, TrainBackend
from geo_sokoban_pipeline.training.runtime import Stopwatch, prepare_process
from geo_sokoban_pipeline.trajectories.parquet import name_parts, write_trajectories
from geo_sokoban_pipeline.trajectories.types import Trajectory

_DISK = "disk"
# Weights, and two moments of the optimizer in the same type.
_TENSORS_PER_CHECKPOINT = 3
_TEXT_BYTES = 4 << 20  # tokenizer and configuration of a policy folder
_TOKEN_BYTES = 10  # of a stored token: id, mask, one or two log-probs, compressed
_TURN_BYTES = 200  # of a stored message: text, spans, info
_LONGEST_NAME = ".part-000.parquet.00000000.tmp"


@dataclass(frozen=True)
class DiskPlan:
    """Upper bounds on the bytes that a run still writes and keeps, by kind.

    Attributes:
        measured: part of `trajectories` whose size follows from stored iterations. The rest is computed without
            compression and without sharing of images, so it is several times too large if boards repeat.
        first: part of `checkpoints` and `policies` that is written until the first checkpoint is stored.
    """

    checkpoints: int
    policies: int
    trajectories: int
    measured: int = 0
    first: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.checkpoints + self.policies + self.trajectories

    @property
    def certain(self) -> int:
        """The part that is not a mere upper bound."""
        return self.checkpoints + self.policies + self.measured


def plan_disk(
    options: TrainOptions,
    weight_bytes: int,
    shape: EpisodeShape,
    *,
    validation: int,
    evaluation: int,
    stored: Stored,
    linked: bool = False,
    adapter_bytes: int | None = None,
) -> DiskPlan:
    """Bytes that a run still writes and keeps.

    Args:
        weight_bytes: of the model.
        shape: of an episode.
        validation, evaluation: number of prompts.
        stored: the run's stored iterations and policies.
        linked: the starting policy is on the disk of the data root, so that its files are linked and not copied.
        adapter_bytes: of the trained adapter, which checkpoints hold in place of the weights; None: there is none.
    """
    loop = options.loop
    left = max(loop.iterations - stored.iterations, 0)
    of_tokens = token_bytes(options, shape)
    # All turns are used, and no image is shared.
    per_episode = of_tokens + (options.rollout.max_turns + 1) * (shape.image_bytes + 2 * _TURN_BYTES)
    validations = count_validations(loop, stored.iterations) * 2 * validation
    evaluations = 2 * evaluation * (options.evaluation.samples + int(options.evaluation.greedy))
    episodes = options.grpo.groups * options.grpo.group_size
    if stored.iteration_bytes is None:
        # One iteration more than the newest is whole until it is thinned.
        whole = min(left, loop.retention.newest + 1)
        kept = per_episode if loop.retention.tokens else per_episode - of_tokens
        iterations = episodes * (whole * per_episode + (left - whole) * kept // loop.retention.episodes)
    else:
        iterations = left * stored.iteration_bytes
    whole_bytes = _TENSORS_PER_CHECKPOINT * weight_bytes + _TEXT_BYTES
    if adapter_bytes is None:
        one, after_sft, merged = whole_bytes, whole_bytes, 0
    else:  # the policies after both stages have whole weights, and nothing of a trainer
        one = _TENSORS_PER_CHECKPOINT * adapter_bytes + _TEXT_BYTES
        after_sft = merged = weight_bytes + _TEXT_BYTES
    one = stored.checkpoint_bytes or one
    base = 0 if stored.base_policy or linked else weight_bytes + _TEXT_BYTES
    # The policy after the warm start has optimizer state; without a warm start its files are the base policy's.
    learnt = 0 if stored.policy or not options.warm_start.steps else after_sft
    checkpoints = _checkpoints(options, left, stored) * one
    return DiskPlan(
        checkpoints=checkpoints,
        policies=base + learnt + merged,  # without an adapter the final one shares the files of its checkpoint
        trajectories=iterations + (validations + evaluations) * per_episode,
        measured=0 if stored.iteration_bytes is None else iterations,
        first=base + learnt + min(one, checkpoints),
    )


def count_validations(loop: LoopOptions, done: int) -> int:
    """Validations that a run still makes after `done` iterations, including the one before training."""
    if not loop.eval_interval:
        return 0
    return max(loop.iterations, done) // loop.eval_interval - done // loop.eval_interval + int(done == 0)


def _checkpoints(options: TrainOptions, left: int, stored: Stored) -> int:
    """Maximum number of checkpoints in addition to the stored ones."""
    loop = options.loop
    if not left:
        return 0
    to_save = -(-loop.iterations // loop.save_interval) - stored.iterations // loop.save_interval
    if loop.keep_last is None:
        return to_save
    # The best one may be older than the newest, and one more exists while it is written.
    return min(to_save, max(loop.keep_last + int(loop.keep_best) + 1 - stored.checkpoints, 1))


def token_bytes(options: TrainOptions, shape: EpisodeShape) -> int:
    """Upper bound on the bytes of a stored episode's tokens, masks and log-probs."""
    response = options.rollout.max_tokens_per_turn or max(shape.response, 1)
    return _TOKEN_BYTES * (shape.prompt + options.rollout.max_turns * (response + shape.observation))


def check_space(plan: DiskPlan, root: Path, free: int | None = None, replaced: int = 0) -> Check:
    """Whether a plan fits on the disk of the data root.

    Args:
        free: free bytes; None: from the file system.
        replaced: bytes of a run that is deleted once this one has its first checkpoint; until then both are there.
    """
    there = free_bytes(root) if free is None else free
    parts = f"checkpoints {size(plan.checkpoints)}, policies {size(plan.policies)}, trajectories "
    text = f"{size(plan.total)} needed at most ({parts}{size(plan.trajectories)}), {size(there)} free at {root}"
    way_out = "free space, move data_root, lower loop.keep_last or loop.iterations, or set loop.retention"
    if replaced:
        text += f", {size(replaced)} more after the first checkpoint, when the replaced run is deleted"
    return find_cases(
        _DISK,
        (plan.certain > there + replaced or plan.first > there, "space", "failure", text, way_out),
        (plan.total > there + replaced, "space", "warning", f"{text}; an upper bound", way_out),
        (True, "space", "ok", text, ""),
    )[0]


def check_writable(folders: list[Path]) -> list[Check]:
    """Whether files can be created in folders, or in the nearest existing parent of each; leaves no file behind."""
    found = []
    for folder in folders:
        place = nearest_folder(folder)
        try:
            with tempfile.TemporaryFile(dir=place) as file:
                file.write(b"x")
        except OSError as error:
            text = f"{folder}: no file can be created in {place} ({error.strerror or error})"
            found.append(Check(_DISK, "writing", "failure", text, "allow writing, free space, or move data_root"))
    return found or [Check(_DISK, "writing", "ok", f"{len(folders)} folders can be written")]


def check_paths(outputs: Path) -> Check:
    """Whether the longest path of a run is within the system's limits.

    Args:
        outputs: folder of the run id in 07_model_output.
    """
    longest = outputs / "held_out_trajectories" / "iter=00000" / _LONGEST_NAME
    place = nearest_folder(outputs)
    name_limit, path_limit = os.pathconf(place, "PC_NAME_MAX"), os.pathconf(place, "PC_PATH_MAX")
    length = len(os.fsencode(longest))
    name = max(len(os.fsencode(part)) for part in longest.parts)
    text = f"longest path {length} of {path_limit} bytes, longest name {name} of {name_limit}"
    if length >= path_limit or name > name_limit:
        return Check(_DISK, "paths", "failure", text, "move data_root nearer to the root, or shorten run_id")
    return Check(_DISK, "paths", "ok", text)


# The estimate of a run: seconds by part, from one timed iteration and the remaining work.


_TIMED = "timed"


@dataclass(frozen=True)
class Timing:
    """Measurements of one iteration.

    Attributes:
        sft_step: seconds of a step of the warm start; None: not measured, because the run has its policy already.
        rollout, update, save: seconds.
        episodes, tokens: of the rollout; tokens of prompts, observations and responses.
        steps: optimizer steps.
        skipped: optimizer steps without a finite gradient.
        checkpoint_bytes, trajectory_bytes: written.
        peak_bytes: largest resident memory so far, of all processes.
    """

    sft_step: float | None
    rollout: float
    update: float
    save: float
    episodes: int
    tokens: int
    steps: int
    skipped: int
    checkpoint_bytes: int
    trajectory_bytes: int
    peak_bytes: int

    @property
    def iteration(self) -> float:
        """Seconds of an iteration without validation."""
        return self.rollout + self.update + self.save


def describe_timing(
    timing: Timing, options: TrainOptions, *, validation: int, evaluation: int, done: int = 0
) -> list[Check]:
    """Rows of the table.

    Args:
        validation, evaluation: number of prompts.
        done: stored iterations.
    """
    speed = f"{timing.episodes / timing.rollout:,.0f} episodes/s, {timing.tokens / timing.rollout:,.0f} tokens/s"
    written = f"checkpoint {size(timing.checkpoint_bytes)}, trajectories {size(timing.trajectory_bytes)}"
    found = [
        Check(_TIMED, "rollout", "ok", f"{timing.rollout:.2f} s: {timing.episodes} episodes, {speed}"),
        Check(_TIMED, "update", "ok", f"{timing.update:.2f} s: {timing.steps} optimizer steps"),
        Check(_TIMED, "saving", "ok", f"{timing.save:.2f} s: {written}"),
        Check(_TIMED, "memory", "ok", f"at most {size(timing.peak_bytes)} resident"),
    ]
    found += find_cases(
        _TIMED,
        (
            timing.skipped,
            "gradients",
            "warning",
            f"{timing.skipped} of {timing.steps} optimizer steps had no finite gradient; a run continues, but stops "
            f"after {MOST_SKIPPED} in a row",
            "lower optimizer.learning_rate or take float32",
        ),
        (
            not timing.skipped and not timing.steps,
            "gradients",
            "warning",
            "no group to train on: the filter dropped all",
            "lengthen the warm start, or see grpo.filter",
        ),
    )
    parts = estimate_run(timing, options, validation=validation, evaluation=evaluation, done=done)
    shares = ", ".join(f"{name} {_clock(seconds)}" for name, seconds in parts.items())
    text = f"{timing.iteration:.2f} s an iteration; {_clock(sum(parts.values()))} in total ({shares})"
    return [*found, Check(_TIMED, "estimate of the run", "ok", text)]


def estimate_run(
    timing: Timing, options: TrainOptions, *, validation: int, evaluation: int, done: int = 0
) -> dict[str, float]:
    """Seconds that a run still takes, by part; without the warm start if none of its steps was timed.

    Args:
        validation, evaluation: number of prompts.
        done: stored iterations.
    """
    warm, chosen = options.warm_start, options.evaluation
    episode = timing.rollout / max(timing.episodes, 1)
    validated = 2 * validation * episode
    parts: dict[str, float] = {}
    if timing.sft_step is not None:
        validations = -(-warm.steps // warm.play_every) if warm.play_every else 0
        parts["warm start"] = timing.sft_step * warm.steps + validations * validated
    parts["iterations"] = timing.iteration * max(options.loop.iterations - done, 0)
    parts["validations"] = count_validations(options.loop, done) * validated
    per_prompt = chosen.samples + int(chosen.greedy)
    ablated = chosen.image_ablations * (1 + int(chosen.greedy))
    parts["evaluation"] = evaluation * (2 * per_prompt + ablated) * episode
    return parts


def _clock(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


# The timed iteration: one rollout, one update and one save at the run's real sizes, in a temporary folder.


_FEW_STEPS = 2  # of the warm start, for a pretrained policy


def has_weights(subject: Subject, model: ModelShape | None) -> bool:
    """Whether weights are available for timing: stored by the run, built from a seed, or in a folder."""
    if subject.learnt_policy is not None or subject.options.policy.source == "tiny":
        return True
    return model is not None and model.folder is not None


def time_iteration(subject: Subject, rows: Sequence[dict[str, Any]], model: ModelShape | None) -> Timing:
    """Run one iteration.

    Args:
        rows: training prompts; repeated if they are fewer than an iteration draws.
        model: shape of the model; None: unknown.

    Raises:
        FileNotFoundError: the weights are not available yet, see `has_weights`.
        Exception: any error that would end the run: memory, diverged updates, user code.
    """
    prepare_process(subject.options.threads)
    place = nearest_folder(subject.data_root)
    with tempfile.TemporaryDirectory(dir=place, prefix=".preflight-") as folder:
        policy, sft = ready_policy(subject, rows, model, Path(folder) / "policy")
        return _time(subject, rows, policy, sft, Path(folder) / "saved")


def _time(subject: Subject, rows: Sequence[dict[str, Any]], policy: Policy, sft: float | None, folder: Path) -> Timing:
    from geo_sokoban_pipeline.training.backend import build_backend
    from geo_sokoban_pipeline.training.collecting import Collector, build_sampler
    from geo_sokoban_pipeline.training.grpo_loop import sync_weights, trainers_turn, update_policy
    from geo_sokoban_pipeline.training.rollout_workers import open_rollouts
    from geo_sokoban_pipeline.training.worker_group import open_worker_group

    options, seed = subject.options, subject.parameters.seed
    sampler = build_sampler(rows, options, seed, None)
    with open_worker_group(policy, options) as workers:
        temperature = options.rollout.sampling.temperature
        backend = build_backend(policy, options.optimizer, temperature, workers, options.megatron_layout)
        if options.rollout.takes_turns:
            backend.offload()
        with open_rollouts(policy, options, workers) as rolling:
            engine = rolling.engine
            sync_weights(engine, backend, workers, 0)
            began = time.perf_counter()
            collector = Collector("preflight", seed, options, rows, policy, engine, rolling.function)
            trajectories, _ = collector.collect(0, sampler)
            collected = time.perf_counter()
            reference = backend.log_probs if options.grpo.needs_reference else None
            with trainers_turn(engine, backend, options, Stopwatch(), workers):
                metrics = update_policy(
                    trajectories, policy, backend, options.grpo, options.optimizer, 0, seed, reference
                )
            updated = time.perf_counter()
        sizes = _save(folder, policy, backend, trajectories)
        saved = time.perf_counter()
    own, largest = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return Timing(
        sft_step=sft,
        rollout=collected - began,
        update=updated - collected,
        save=saved - updated,
        episodes=len(trajectories),
        tokens=sum(len(episode.token_ids) for episode in trajectories),
        steps=int(metrics["train/steps"]),
        skipped=int(metrics.get("train/skipped", 0)),
        checkpoint_bytes=sizes[0],
        trajectory_bytes=sizes[1],
        # Of this process plus that of ended workers, each counted as the largest of them.
        peak_bytes=1024 * (own + (options.processes - 1 + (options.rollout.workers or 0)) * largest),
    )


def ready_policy(
    subject: Subject, rows: Sequence[dict[str, Any]], model: ModelShape | None, folder: Path
) -> tuple[Policy, float | None]:
    """A policy after a short warm start, or the run's stored one; and the seconds of a step, None without steps.

    Args:
        folder: for policies that are made here.
    """
    from geo_sokoban_pipeline.training.sft import run_sft
    from geo_sokoban_pipeline.training.worker_group import load_driver_policy, open_worker_group

    options = subject.options
    if subject.learnt_policy is not None:
        return load_driver_policy(options, open_policy(subject.learnt_policy).path), None
    policy = _starting_policy(subject, model, folder)
    steps = min(options.warm_start.steps, subject.settings.imitation_steps)
    if options.policy.source != "tiny":
        steps = min(steps, _FEW_STEPS)
    if not steps:
        return policy, None
    few = {"steps": steps, "warmup_steps": min(options.warm_start.warmup_steps, steps // 4), "validate_every": steps}
    warm = options.warm_start.model_copy(update={**few, "validation_episodes": 1, "play_every": 0})
    brief = options.model_copy(update={"warm_start": warm})
    with open_worker_group(policy, brief) as workers:
        history, backend = run_sft(policy, rows, rows[:1], brief, subject.parameters.seed, workers=workers)
        if policy.is_empty:
            (folder / "trained").mkdir(parents=True)
            backend.export(folder / "trained")
    if policy.is_empty:
        policy = load_driver_policy(options, folder / "trained")
    return policy, history[-1]["seconds"] / steps


def _starting_policy(subject: Subject, model: ModelShape | None, folder: Path) -> Policy:
    """The starting policy, with the dtype and the attention of the options."""
    from geo_sokoban_pipeline.training.worker_group import load_driver_policy

    options = subject.options.policy
    if model is not None and model.folder is not None:
        return load_driver_policy(subject.options, model.folder)
    if options.source != "tiny":
        raise FileNotFoundError(
            f"policy.path={options.path}: its weights are not available, so an iteration cannot be timed."
        )
    from geo_sokoban_pipeline.policies.tiny import build_tiny_policy

    save_policy(build_tiny_policy(options.tiny, subject.parameters.seed), folder)
    return load_driver_policy(subject.options, folder)


def _save(folder: Path, policy: Policy, backend: TrainBackend, trajectories: Sequence[Trajectory]) -> tuple[int, int]:
    """Save checkpoint and trajectories as the run does; returns their bytes."""
    from geo_sokoban_pipeline.training.checkpoint import CheckpointWriter

    manifest = write_folder(folder / "checkpoint", CheckpointWriter(backend, {}))
    for name, table in name_parts(0, trajectories, policy.table_context).items():
        write_trajectories(folder / f"{name}.parquet", table)
    written = sum(path.stat().st_size for path in folder.rglob("*.parquet"))
    return sum(file["bytes"] for file in manifest["files"].values()), written
