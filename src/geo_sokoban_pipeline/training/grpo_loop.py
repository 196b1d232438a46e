"""The GRPO loop: collect, score, update, sync weights, validate, commit; `run_grpo` is the whole of it, top to bottom.

A killed run ends bit for bit as an uninterrupted one. For that, an iteration stores its episodes, then its metrics, and
its checkpoint last: the checkpoint's manifest is the commit record. A continued run deletes all rows after the newest
checkpoint and computes them again. Every draw follows from run seed and iteration, and all other state (weights,
moments, data cursor, validated rates) is in the checkpoint.

Trajectories `iter=k` are sampled by policy version k; checkpoint `iter=k` is the state after training on them, version
k + 1.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from geo_sokoban_pipeline.config.grpo import GrpoOptions, OptimizerOptions, RetentionOptions, TrainOptions
from geo_sokoban_pipeline.console import track
from geo_sokoban_pipeline.envs.base import Task
from geo_sokoban_pipeline.evaluation.rollouts import describe_rates, start_names, validate_policy
from geo_sokoban_pipeline.events import Event, emit
from geo_sokoban_pipeline.grpo.loss import GrpoObjective
from geo_sokoban_pipeline.grpo.schedules import DECAY_TO, is_eval_due, is_save_due, learning_rate
from geo_sokoban_pipeline.grpo.scoring import distil, newest_version, scored_context
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.policies.preparing import find_teacher
from geo_sokoban_pipeline.rollout.engines.base import EngineControl
from geo_sokoban_pipeline.rollout.rollout import RolloutFn
from geo_sokoban_pipeline.runs.fingerprint import Fingerprint, check_fingerprint, hash_files, hash_rows, loop_parameters
from geo_sokoban_pipeline.runs.policy_folder import PolicyFolder
from geo_sokoban_pipeline.runs.storage import Complete, NewCheckpoint, Rewind, Thin, describe_files, partition
from geo_sokoban_pipeline.seeding import python_generator
from geo_sokoban_pipeline.tasks import task_of
from geo_sokoban_pipeline.training.backend import build_backend, open_reference
from geo_sokoban_pipeline.training.backends.base import DivergedError, TrainBackend
from geo_sokoban_pipeline.training.batch import TrainSample, build_sample, split_steps, spread
from geo_sokoban_pipeline.training.checkpoint import (
    CheckpointHistory,
    CheckpointWriter,
    compare_layout,
    layout_of,
    written_ahead,
)
from geo_sokoban_pipeline.training.collecting import AheadCollector, Collector, Rows, build_sampler
from geo_sokoban_pipeline.training.rollout_workers import open_rollouts
from geo_sokoban_pipeline.training.runtime import (
    Stopwatch,
    collect_garbage,
    collector_paused,
    freeze_survivors,
    prepare_process,
    resident_bytes,
)
from geo_sokoban_pipeline.training.worker_group import WorkerGroup, load_driver_policy, open_worker_group
from geo_sokoban_pipeline.trajectories.parquet import name_parts
from geo_sokoban_pipeline.trajectories.types import Trajectory

logger = logging.getLogger(__name__)

_GAP = "train_rollout_logprob_abs_diff"

# One value for each of the four outputs (trajectories, eval trajectories, metrics, checkpoints): partitions to save, or
# a `Rewind` that deletes all after an iteration; for trajectories also `Thin`, and for checkpoints `Complete`, the mark
# of a finished loop.
Chunk = tuple[
    dict[str, Any] | Rewind | Thin, dict[str, Any] | Rewind, dict[str, Any] | Rewind, dict[str, Any] | Rewind | Complete
]
Scorer = Callable[[Sequence[TrainSample]], list[np.ndarray]]


@dataclass(frozen=True)
class RunInputs:
    """The inputs of a run.

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


