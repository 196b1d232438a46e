"""The GRPO loop: collect, score, update, evaluate, save; one yield per iteration, the checkpoint last.

Iteration k plays with policy version k and leaves version k + 1. Whatever an iteration computes depends on the
checkpoint before it, the parameters and the seed alone, so a loop that is killed anywhere and started again gives the
same files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from geo_sokoban_pipeline.evaluation.validation import describe_rates, start_names, validate_policy
from geo_sokoban_pipeline.fingerprint import Fingerprint, check_fingerprint, hash_files, hash_rows, loop_parameters
from geo_sokoban_pipeline.folders import PolicyFolder
from geo_sokoban_pipeline.grpo.sampler import PromptSampler
from geo_sokoban_pipeline.grpo.schedules import is_eval_due, is_save_due
from geo_sokoban_pipeline.options.training import TrainOptions
from geo_sokoban_pipeline.policies.policy import load_as
from geo_sokoban_pipeline.progress import track
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.schemas import COMPLETE, PRUNE, RETAIN
from geo_sokoban_pipeline.signposts import reached
from geo_sokoban_pipeline.tasks import task_of
from geo_sokoban_pipeline.training.backends.fsdp import DivergedError, FsdpBackend, build_scorer
from geo_sokoban_pipeline.training.checkpointing import (
    CheckpointWriter,
    checkpoint_entries,
    compare_sizes,
    compare_workers,
    retained,
)
from geo_sokoban_pipeline.training.collecting import Collector, build_sampler
from geo_sokoban_pipeline.training.crew import Crew
from geo_sokoban_pipeline.training.process import (
    collect_garbage,
    collector_paused,
    freeze_survivors,
    prepare_process,
    resident_bytes,
)
from geo_sokoban_pipeline.training.save_clock import SaveClock
from geo_sokoban_pipeline.training.signal_watch import SignalWatch
from geo_sokoban_pipeline.training.stopwatch import Stopwatch
from geo_sokoban_pipeline.training.updating import update_policy
from geo_sokoban_pipeline.trajectories import Trajectory
from geo_sokoban_pipeline.trajectory_files import name_parts

logger = logging.getLogger(__name__)
Rows = Sequence[dict[str, Any]]
Chunk = tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]


@dataclass(frozen=True)
class RunInputs:
    """What a run is made of.

    Attributes:
        run: namespace, such as `train_sokoban`.
        seed: seed of the run.
        options: all options of the run.
        data_options: options of the data, as JSON values.
        policy: folder of the policy to start from (after the warm start).
        prompts: training rows.
        validation_prompts: rows for the validations in between.
    """

    run: str
    seed: int
    options: TrainOptions
    data_options: dict[str, Any]
    policy: PolicyFolder
    prompts: Rows
    validation_prompts: Rows


def run_grpo(inputs: RunInputs, resume: dict[str, Any]) -> Generator[Chunk, None, None]:
    """Run the loop from where it stands to `loop.iterations`.

    Args:
        resume: newest checkpoint: `iteration` (−1 before the first), `dir`, `manifest`, `complete`, `stored`.

    Yields:
        (trajectories, eval trajectories, metrics, checkpoint) by partition, `{}` where nothing is due. The first chunk
        of a loop that has work to do tells the datasets what to forget; the last one marks the run as complete.

    Raises:
        FingerprintError: the stored run was made with other settings.
    """
    options = inputs.options
    fingerprint = loop_fingerprint(inputs)
    start = resume["iteration"] + 1
    if resume["manifest"] is not None:
        check_fingerprint("the training", resume["manifest"]["fingerprint"], fingerprint)
    if start < options.loop.iterations:
        newest = resume["iteration"]
        yield {PRUNE: newest}, {PRUNE: newest + 1 if newest >= 0 else -1}, {PRUNE: newest}, {PRUNE: newest}
        with (
            track("GRPO", options.loop.iterations, start) as progress,
            closing(_Loop(inputs, resume, fingerprint)) as loop,
        ):
            for iteration in range(start, options.loop.iterations):
                chunk = loop.iterate(iteration)
                note = _note(chunk[2])
                with loop.save_clock.saving():
                    yield chunk
                reached("after save")
                progress.advance(note=note)
    yield {}, {}, {}, {COMPLETE: {"iterations": max(start, options.loop.iterations)}}


def loop_fingerprint(inputs: RunInputs) -> Fingerprint:
    """Everything that changes what the loop computes: parameters, prompts, starting policy."""
    return {
        **loop_parameters(inputs.options, inputs.seed, inputs.data_options),
        "input.prompts": hash_rows(inputs.prompts),
        "input.validation_prompts": hash_rows(inputs.validation_prompts),
        "input.policy": hash_files(inputs.policy.manifest["files"]),
    }


def partition(iteration: int) -> str:
    """Partition id of an iteration."""
    return f"iter={iteration:05d}"


class _Loop:
    """State of a running loop: policy, engine, trainer, helping processes, data cursor, best validation so far."""

    def __init__(self, inputs: RunInputs, resume: dict[str, Any], fingerprint: Fingerprint) -> None:
        options, manifest = inputs.options, resume["manifest"] or {}
        self.inputs, self.options, self.fingerprint = inputs, options, fingerprint
        self.workers = {"threads": prepare_process(options.threads), "processes": options.processes}
        freeze_survivors()
        compare_workers(manifest, self.workers)
        compare_sizes(manifest.get("fingerprint", {}), fingerprint)
        self.policy = load_as(options.policy, inputs.policy.path)
        self.backend = FsdpBackend(self.policy, options.optimizer, options.rollout.sampling.temperature)
        self.best: dict[str, Any] | None = manifest.get("best")
        # Solve rates of the starting policy and of the newest validated one, for the choice of the final policy.
        self.validated: dict[str, Any] = dict(manifest.get("validated") or {})
        self.signal = SignalWatch(task_of(options.task))
        if resume["dir"] is not None:
            self.backend.load_state(resume["dir"])
        self.engine = build_engine(self.policy, options.rollout)
        self.sampler: PromptSampler = build_sampler(inputs.prompts, options, inputs.seed, manifest.get("sampler"))
        self.reference = build_scorer(inputs.policy, options) if options.grpo.kl_coefficient > 0 else None
        self.saved: list[int] = list(resume["stored"])
        self.save_clock = SaveClock()
        # Last: nothing that can fail comes after it and leaves its processes behind.
        self.backend.crew = self.crew = Crew(self.policy, options) if options.processes > 1 else None
        self.play = None if self.crew is None else self.crew.play
        self.collector = Collector(
            inputs.run, inputs.seed, options, inputs.prompts, self.policy, self.engine, self.play
        )

    def iterate(self, iteration: int) -> Chunk:
        """One iteration; nothing is written here."""
        began = time.perf_counter()
        loop = self.options.loop
        eval_trajectories: dict[str, Any] = {}
        row: dict[str, Any] = {"iteration": iteration, "policy_version": iteration}
        if iteration == 0 and loop.eval_interval:
            self._validate(0, eval_trajectories, row)
        # Nothing the engine computed before counts here, so a resumed loop computes the same.
        watch = Stopwatch() if self.crew is None else Stopwatch(self.crew.cpu_clock)
        with watch.running():
            collect_garbage(iteration)
            self._renew(iteration)
            reached("collecting")
            trajectories, metrics = self.collector.collect(iteration, self.sampler)
            self.signal.follow(iteration, metrics)
            reached("update")
            updated = time.perf_counter()
            row |= metrics | self._update(trajectories, iteration)
        row["perf/update_time"] = time.perf_counter() - updated
        row["perf/cpu_time"] = watch.cpu_seconds
        self._renew(iteration + 1)
        if loop.eval_interval and is_eval_due(iteration, loop.eval_interval):
            reached("evaluation")
            self._validate(iteration + 1, eval_trajectories, row)
        row["perf/step_time"] = time.perf_counter() - began
        # What the iteration before took to save: this one's row is written before it is known.
        row |= self.save_clock.metrics()
        row["perf/memory_gb"] = resident_bytes() / 1e9
        checkpoint: dict[str, Any] = {}
        if is_save_due(iteration, loop.save_interval, num_iterations=loop.iterations):
            checkpoint = self._checkpoint(iteration)
        self.save_clock = SaveClock()
        with self.save_clock.making_tables(), collector_paused():
            parts = name_parts(iteration, trajectories, self.policy.table_context)
        return parts, eval_trajectories, {partition(iteration): row}, checkpoint

    def close(self) -> None:
        """Say what trained nothing, free engine and trainer, end the helping processes."""
        self.signal.close()
        if self.crew is not None:
            self.crew.close()
        self.engine.close()
        self.backend.close()

    def _renew(self, version: int) -> None:
        """Make every engine forget what it computed with earlier weights."""
        self.engine.update_weights(None, version)
        if self.crew is not None:
            self.crew.renew(version)

    def _update(self, trajectories: list[Trajectory], iteration: int) -> dict[str, float]:
        options = self.options
        try:
            return update_policy(
                trajectories,
                self.policy,
                self.backend,
                options.grpo,
                options.optimizer,
                iteration,
                self.inputs.seed,
                self.reference,
            )
        except DivergedError as error:
            raise DivergedError(f"iteration {iteration}: {error}. {self._way_out()}") from error

    def _way_out(self) -> str:
        """What to do once an update has diverged."""
        run = self.inputs.run
        if not self.saved:
            return f"No checkpoint is stored yet: lower {run}.optimizer.learning_rate, and start over with fresh=true."
        return (
            f"The last good checkpoint is {partition(self.saved[-1])} of {run}.checkpoints. Go on from its weights in "
            f"a run of its own, with a lower {run}.optimizer.learning_rate: --params run_id=<new>,"
            f"{run}.policy.source=folder,{run}.policy.path=<folder of the checkpoint>,{run}.warm_start.steps=0"
        )

    def _validate(self, version: int, collected: dict[str, Any], row: dict[str, Any]) -> None:
        began = time.perf_counter()
        inputs, loop = self.inputs, self.options.loop
        self._renew(version)
        rows = inputs.validation_prompts[: loop.eval_prompts]
        if not rows:
            return
        played, metrics = validate_policy(
            inputs.run, inputs.seed, self.options, rows, self.policy, self.engine, version, self.play
        )
        collected |= name_parts(version, played, self.policy.table_context)
        rate = metrics["eval/validation/sampled_solve_rate"]
        logger.info("validation @%d: %s", version, describe_rates(metrics))
        self.validated["newest" if version else "start"] = {
            "iteration": version - 1,
            "solve_rate": rate,
            "episodes": len(rows),
        }
        if version == 0:
            self.signal.follow_start(rate, self.options.warm_start.steps)
        saved = version > 0 and is_save_due(version - 1, loop.save_interval, num_iterations=loop.iterations)
        if saved and (self.best is None or rate > self.best["solve_rate"]):
            self.best = {"iteration": version - 1, "solve_rate": rate}
        # The first row holds two validations where one follows every iteration: version 0's has names of its own.
        row |= metrics if version else start_names(metrics)
        row["perf/eval_time"] = row.get("perf/eval_time", 0.0) + time.perf_counter() - began

    def _checkpoint(self, iteration: int) -> dict[str, Any]:
        loop = self.options.loop
        self.saved.append(iteration)
        entries = checkpoint_entries(
            iteration, self.fingerprint, self.sampler, self.best, self.workers, dict(self.validated)
        )
        chunk: dict[str, Any] = {partition(iteration): CheckpointWriter(self.backend, entries)}
        if loop.keep_last is not None:
            best = self.best["iteration"] if self.best is not None and loop.keep_best else None
            self.saved = retained(self.saved, loop.keep_last, best)
            chunk[RETAIN] = self.saved
        return chunk


def _note(rows: dict[str, Any]) -> str:
    row: dict[str, float] = next(iter(rows.values()), {})
    return f"solved {row.get('rollout/success_rate') or 0.0:.0%}, reward {row.get('rollout/raw_reward') or 0.0:.2f}"
