"""The timed part: one rollout, one update and one save at the run's real sizes, in a place of its own.

Nothing of the run is read but its stored policy, and nothing of it is written: what is saved goes to a temporary
folder beside its data, which is deleted.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.folders import PolicyFolder, open_policy
from geo_sokoban_pipeline.options.training import TrainOptions
from geo_sokoban_pipeline.policies.policy import Policy, load_policy
from geo_sokoban_pipeline.preflight.checks import Check
from geo_sokoban_pipeline.preflight.disk import size
from geo_sokoban_pipeline.preflight.model import ModelShape
from geo_sokoban_pipeline.preflight.subject import Subject
from geo_sokoban_pipeline.storage import MANIFEST, nearest_folder, write_folder
from geo_sokoban_pipeline.trajectories import Trajectory
from geo_sokoban_pipeline.trajectory_files import name_parts, write_trajectories

_GROUP = "timed"
_FEW_STEPS = 2  # of the warm start with a policy that has learnt to write before


@dataclass(frozen=True)
class Timing:
    """What one iteration took, in seconds, bytes and counts.

    Attributes:
        imitation_step: seconds of a step of the warm start; None where none was made.
        rollout, update, save: seconds.
        episodes, tokens: of the rollout; tokens count what the model saw and wrote.
        steps: optimizer steps. skipped: those without a finite gradient.
        checkpoint_bytes, trajectory_bytes: written.
        peak_bytes: largest resident memory of this process so far.
    """

    imitation_step: float | None
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


def time_iteration(subject: Subject, rows: Sequence[dict[str, Any]], model: ModelShape | None) -> Timing:
    """Run one iteration.

    Args:
        rows: training prompts; fewer than the run draws are drawn again.
        model: shape of the model; None: not here yet.

    Raises:
        FileNotFoundError: the weights are not here yet.
        Exception: whatever the run would end with: memory, diverged updates, own code.
    """
    from geo_sokoban_pipeline.rollout.engines.factory import build_engine
    from geo_sokoban_pipeline.training.backends.fsdp import FsdpBackend
    from geo_sokoban_pipeline.training.collecting import Collector, build_sampler
    from geo_sokoban_pipeline.training.process import set_threads
    from geo_sokoban_pipeline.training.updating import update_policy

    options, seed = subject.options, subject.parameters.seed
    set_threads(options.threads)
    policy, imitation = _ready_policy(subject, rows, model)
    backend = FsdpBackend(policy, options.optimizer, options.rollout.sampling.temperature)
    engine = build_engine(policy, options.rollout)
    sampler = build_sampler(rows, options.prompts, seed, None)
    began = time.perf_counter()
    trajectories, _ = Collector("preflight", seed, options, rows, policy, engine).collect(0, sampler)
    played = time.perf_counter()
    reference = backend.log_probs if options.grpo.kl_coefficient > 0 else None
    metrics = update_policy(trajectories, policy, backend, options.grpo, options.optimizer, 0, seed, reference)
    updated = time.perf_counter()
    engine.close()
    place = nearest_folder(subject.data_root)
    with tempfile.TemporaryDirectory(dir=place, prefix=".preflight-") as folder:
        sizes = _save(Path(folder), policy, backend, trajectories)
    saved = time.perf_counter()
    return Timing(
        imitation_step=imitation,
        rollout=played - began,
        update=updated - played,
        save=saved - updated,
        episodes=len(trajectories),
        tokens=sum(len(episode.token_ids) for episode in trajectories),
        steps=int(metrics["train/steps"]),
        skipped=int(metrics.get("train/skipped", 0)),
        checkpoint_bytes=sizes[0],
        trajectory_bytes=sizes[1],
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def describe_timing(timing: Timing, options: TrainOptions, validation: int, evaluation: int) -> list[Check]:
    """Rows of the table; a step without a finite gradient is a failure.

    Args:
        validation, evaluation: prompts that are played.
    """
    found = [
        Check(
            _GROUP,
            "rollout",
            "ok",
            f"{timing.rollout:.2f} s: {timing.episodes} episodes, {timing.episodes / timing.rollout:,.0f} episodes/s, "
            f"{timing.tokens / timing.rollout:,.0f} tokens/s",
        ),
        Check(_GROUP, "update", "ok", f"{timing.update:.2f} s: {timing.steps} optimizer steps"),
        Check(
            _GROUP,
            "saving",
            "ok",
            f"{timing.save:.2f} s: checkpoint {size(timing.checkpoint_bytes)}, trajectories "
            f"{size(timing.trajectory_bytes)}",
        ),
        Check(_GROUP, "memory", "ok", f"at most {size(timing.peak_bytes)} resident"),
    ]
    if timing.skipped:
        text = f"{timing.skipped} of {timing.steps} optimizer steps had no finite gradient"
        found.append(Check(_GROUP, "gradients", "failure", text, "lower optimizer.learning_rate or take float32"))
    elif not timing.steps:
        text = "no group to train on: the filter dropped all"
        found.append(Check(_GROUP, "gradients", "warning", text, "a run warms up first; else see grpo.filter"))
    parts = estimate_run(timing, options, validation, evaluation)
    shares = ", ".join(f"{name} {_clock(seconds)}" for name, seconds in parts.items())
    text = f"{timing.iteration:.2f} s an iteration; {_clock(sum(parts.values()))} in all ({shares})"
    return [*found, Check(_GROUP, "estimate of the run", "ok", text)]


def estimate_run(timing: Timing, options: TrainOptions, validation: int, evaluation: int) -> dict[str, float]:
    """Seconds of a whole run by part, from one iteration.

    Args:
        validation, evaluation: prompts that are played.
    """
    loop, chosen = options.loop, options.evaluation
    episode = timing.rollout / max(timing.episodes, 1)
    validations = loop.iterations // loop.eval_interval + 1 if loop.eval_interval else 0
    per_prompt = chosen.samples + int(chosen.greedy)
    blank = (1 + int(chosen.greedy)) if chosen.blank_images else 0
    return {
        "warm start": (timing.imitation_step or 0.0) * options.warm_start.steps,
        "iterations": timing.iteration * loop.iterations,
        "validations": validations * validation * 2 * episode,
        "evaluation": evaluation * (2 * per_prompt + blank) * episode,
    }


def _ready_policy(
    subject: Subject, rows: Sequence[dict[str, Any]], model: ModelShape | None
) -> tuple[Policy, float | None]:
    """A policy that writes as the run's will, and the seconds of a step of the warm start where one was made."""
    options = subject.options
    stored = _stored_policy(subject.models)
    if stored is not None:
        return load_policy(stored.path, options.policy.dtype, options.policy.attention), None
    policy = _starting_policy(subject, model)
    steps = min(options.warm_start.steps, subject.settings.imitation_steps)
    if options.policy.source != "tiny":
        steps = min(steps, _FEW_STEPS)
    if not steps:
        return policy, None
    from geo_sokoban_pipeline.training.warm_start import imitate_teacher

    few = {"steps": steps, "warmup_steps": min(options.warm_start.warmup_steps, steps // 4), "validate_every": steps}
    warm = options.warm_start.model_copy(update={**few, "validation_episodes": 1, "play_every": 0})
    brief = options.model_copy(update={"warm_start": warm})
    history = imitate_teacher(policy, rows, rows[:1], brief, subject.parameters.seed)
    return policy, history[-1]["seconds"] / steps


def _stored_policy(models: Path) -> PolicyFolder | None:
    folder = models / "policy"
    return open_policy(folder) if (folder / MANIFEST).is_file() else None


def _starting_policy(subject: Subject, model: ModelShape | None) -> Policy:
    options = subject.options.policy
    if options.source == "tiny":
        from geo_sokoban_pipeline.policies.tiny import build_tiny_policy

        return build_tiny_policy(options.tiny, subject.parameters.seed)
    if model is None or model.folder is None:
        raise FileNotFoundError(f"policy.path={options.path}: its weights are not here, so nothing can be timed.")
    return load_policy(model.folder, options.dtype, options.attention)


def _save(folder: Path, policy: Policy, backend: Any, trajectories: Sequence[Trajectory]) -> tuple[int, int]:
    """Save as the run does; bytes of the checkpoint and of the trajectories."""
    from geo_sokoban_pipeline.training.checkpointing import CheckpointWriter

    manifest = write_folder(folder / "checkpoint", CheckpointWriter(backend, {}))
    for name, table in name_parts(0, trajectories, policy.table_context).items():
        write_trajectories(folder / f"{name}.parquet", table)
    written = sum(path.stat().st_size for path in folder.rglob("*.parquet"))
    return sum(file["bytes"] for file in manifest["files"].values()), written


def _clock(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"