def run_grpo(  # noqa: PLR0912, PLR0915 - one place for the whole loop
    inputs: RunInputs, resume: Mapping[str, Any], restarts: int
) -> Generator[Chunk, None, None]:
    """Run the loop from the newest checkpoint to `loop.iterations`.

    Args:
        resume: newest checkpoint: `iteration` (−1 before the first), `dir`, `manifest`, `complete`, `stored`; with
            ranks in a Ray cluster also `folder`, that of all checkpoints.
        restarts: how often this command has begun the first iteration before.

    Yields:
        (trajectories, eval trajectories, metrics, checkpoint), `{}` where nothing is due. An unfinished loop begins
        with a `Rewind` of each; an iteration yields its episodes, then its metrics and checkpoint; `Complete` ends it.

    Raises:
        FingerprintError: the stored run has other settings.
        DivergedError: several optimizer steps in a row had no finite gradient.
        WorkerDied: a rank in a Ray cluster has ended; what was yielded before is whole.
    """
    options, loop, task = inputs.options, inputs.options.loop, task_of(inputs.options.task)
    manifest = resume["manifest"] or {}
    fingerprint = loop_fingerprint(inputs)
    if manifest:
        check_fingerprint("the training", manifest["fingerprint"], fingerprint)
    newest, first = resume["iteration"], resume["iteration"] + 1
    if first >= loop.iterations:
        yield from thin(loop.retention, 0, newest)
        yield {}, {}, {}, Complete(first)
        return
    # Validations are numbered by policy version, and checkpoint k holds version k + 1.
    yield Rewind(newest), Rewind(first if newest >= 0 else -1), Rewind(newest), Rewind(newest)
    yield from thin(loop.retention, 0, newest)
    committed = newest

    with ExitStack() as owned:
        # Everything that holds state; closed in reverse order.
        progress = owned.enter_context(track("GRPO", loop.iterations, first))
        threads = prepare_process(options.threads)
        freeze_survivors()
        policy = load_driver_policy(options, inputs.policy.path, inputs.seed)
        workers = owned.enter_context(open_worker_group(policy, options))
        options = options if workers is None else workers.options
        layout = layout_of(options, threads)
        compare_layout(manifest, layout)
        temperature = options.rollout.sampling.temperature
        backend = build_backend(policy, options.optimizer, temperature, workers, options.megatron_layout)
        owned.callback(backend.close)
        if resume["dir"] is not None:
            backend.load_state(resume["dir"])
        # While the trainer has the GPUs: servers, which leave no room for it, follow.
        reference = open_reference(lambda: inputs.policy, policy, options, workers, backend)
        if options.rollout.takes_turns:
            backend.offload()
        pool = owned.enter_context(ThreadPoolExecutor(1, "rollout"))  # waits for its thread when the engine is closed
        rolling = owned.enter_context(open_rollouts(policy, options, workers))
        engine, roll_out = rolling.engine, rolling.function
        sampler = build_sampler(inputs.prompts, options, inputs.seed, manifest.get("sampler"))
        history = CheckpointHistory.of(manifest, resume["stored"])
        watch = owned.enter_context(closing(SignalWatch(task)))
        given = (inputs.run, inputs.seed, options, inputs.prompts, policy)
        collector = Collector(*given, engine, roll_out, rolling.take_metrics)
        ahead = None
        if loop.max_staleness:
            ahead = AheadCollector(collector, sampler, lambda version: _folder_of(version, inputs, resume), pool)
        held_out = len(inputs.validation_prompts[: loop.eval_prompts])
        saving, writing = Stopwatch(), Stopwatch()  # of the previous iteration

        for iteration in range(first, loop.iterations):
            began = time.perf_counter()
            version = iteration if ahead is None else ahead.version_of(iteration)  # that rolls out
            row: dict[str, Any] = {"iteration": iteration, "policy_version": version}
            validations: dict[str, Any] = {}
            is_saved = is_save_due(iteration, loop.save_interval, num_iterations=loop.iterations)
            validating = Stopwatch()
            if iteration == 0 and loop.eval_interval:
                with validating.running():
                    sync_weights(engine, backend, workers, 0)
                    episodes, measured = _validate(inputs, 0, policy, engine, roll_out)
                validations |= episodes
                # The first row may hold two validations, so version 0's metrics have other names.
                row |= start_names(measured)
                history.note_validation(0, measured, held_out, is_saved=False)
                watch.observe_start(history.start_rate, options.warm_start.steps)
            turning = Stopwatch()
            work = Stopwatch(partial(rolling.cpu_clock, workers))
            with work.running():
                collect_garbage(iteration)
                # Collect and score: draw groups until enough of them carry a signal, then set their advantages.
                emit(Event.COLLECT, iteration)
                if ahead is None:
                    # A continued loop starts without caches, so an uninterrupted one drops them here too.
                    sync_weights(engine, backend, workers, iteration)
                    trajectories, collected = collector.collect(iteration, sampler)
                    cursor = sampler.state()
                else:
                    found = ahead.take(iteration, is_last=iteration + 1 == loop.iterations)
                    trajectories, collected, cursor = found.trajectories, found.metrics, found.sampler
                watch.observe(iteration, collected)

                # Update: old and reference log-probs, then one or several optimizer steps.
                emit(Event.UPDATE, iteration)
                updating = time.perf_counter()
                try:
                    with trainers_turn(engine, backend, options, turning, workers):
                        trained = update_policy(
                            trajectories,
                            policy,
                            backend,
                            options.grpo,
                            options.optimizer,
                            iteration,
                            inputs.seed,
                            reference,
                        )
                except DivergedError as error:
                    raise DivergedError(f"iteration {iteration}: {error}. {history.way_out(inputs.run)}") from error
                row |= collected | trained
            row["perf/update_time"] = time.perf_counter() - updating
            row["perf/cpu_time"] = work.cpu_seconds
            if turning.seconds:
                row["perf/turn_time"] = turning.seconds

            # Sync: from here on the engines sample from the next version.
            is_validated = bool(loop.eval_interval) and is_eval_due(iteration, loop.eval_interval)
            if ahead is None:
                sync_weights(engine, backend, workers, iteration + 1)
            elif is_validated:
                ahead.wait()
                sync_weights(engine, backend, workers, iteration + 1)

            # Validate.
            if is_validated:
                emit(Event.VALIDATE, iteration)
                with validating.running():
                    episodes, measured = _validate(inputs, iteration + 1, policy, engine, roll_out)
                validations |= episodes
                row |= measured
                history.note_validation(iteration + 1, measured, held_out, is_saved=is_saved)
            if validating.seconds:
                row["perf/eval_time"] = validating.seconds
            if restarts and iteration == first:
                row["perf/restarts"] = restarts
            row["perf/step_time"] = time.perf_counter() - began
            # A row is stored before its own saving ends, so it has the saving times of the previous iteration.
            row |= {
                "perf/save_time": saving.seconds,
                "perf/save_cpu_time": saving.cpu_seconds,
                "perf/write_time": writing.seconds,
                "perf/write_cpu_time": writing.cpu_seconds,
                "perf/memory_gb": resident_bytes() / 1e9,
            }

            # Commit: episodes, then metrics, then the checkpoint, whose manifest commits the iteration.
            note = f"solved {row['rollout/success_rate'] or 0.0:.0%}, reward {row['rollout/raw_reward'] or 0.0:.2f}"
            saving, writing = Stopwatch(), Stopwatch()
            with saving.running(), ExitStack() as held:
                checkpoint: dict[str, Any] = {}
                if is_saved:
                    keep = history.add(iteration, loop.keep_last, keep_best=loop.keep_best)
                    entries = {
                        "iteration": iteration,
                        "policy_version": iteration + 1,
                        "fingerprint": fingerprint,
                        "sampler": cursor,
                        "kept": list(history.stored),
                        "best": history.best,
                        "validated": dict(history.validated),
                        **layout,
                    }
                    writer = written_ahead(CheckpointWriter(backend, entries), resume.get("folder"), workers)
                    checkpoint[partition(iteration)] = NewCheckpoint(held.enter_context(writer), keep)
                with writing.running():
                    with collector_paused():
                        context = scored_context(policy.table_context, options.grpo)
                        parts = name_parts(iteration, trajectories, context)
                    del trajectories  # the tables hold them now
                    yield parts, validations, {}, {}
                yield {}, {}, {partition(iteration): row}, checkpoint
                if is_saved:
                    yield from thin(loop.retention, committed + 1 - loop.retention.newest, iteration)
                    committed = iteration
            progress.advance(note=note)
    yield {}, {}, {}, Complete(loop.iterations)


