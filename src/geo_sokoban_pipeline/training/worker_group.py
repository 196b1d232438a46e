"""A worker group: this process and others that do parts of its work on the same weights, in shared memory.

After any error the group is closed, so stale results cannot be read. Answers are taken in the order of the workers,
so equal runs stay equal.
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
from geo_sokoban_pipeline.rollout.episode import EpisodeTask, RolloutSettings
from geo_sokoban_pipeline.rollout.rollout import Progress, check_failures, load_rollout_fn
from geo_sokoban_pipeline.training.sharding import deal_groups
from geo_sokoban_pipeline.training.shared_tensors import SharedTensors, share_like, share_model
from geo_sokoban_pipeline.training.worker import Blueprint, Failed, Job, Rollout, UpdateWeights, serve
from geo_sokoban_pipeline.trajectories.types import Trajectory

_PATIENCE = 5.0  # seconds that a child is given to end


class WorkerGroupError(RuntimeError):
    """A process of a worker group failed or is gone; the message says which and why."""


@dataclass
class Child:
    """The parent's end of a child.

    Attributes:
        title: what errors call it.
        gradients: its gradients by parameter, in shared memory; valid once the job that made them is answered.
        cpu_seconds: of its jobs so far.
    """

    title: str
    process: Any
    pipe: Any
    gradients: dict[str, Tensor]
    cpu_seconds: float = 0.0

    def ask(self, job: Job) -> None:
        """Send a job."""
        try:
            self.pipe.send(job)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._lost() from error

    def take(self) -> Any:
        """Wait for the answer to the last job."""
        try:
            answer = self.pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._lost() from error
        if isinstance(answer, Failed):
            raise WorkerGroupError(f"{self.title} failed:\n{answer.text}")
        self.cpu_seconds = answer.cpu_seconds
        return answer.result

    def dismiss(self) -> None:
        """Close the pipe: an idle child ends by it."""
        self.pipe.close()

    def end(self, *, patient: bool) -> None:
        """Have the process ended: first by itself, where there is patience for it."""
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
        # A child that failed before it could do anything has said why.
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
            "with processes=1 there is nobody to lose, and less memory in use."
        )


def start_child(title: str, blueprint: Blueprint, options: TrainOptions, gradients: SharedTensors) -> Child:
    """Start a child; returns at once, while it still imports its libraries.

    Args:
        title: what errors call it.
        gradients: buffer for its gradients.
    """
    context = multiprocessing.get_context("spawn")
    pipe, far_end = context.Pipe()
    # A child inherits the mask, so it is deaf to Ctrl-C from its first moment. The tracker, which the first child would
    # start, sets a mask of its own.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process = context.Process(
            target=serve, args=(far_end, blueprint, options, gradients, torch.get_num_threads()), daemon=True
        )
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    # The child's end must be open in the child alone: its closing is how its death shows.
    far_end.close()
    return Child(f"{title} (pid {process.pid})", process, pipe, gradients.views())


@dataclass(frozen=True)
class Part:
    """One process's part of a step's gradients.

    Attributes:
        metrics: of the objective, over the part.
        tokens: trained tokens of a part whose gradients are means over them.
        names: parameters that have a gradient; only of a child's part.
    """

    metrics: dict[str, float]
    tokens: int = 0
    names: tuple[str, ...] = ()


Result = TypeVar("Result")


class WorkerGroup:
    """This process and `options.processes` − 1 children.

    Args:
        policy: its weights move into shared memory; whoever changes them in place changes them for all.
        options: of the run; threads are as many in every child as here.

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
        self._children: list[Child] = []
        try:
            for number in range(1, self.size):
                title = f"process {number + 1} of {self.size}"
                self._children.append(start_child(title, blueprint, options, share_like(self._parameters)))
        except BaseException:
            self.close()
            raise

    @property
    def cpu_seconds(self) -> float:
        """Of the children's jobs that were answered so far."""
        return sum(child.cpu_seconds for child in self._children)

    def cpu_clock(self) -> float:
        """CPU-seconds of this process and of its children's jobs; differences mean something, the value does not."""
        return time.process_time() + self.cpu_seconds

    def run(self, own: Callable[[], Result], jobs: Sequence[Job]) -> list[Any]:
        """Do `own` here while the first children do one job each; returns all results in order, `own`'s first.

        Raises:
            WorkerGroupError: a child failed or is gone, or the worker group is closed. Whatever is raised closes the
                worker group.
        """
        if not self._children:
            raise WorkerGroupError("this worker group is closed.")
        chosen = self._children[: len(jobs)]
        try:
            for child, job in zip(chosen, jobs, strict=True):
                child.ask(job)
            return [own(), *(child.take() for child in chosen)]
        except BaseException:  # an interrupt too: answers to this step must not wait in the pipes for the next one
            self.close(patient=False)
            raise

    def broadcast(self, job: Job) -> None:
        """Have every child do a job."""
        self.run(lambda: None, [job] * len(self._children))

    def update_weights(self, version: int) -> None:
        """Make the children forget what they computed with earlier weights."""
        self.broadcast(UpdateWeights(version))

    def rollout(
        self,
        engine: RolloutEngine,
        policy: Policy,
        tasks: Sequence[EpisodeTask],
        settings: RolloutSettings,
        progress: Progress | None = None,
    ) -> list[Trajectory]:
        """Roll out as `rollout.function` does, groups sharded over the processes; this one uses the given engine."""
        play = load_rollout_fn(settings.rollout)
        dealt = deal_groups(tasks, self.size)
        # Which share of the episodes failed is a question to all of them together.
        lenient = replace(settings, rollout=settings.rollout.model_copy(update={"max_failed_share": 1.0}))
        parts = [[tasks[index] for index in numbers] for numbers in dealt] or [[]]
        watching = () if progress is None else (progress,)
        played = self.run(
            lambda: play(engine, policy, parts[0], lenient, *watching), [Rollout(part, lenient) for part in parts[1:]]
        )
        if progress is not None and len(dealt) > 1:
            progress(len(tasks) - len(dealt[0]))
        episodes = dict(
            zip([i for numbers in dealt for i in numbers], [e for part in played for e in part], strict=True)
        )
        trajectories = [episodes[index] for index in range(len(tasks))]
        check_failures(trajectories, settings.rollout.max_failed_share)
        return trajectories

    @torch.no_grad()
    def add_gradients(self, parts: Sequence[Part], weights: Sequence[float] | None = None) -> None:
        """Add the children's gradients to this process's own, in order.

        Args:
            parts: of this process and of as many children as were asked.
            weights: factor of each part's gradients; None: 1.
        """
        if weights is not None:
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(weights[0])
        for number, (child, part) in enumerate(zip(self._children, parts[1:], strict=False), start=1):
            for name in part.names:
                gradient, parameter = child.gradients[name], self._parameters[name]
                scaled = gradient if weights is None else gradient.mul_(weights[number])
                parameter.grad = scaled.clone() if parameter.grad is None else parameter.grad.add_(scaled)

    def close(self, *, patient: bool = True) -> None:
        """End the children; an idle one ends by itself, and any other is ended."""
        children, self._children = self._children, []
        for child in children:
            child.dismiss()
        for child in children:
            child.end(patient=patient)


def sum_metrics(parts: Sequence[Part], weights: Sequence[float] | None = None) -> dict[str, float]:
    """Metrics that add up over a step, from those of its parts, each times its weight (None: 1)."""
    totals: dict[str, float] = {}
    for part, weight in zip(parts, weights or [1.0] * len(parts), strict=True):
        for name, value in part.metrics.items():
            totals[name] = totals.get(name, 0.0) + value * weight
    return totals


@contextmanager
def open_worker_group(policy: Policy, options: TrainOptions) -> Iterator[WorkerGroup | None]:
    """The worker group that the options ask for, for the `with` block; None with one process."""
    if options.processes == 1:
        yield None
        return
    workers = WorkerGroup(policy, options)
    try:
        yield workers
    finally:
        workers.close()
