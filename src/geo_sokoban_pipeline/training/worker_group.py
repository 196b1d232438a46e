"""A worker group: the driver and further processes share the weights in memory and split each step's work.

Any error closes the group, so no stale answer is read later. Answers are received in the order of the workers, so sums
are added in the same order in every run.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from typing import Any, TypeVar

import torch
from torch import Tensor, multiprocessing

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.engines.base import RolloutEngine
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.rollout.rollout import Progress, check_failures, load_rollout_fn
from geo_sokoban_pipeline.training.sharding import shard_groups
from geo_sokoban_pipeline.training.shared_tensors import SharedTensors, share_like, share_model
from geo_sokoban_pipeline.training.worker import Blueprint, Failed, Job, Rollout, UpdateWeights, serve
from geo_sokoban_pipeline.trajectories.types import Trajectory

_PATIENCE = 5.0  # seconds before a worker that does not exit is terminated, then killed


class WorkerGroupError(RuntimeError):
    """A worker failed or its process has ended; the message says which and why."""


@dataclass
class WorkerHandle:
    """The driver's side of one worker.

    Attributes:
        title: its name in errors.
        gradients: its gradients by parameter, in shared memory; valid once the job that computed them is answered.
        cpu_seconds: of its jobs so far.
    """

    title: str
    process: Any
    pipe: Any
    gradients: dict[str, Tensor]
    cpu_seconds: float = 0.0

    def send(self, job: Job) -> None:
        """Send a job."""
        try:
            self.pipe.send(job)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._lost() from error

    def receive(self) -> Any:
        """Wait for the answer to the last job; returns its result."""
        try:
            answer = self.pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._lost() from error
        if isinstance(answer, Failed):
            raise WorkerGroupError(f"{self.title} failed:\n{answer.text}")
        self.cpu_seconds = answer.cpu_seconds
        return answer.result

    def stop(self, *, patient: bool) -> None:
        """End the process: wait for its exit where `patient`, then terminate it, then kill it."""
        if patient:
            self.process.join(_PATIENCE)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(_PATIENCE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()

    def _lost(self) -> WorkerGroupError:
        # A worker that failed before its first job has sent its traceback.
        with suppress(EOFError, OSError):
            while self.pipe.poll():
                answer = self.pipe.recv()
                if isinstance(answer, Failed):
                    return WorkerGroupError(f"{self.title} failed:\n{answer.text}")
        self.process.join(_PATIENCE)
        code = self.process.exitcode
        name = f" ({signal.Signals(-code).name})" if code is not None and code < 0 else ""
        return WorkerGroupError(
            f"{self.title} ended with exit code {code}{name}. The same command continues from what is stored; "
            "processes=1 uses no further processes and less memory."
        )


def start_worker(title: str, blueprint: Blueprint, options: TrainOptions, gradients: SharedTensors) -> WorkerHandle:
    """Start a worker process; returns at once, while the process still imports its libraries.

    Args:
        title: its name in errors.
        gradients: buffer for its gradients.
    """
    context = multiprocessing.get_context("spawn")
    pipe, far_end = context.Pipe()
    # A worker inherits the signal mask, so Ctrl-C never reaches it. Python's resource tracker, which the first worker
    # would start, must not inherit it.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process = context.Process(
            target=serve, args=(far_end, blueprint, options, gradients, torch.get_num_threads()), daemon=True
        )
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    # Only the worker may hold its end of the pipe: then the pipe closes when the worker dies.
    far_end.close()
    return WorkerHandle(f"{title} (pid {process.pid})", process, pipe, gradients.views())


@dataclass(frozen=True)
class Part:
    """One process's part of a step's gradients.

    Attributes:
        metrics: of the objective, over the part.
        tokens: trained tokens of the part, where its gradients are means over them.
        names: parameters that have a gradient; empty for the driver's part.
    """

    metrics: dict[str, float]
    tokens: int = 0
    names: tuple[str, ...] = ()


Result = TypeVar("Result")


class WorkerGroup:
    """The driver and `options.processes` − 1 workers.

    Args:
        policy: its weights move into shared memory; a change in place changes them for all processes.
        options: of the run; every worker uses as many threads as the driver.

    Raises:
        ValueError, SharedMemoryError: the weights cannot be shared.
    """

    def __init__(self, policy: Policy, options: TrainOptions) -> None:
        self.size = options.processes
        self._parameters = dict(policy.model.named_parameters())
        weights = share_model(policy.model)
        config = policy.model.config
        blueprint = Blueprint(
            config,
            config._attn_implementation,
            policy.model.dtype,
            policy.tokenizer,
            policy.image_processor,
            weights,
        )
        self._handles: list[WorkerHandle] = []
        try:
            for number in range(1, self.size):
                title = f"process {number + 1} of {self.size}"
                self._handles.append(start_worker(title, blueprint, options, share_like(self._parameters)))
        except BaseException:
            self.close()
            raise

    @property
    def cpu_seconds(self) -> float:
        """CPU-seconds of the workers' answered jobs."""
        return sum(worker.cpu_seconds for worker in self._handles)

    def cpu_clock(self) -> float:
        """CPU-seconds of the driver and of the workers' jobs, from an arbitrary zero; take differences."""
        return time.process_time() + self.cpu_seconds

    def run(self, own: Callable[[], Result], jobs: Sequence[Job]) -> list[Any]:
        """Run `own` here while the first workers run one job each; returns all results in order, `own`'s first.

        Raises:
            WorkerGroupError: a worker failed or ended, or the group is closed. Any exception closes the group.
        """
        if not self._handles:
            raise WorkerGroupError("this worker group is closed.")
        chosen = self._handles[: len(jobs)]
        try:
            for worker, job in zip(chosen, jobs, strict=True):
                worker.send(job)
            return [own(), *(worker.receive() for worker in chosen)]
        except BaseException:  # an interrupt too: no answer to this step may stay in a pipe for the next one
            self.close(patient=False)
            raise

    def broadcast(self, job: Job) -> None:
        """Run a job in every worker."""
        self.run(lambda: None, [job] * len(self._handles))

    def update_weights(self, version: int) -> None:
        """Make the workers drop what they computed with earlier weights."""
        self.broadcast(UpdateWeights(version))

    def rollout(
        self,
        engine: RolloutEngine,
        policy: Policy,
        tasks: Sequence[EpisodeRequest],
        settings: RolloutSettings,
        progress: Progress | None = None,
    ) -> list[Trajectory]:
        """Roll out by `rollout.function`, groups sharded over the processes; the driver uses the given engine."""
        rollout_fn = load_rollout_fn(settings.rollout)
        shards = shard_groups(tasks, self.size)
        # `max_failed_share` is checked over all episodes below, not within a shard.
        lenient = replace(settings, rollout=settings.rollout.model_copy(update={"max_failed_share": 1.0}))
        parts = [[tasks[index] for index in shard] for shard in shards] or [[]]
        watching = () if progress is None else (progress,)
        results = self.run(
            lambda: rollout_fn(engine, policy, parts[0], lenient, *watching),
            [Rollout(part, lenient) for part in parts[1:]],
        )
        if progress is not None and len(shards) > 1:
            progress(len(tasks) - len(shards[0]))
        episodes = dict(zip([i for shard in shards for i in shard], [e for part in results for e in part], strict=True))
        trajectories = [episodes[index] for index in range(len(tasks))]
        check_failures(trajectories, settings.rollout.max_failed_share)
        return trajectories

    @torch.no_grad()
    def add_gradients(self, parts: Sequence[Part], weights: Sequence[float] | None = None) -> None:
        """Add the workers' gradients to the driver's, in order.

        Args:
            parts: the driver's, then those of the workers that had a job.
            weights: factor of each part's gradients; None: 1.
        """
        if weights is not None:
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(weights[0])
        for number, (worker, part) in enumerate(zip(self._handles, parts[1:], strict=False), start=1):
            for name in part.names:
                gradient, parameter = worker.gradients[name], self._parameters[name]
                scaled = gradient if weights is None else gradient.mul_(weights[number])
                parameter.grad = scaled.clone() if parameter.grad is None else parameter.grad.add_(scaled)

    def close(self, *, patient: bool = True) -> None:
        """End the workers: an idle one exits when its pipe closes; `patient` gives a busy one time to do so."""
        workers, self._handles = self._handles, []
        for worker in workers:
            worker.pipe.close()
        for worker in workers:
            worker.stop(patient=patient)


def sum_metrics(parts: Sequence[Part], weights: Sequence[float] | None = None) -> dict[str, float]:
    """Metrics of a step: the sum over its parts, each times its weight (None: 1)."""
    totals: dict[str, float] = {}
    for part, weight in zip(parts, weights or [1.0] * len(parts), strict=True):
        for name, value in part.metrics.items():
            totals[name] = totals.get(name, 0.0) + value * weight
    return totals


@contextmanager
def open_worker_group(policy: Policy, options: TrainOptions) -> Iterator[WorkerGroup | None]:
    """A worker group of `options.processes` for the `with` block; None with one process."""
    if options.processes == 1:
        yield None
        return
    workers = WorkerGroup(policy, options)
    try:
        yield workers
    finally:
        workers.close()