def _folder_of(version: int, inputs: RunInputs, resume: Mapping[str, Any]) -> Path:
    """Where the weights of a version are stored: checkpoint k holds version k + 1."""
    folder: Path = resume["folder"]
    return folder / partition(version - 1) if version else inputs.policy.path


def thin(retention: RetentionOptions, first: int, committed: int) -> Iterator[Chunk]:
    """The order to thin iterations from `first` on, up to those that retention keeps whole; nothing where all is kept.

    Args:
        committed: newest iteration that a checkpoint commits.
    """
    last = committed - retention.newest
    if not retention.keeps_all and last >= max(first, 0):
        order = Thin(max(first, 0), last, retention.tokens, retention.episodes, retention.images)
        yield order, {}, {}, {}


def loop_fingerprint(inputs: RunInputs) -> Fingerprint:
    """Fingerprint of everything that the loop's results depend on: parameters, prompts, starting policy, teacher."""
    teacher = inputs.options.grpo.teacher
    return {
        **loop_parameters(inputs.options, inputs.seed, inputs.data_options),
        "input.prompts": hash_rows(inputs.prompts),
        "input.validation_prompts": hash_rows(inputs.validation_prompts),
        "input.policy": hash_files(inputs.policy.manifest["files"]),
        **({} if teacher is None else {"input.teacher": hash_files(describe_files(find_teacher(teacher)))}),
    }


