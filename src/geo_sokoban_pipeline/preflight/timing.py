"""The timed part: one rollout, one update and one save at the run's real sizes, in a place of its own.

Nothing of the run is read but its stored policy, and nothing of it is written: what is saved goes to a temporary
folder beside its data, which is deleted.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.folders import open_policy
from geo_sokoban_pipeline.policies.policy import Policy, load_as, save_policy
from geo_sokoban_pipeline.preflight.estimate import Timing
from geo_sokoban_pipeline.preflight.model import ModelShape
from geo_sokoban_pipeline.preflight.subject import Subject
from geo_sokoban_pipeline.storage import nearest_folder, write_folder
from geo_sokoban_pipeline.trajectories import Trajectory
from geo_sokoban_pipeline.trajectory_files import name_parts, write_trajectories

_FEW_STEPS = 2  # of the warm start with a policy that has learnt to write before


def has_weights(subject: Subject, model: ModelShape | None) -> bool:
    """Whether there are weights to time with: stored by the run, built here, or in a folder."""
    if subject.learnt_policy is not None or subject.options.policy.source == "tiny":
        return True
    return model is not None and model.folder is not None


def time_iteration(subject: Subject, rows: Sequence[dict[str, Any]], model: ModelShape | None) -> Timing:
    """Run one iteration.

    Args:
        rows: training prompts; fewer than the run draws are drawn again.
        model: shape of the model; None: not known.

    Raises:
        FileNotFoundError: the weights are not here yet, see `has_weights`.
        Exception: whatever the run would end with: memory, diverged updates, own code.
    """
    from geo_sokoban_pipeline.training.process import prepare_process

    prepare_process(subject.options.threads)
    place = nearest_folder(subject.data_root)
    with tempfile.TemporaryDirectory(dir=place, prefix=".preflight-") as folder:
        policy, imitation = _ready_policy(subject, rows, model, Path(folder) / "policy")
        return _time(subject, rows, policy, imitation, Path(folder) / "saved")


def _time(
    subject: Subject, rows: Sequence[dict[str, Any]], policy: Policy, imitation: float | None, folder: Path
) -> Timing:
    from geo_sokoban_pipeline.rollout.engines.factory import build_engine
    from geo_sokoban_pipeline.training.backends.fsdp import FsdpBackend
    from geo_sokoban_pipeline.training.collecting import Collector, build_sampler
    from geo_sokoban_pipeline.training.crew import open_crew
    from geo_sokoban_pipeline.training.updating import update_policy

    options, seed = subject.options, subject.parameters.seed
    engine = build_engine(policy, options.rollout)
    sampler = build_sampler(rows, options, seed, None)
    with open_crew(policy, options) as crew:
        backend = FsdpBackend(policy, options.optimizer, options.rollout.sampling.temperature, crew)
        play = None if crew is None else crew.play
        began = time.perf_counter()
        trajectories, _ = Collector("preflight", seed, options, rows, policy, engine, play).collect(0, sampler)
        played = time.perf_counter()
        reference = backend.log_probs if options.grpo.kl_coefficient > 0 else None
        metrics = update_policy(trajectories, policy, backend, options.grpo, options.optimizer, 0, seed, reference)
        updated = time.perf_counter()
        engine.close()
        sizes = _save(folder, policy, backend, trajectories)
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
        peak_bytes=_peak_bytes(options.processes - 1),
    )


def _peak_bytes(children: int) -> int:
    """Largest resident memory of this process and of so many children that have ended, each as large as the largest."""
    own, child = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return (own + children * child) * 1024


def _ready_policy(
    subject: Subject, rows: Sequence[dict[str, Any]], model: ModelShape | None, folder: Path
) -> tuple[Policy, float | None]:
    """A policy that writes as the run's will, and the seconds of a step of the warm start where one was made.

    Args:
        folder: to write a policy into that is built here.
    """
    options = subject.options
    if subject.learnt_policy is not None:
        stored = open_policy(subject.learnt_policy)
        return load_as(options.policy, stored.path), None
    policy = _starting_policy(subject, model, folder)
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


def _starting_policy(subject: Subject, model: ModelShape | None, folder: Path) -> Policy:
    """The starting policy as a run loads it, with the type and the attention of the options."""
    options = subject.options.policy
    if model is not None and model.folder is not None:
        return load_as(options, model.folder)
    if options.source != "tiny":
        raise FileNotFoundError(f"policy.path={options.path}: its weights are not here, so nothing can be timed.")
    from geo_sokoban_pipeline.policies.tiny import build_tiny_policy

    save_policy(build_tiny_policy(options.tiny, subject.parameters.seed), folder)
    return load_as(options, folder)


def _save(folder: Path, policy: Policy, backend: Any, trajectories: Sequence[Trajectory]) -> tuple[int, int]:
    """Save as the run does; bytes of the checkpoint and of the trajectories."""
    from geo_sokoban_pipeline.training.checkpointing import CheckpointWriter

    manifest = write_folder(folder / "checkpoint", CheckpointWriter(backend, {}))
    for name, table in name_parts(0, trajectories, policy.table_context).items():
        write_trajectories(folder / f"{name}.parquet", table)
    written = sum(path.stat().st_size for path in folder.rglob("*.parquet"))
    return sum(file["bytes"] for file in manifest["files"].values()), written
