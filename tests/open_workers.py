"""Workers of which a test can ask anything: they apply a function to themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from geo_sokoban_pipeline.distributed.process import LocalProcess
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.training.worker import Worker, WorkerSpec
from geo_sokoban_pipeline.training.worker_group import WorkerGroup
from task_options import TrainOptions


class OpenWorker(Worker):
    """A worker that applies functions."""

    def apply(self, function: Callable[[Any], Any]) -> Any:
        return function(self)


class OpenWorkerSpec(WorkerSpec):
    """Builds one."""

    def __call__(self) -> Worker:
        return opened(super().__call__())


def opened(worker: Worker) -> Worker:
    worker.__class__ = OpenWorker
    return worker


def start_others(policy: Policy, options: TrainOptions, count: int) -> list[LocalProcess]:
    """Processes of the ranks after the first."""
    spec = OpenWorkerSpec.of(policy, options)
    return [LocalProcess(f"process {number} of {count + 1}", spec) for number in range(2, count + 2)]


def open_group(policy: Policy, options: TrainOptions, others: Sequence[LocalProcess] | None = None) -> WorkerGroup:
    """A worker group of such workers.

    Args:
        others: the ranks after the first; None: they are started here.
    """
    if others is None:
        others = start_others(policy, options, options.processes - 1)
    workers = WorkerGroup(policy, options, others)
    assert workers.own is not None
    opened(workers.own)
    return workers


def leave(workers: WorkerGroup) -> None:
    """End rank 0 of a group alone; the others can join a next one."""
    if workers.is_open and workers.own is not None:
        workers.handles[0].close()
        workers.own.leave()


def apply(workers: WorkerGroup, *functions: Callable[[Any], Any]) -> list[Any]:
    """Results of a function each, on the first ranks."""
    return workers.call_each("apply", [(function,) for function in functions])


def apply_on_all(workers: WorkerGroup, function: Callable[[Any], Any]) -> list[Any]:
    return apply(workers, *[function] * workers.size)
