"""Is there anything left to learn? One warning where most groups carry no signal, and a count at the end.

A group whose episodes are all solved, or all unsolved, has advantages of 0. What each iteration dropped stays in its
metrics (`rollout/dynamic_filter/…`, `rollout/trained_ratio`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from geo_sokoban_pipeline.config.grpo import GrpoOptions, OptimizerOptions, TrainOptions
from geo_sokoban_pipeline.console import track
from geo_sokoban_pipeline.evaluation.rollouts import describe_rates, start_names, validate_policy
from geo_sokoban_pipeline.grpo.batching import split_steps
from geo_sokoban_pipeline.grpo.loss import GrpoObjective
from geo_sokoban_pipeline.grpo.sampler import PromptSampler
from geo_sokoban_pipeline.grpo.schedules import is_eval_due, is_save_due, learning_rate
from geo_sokoban_pipeline.grpo.scoring import newest_version
from geo_sokoban_pipeline.policies.policy import Policy, load_as
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.runs.fingerprint import Fingerprint, check_fingerprint, hash_files, hash_rows, loop_parameters
from geo_sokoban_pipeline.runs.folders import START, best_iteration
from geo_sokoban_pipeline.runs.policy_folder import PolicyFolder
from geo_sokoban_pipeline.seeding import python_generator
from geo_sokoban_pipeline.signposts import reached
from geo_sokoban_pipeline.tasks import Task, task_of
from geo_sokoban_pipeline.training.backends.base import TrainBackend
from geo_sokoban_pipeline.training.backends.torch import DivergedError, FsdpBackend, build_scorer
from geo_sokoban_pipeline.training.batch import TrainSample, build_sample, spread
from geo_sokoban_pipeline.training.checkpoint import (
    CheckpointWriter,
    checkpoint_entries,
    compare_sizes,
    compare_workers,
    retained,
)
from geo_sokoban_pipeline.training.collecting import Collector, Rows, build_sampler
from geo_sokoban_pipeline.training.runtime import (
    collect_garbage,
    collector_paused,
    freeze_survivors,
    prepare_process,
    resident_bytes,
)
from geo_sokoban_pipeline.training.timing import SaveClock, Stopwatch
from geo_sokoban_pipeline.training.worker_group import Crew
from geo_sokoban_pipeline.trajectories.parquet import name_parts
from geo_sokoban_pipeline.trajectories.schema import COMPLETE, PRUNE, RETAIN
from geo_sokoban_pipeline.trajectories.types import Trajectory

logger = logging.getLogger(__name__)

SOLVED_AT_START = 0.95  # validated solve rate from which a warm start leaves GRPO little to learn
_SCARCE = 0.9  # share of groups without a signal
_PATIENCE = 5  # iterations in a row with so few groups


class SignalWatch:
    """Follows the iterations of one call of the loop."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.seen = self.idle = self.scarce = 0
        self.warned = False

    def follow_start(self, solve_rate: float, steps: int) -> None:
        """Warn where the policy that GRPO starts from solves nearly everything.

        Args:
            solve_rate: of the validation, sampled, in [0, 1].
            steps: of the warm start.
        """
        if solve_rate < SOLVED_AT_START:
            return
        run, words = self.task.run, self.task.words
        who, way_out = ("the starting policy", f"take harder {words.units}")
        if steps:
            who = "the warm start"
            way_out = (
                f"shorten it ({run}.warm_start.steps={steps}, or {run}.warm_start.stop_below), let it imitate an "
                f"expert that is not always right ({run}.warm_start.teacher), or take harder {words.units}"
            )
        logger.warning(
            "%s already solves %.1f %% of the validation %s: GRPO has little left to learn and may lower that; %s",
            who,
            100 * solve_rate,
            words.units,
            way_out,
        )

    def follow(self, iteration: int, metrics: Mapping[str, float | None]) -> None:
        """Note an iteration; warn of the first one that trains nothing, or of the fifth in a row that hardly does."""
        groups = int(metrics.get("rollout/groups") or 0)
        solved, unsolved = (
            int(metrics.get(f"rollout/dynamic_filter/drop_{name}_solved") or 0) for name in ("all", "none")
        )
        equal = sum(int(value or 0) for name, value in metrics.items() if name.startswith("rollout/zero_std/count_"))
        without = max(solved + unsolved, equal)
        idle = not metrics.get("rollout/trained_ratio")
        self.seen += 1
        self.idle += idle
        self.scarce = self.scarce + 1 if groups and without >= _SCARCE * groups else 0
        if self.warned or not (idle or self.scarce >= _PATIENCE):
            return
        self.warned = True
        run, words = self.task.run, self.task.words
        rate = float(metrics.get("rollout/success_rate") or 0.0)
        if rate >= 0.5:
            why = f"{100 * rate:.0f} % of the episodes are solved"
            way_out = f"stop here, or start a run with harder {words.units} or fewer {run}.warm_start.steps"
        else:
            why = f"only {100 * rate:.0f} % of the episodes are solved"
            way_out = (
                f"raise {run}.warm_start.steps or {run}.grpo.group_size, take easier {words.units}, or give a reward "
                "for parts of a solution"
            )
        logger.warning(
            "iteration %d: no group to train on%s (%d groups, %d without a signal): %s; %s. This is said once.",
            iteration,
            "" if idle else " but few",
            groups,
            without,
            why,
            way_out,
        )

    def close(self) -> None:
        """Say how many iterations trained nothing."""
        if self.idle:
            logger.warning(
                "%d of %d iterations trained nothing: none of their groups carried a signal "
                "(rollout/trained_ratio is 0 in their metrics)",
                self.idle,
                self.seen,
            )


# Which policy a run ends with: the newest checkpoint, the best validated one, or the policy that GRPO started from.


def better_choice(manifest: Mapping[str, Any], chosen: int, task: Task) -> str | None:
    """A sentence where an earlier policy solves more validation prompts than the newest one, by more than chance.

    Args:
        manifest: of the newest checkpoint.
        chosen: iteration of the final policy.
    """
    validated = manifest.get("validated") or {}
    newest, start, best = validated.get("newest"), validated.get("start"), best_iteration(manifest)
    if (
        newest is None
        or start is None
        or best is None
        or chosen != manifest["iteration"]
        or chosen != newest["iteration"]
    ):
        return None
    rate = start["solve_rate"] if best == START else manifest["best"]["solve_rate"]
    if rate <= newest["solve_rate"] or not _apart(rate, newest["solve_rate"], newest["episodes"]):
        return None
    earlier = "the policy before GRPO" if best == START else f"the checkpoint of iteration {best}"
    return (
        f"On the validation {task.words.units}, {earlier} has {100 * rate:.1f} %, the final policy "
        f"{100 * newest['solve_rate']:.1f} %. The same command with {task.run}.evaluation.checkpoint=best ends with "
        "the better one."
    )


def _apart(one: float, other: float, episodes: int) -> bool:
    """Whether two rates differ by more than twice the standard error of their difference."""
    variance = (one * (1 - one) + other * (1 - other)) / max(episodes, 1)
    return abs(one - other) > 2 * math.sqrt(variance)


# Updating: one iteration's trajectories become optimizer steps. The loop and `update_*` run this same function, on


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


# The GRPO loop: collect, score, update, evaluate, save; one yield per iteration, the checkpoint last.


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