def sync_weights(engine: EngineControl, backend: TrainBackend, workers: WorkerGroup | None, version: int) -> None:
    """Switch every engine to this policy version; each drops what it computed with earlier ones."""
    if not engine.in_process:  # servers or workers roll out for all ranks
        engine.update_weights(backend.weight_source(), version)
        return
    backend.renew()
    if workers is not None:
        workers.update_weights(version)
    engine.update_weights(None, version)


@contextmanager
def trainers_turn(
    engine: EngineControl,
    backend: TrainBackend,
    options: TrainOptions,
    watch: Stopwatch,
    workers: WorkerGroup | None,
) -> Iterator[None]:
    """The trainer has the memory that it shares with engines, for the `with` block; `sync_weights` wakes these up.

    Args:
        watch: counts the seconds in which memory is given up by servers and taken.
    """
    if not options.rollout.takes_turns:
        if options.ranks_roll_out:
            engine.offload()
            if workers is not None:
                workers.free_caches()
        yield
        return
    with watch.running():
        engine.offload()
        backend.onload()
    yield  # an error ends the ranks, which then have nothing to give up, and must not hide it
    with watch.running():
        backend.offload()


def _validate(
    inputs: RunInputs, version: int, policy: Policy, engine: EngineControl, roll_out: RolloutFn | None
) -> tuple[dict[str, Any], dict[str, float]]:
    """Roll out the validation prompts.

    Returns:
        Episodes by partition, and metrics `eval/validation/…`; both empty without validation prompts.
    """
    rows = inputs.validation_prompts[: inputs.options.loop.eval_prompts]
    if not rows:
        return {}, {}
    episodes, metrics = validate_policy(
        inputs.run, inputs.seed, inputs.options, rows, policy, engine, version, roll_out
    )
    logger.info("validation @%d: %s", version, describe_rates(metrics))
    return name_parts(version, episodes, policy.table_context), metrics


class LogProbGapError(RuntimeError):
    """Log-probs of trainer and engine differ by more than `grpo.max_log_prob_difference`."""


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

    The loop and the `update_*` pipelines call this function, so a stored iteration can be trained again bit for bit.

    Args:
        trajectories: scored episodes of one iteration.
        reference: log-probs of the reference policy, or of the teacher; needed where `grpo` has one.
        iteration: number of the iteration, which is also the step of the learning-rate schedule.
        seed: seed of the run; it shuffles the groups in all PPO epochs (`grpo.passes`) after the first.

    Returns:
        Metrics `train/…`: means over the optimizer steps, but `train_rollout_logprob_abs_diff` of the first step alone;
        `train/skipped` counts steps without a finite gradient; with a teacher `train/reverse_kl`, the mean of clipped
        log-prob gaps of a token in nats. Only `train/steps` (0.0) and the learning rate if no trajectory is trained.

    Raises:
        LogProbGapError: log-probs of trainer and engine differ too much.
    """
    chosen = [episode for episode in trajectories if episode.trained]
    rate = scheduled_rate(optimizer, iteration)
    if not chosen:
        return {"train/steps": 0.0, "train/lr-pg_0": rate}
    version = newest_version(trajectories) if grpo.mixed_versions == "mask" else None
    samples = [build_sample(episode, policy, version) for episode in chosen]
    if grpo.old_log_probs == "recompute":
        old = backend.log_probs(samples)
        _check_gap(old, samples, grpo.max_log_prob_difference)
        samples = [replace(sample, old_log_probs=values) for sample, values in zip(samples, old, strict=True)]
        for episode, sample in zip(chosen, samples, strict=True):
            episode.old_log_probs = spread(sample.old_log_probs, sample, len(episode.token_ids))
    if grpo.needs_reference:
        if reference is None:
            raise ValueError("grpo.kl_coefficient, or a teacher, needs a second policy, but none was given.")
        scored = reference(samples)
        samples = [replace(sample, ref_log_probs=values) for sample, values in zip(samples, scored, strict=True)]
        for episode, sample, values in zip(chosen, samples, scored, strict=True):
            episode.ref_log_probs = spread(values, sample, len(episode.token_ids))
    further: dict[str, float] = {}
    if grpo.teacher is not None:
        # Each token has an advantage of its own; the episode's is their mean.
        gaps = [distil(row, sample.old_log_probs, grpo) for row, sample in zip(scored, samples, strict=True)]
        for number, (episode, gap) in enumerate(zip(chosen, gaps, strict=True)):
            samples[number] = replace(samples[number], advantages=gap.astype(np.float32))
            episode.advantage = float(gap.mean())
        further["train/reverse_kl"] = -float(np.concatenate(gaps).mean())
    groups: dict[int, list[TrainSample]] = {}
    for episode, sample in zip(chosen, samples, strict=True):
        groups.setdefault(episode.group_index, []).append(sample)

    objective = GrpoObjective(grpo)
    rows: list[dict[str, float]] = []
    sizes: list[int] = []
    for epoch in range(grpo.passes):  # PPO epochs
        order = list(groups.values())
        if epoch:
            python_generator(seed, "pass", iteration, epoch).shuffle(order)
        for minibatch in split_steps(order, groups_per_step=grpo.groups_per_step):
            minibatch_samples = [sample for group in minibatch for sample in group]
            rows.append(backend.step(minibatch_samples, objective, rate))
            sizes.append(len(minibatch_samples))
    means = {f"train/{name}": float(np.mean([row[name] for row in rows])) for name in rows[0]}
    # The first step moves the weights: only before it do trainer and engine have the same ones.
    means[f"train/{_GAP}"] = rows[0][_GAP]
    return {
        **means,
        **further,
        "train/global_batch_size": float(np.mean(sizes)),
        "train/skipped": sum(row["skipped"] for row in rows),
        "train/steps": float(len(rows)),
        "train/lr-pg_0": rate,
    }


def scheduled_rate(options: OptimizerOptions, iteration: int) -> float:
    """Learning rate of an iteration: linear warm-up, constant, linear decay over the last fraction of the schedule."""
    return learning_rate(
        iteration,
        base=options.learning_rate,
        warmup_steps=options.warmup_iterations,
        total_steps=options.schedule_iterations,
        decay_fraction=options.decay_fraction,
        decay_to=DECAY_TO,
    )


def _check_gap(values: Sequence[np.ndarray], samples: Sequence[TrainSample], allowed: float | None) -> None:
    if allowed is None:
        return
    gaps = np.concatenate([np.abs(row - sample.rollout_log_probs) for row, sample in zip(values, samples, strict=True)])
    if gaps.mean() > allowed:
        raise LogProbGapError(
            f"trainer and engine log-probs differ by {gaps.mean():.2e} on average, more than "
            f"grpo.max_log_prob_difference={allowed}; check engine precision, weights and image encoding."
        )


SOLVED_AT_START = 0.95  # validated solve rate from which a warm start leaves GRPO little to learn
_SCARCE = 0.9  # share of groups without a signal that counts as scarce
_SCARCE_ITERATIONS = 5  # in a row before the warning


class SignalWatch:
    """Warns once if most groups carry no signal, and reports at the end how many iterations trained nothing.

    A group whose episodes are all solved, or all unsolved, has advantages of 0. The numbers of each iteration are in
    its metrics (`rollout/dynamic_filter/…`, `rollout/trained_ratio`).
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.seen = self.idle = self.scarce = 0
        self.warned = False

    def observe_start(self, solve_rate: float | None, steps: int) -> None:
        """Warn where the policy that GRPO starts from solves nearly everything.

        Args:
            solve_rate: of the validation, sampled, in [0, 1]; None: not validated.
            steps: of the warm start.
        """
        if solve_rate is None or solve_rate < SOLVED_AT_START:
            return
        run, words = self.task.run, self.task.words
        who, way_out = ("the starting policy", f"take harder {words.units}")
        if steps:
            who = "the warm start"
            way_out = (
                f"shorten it ({run}.warm_start.steps={steps}, or {run}.warm_start.stop_below), let it train on an "
                f"expert that is not always right ({run}.warm_start.teacher), or take harder {words.units}"
            )
        logger.warning(
            "%s already solves %.1f %% of the validation %s: GRPO has little left to learn and may lower that; %s",
            who,
            100 * solve_rate,
            words.units,
            way_out,
        )

    def observe(self, iteration: int, metrics: Mapping[str, float | None]) -> None:
        """Note an iteration; warn at the first without a trained group, or at the fifth scarce one in a row."""
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
        if self.warned or not (idle or self.scarce >= _SCARCE_ITERATIONS):
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
            "iteration %d: no group to train on%s (%d groups, %d without a signal): %s; %s. Logged only once.",
            iteration,
            "" if idle else " but few",
            groups,
            without,
            why,
            way_out,
        )

    def close(self) -> None:
        """Log how many iterations trained nothing."""
        if self.idle:
            logger.warning(
                "%d of %d iterations trained nothing: none of their groups carried a signal "
                "(rollout/trained_ratio is 0 in their metrics)",
                self.idle,
                self.seen,
            )
