"""A worker group: the driver is rank 0, and workers are the other ranks; each has a copy of the policy.

Rollouts are sharded by whole groups; steps are sharded by the backend that `backend.py` builds on the group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.distributed.group import Meeting
from geo_sokoban_pipeline.distributed.launch import Ranks
from geo_sokoban_pipeline.distributed.messages import Call, Job
from geo_sokoban_pipeline.policies.policy import Policy, device_of, load_as, load_empty
from geo_sokoban_pipeline.rollout.engines.base import RolloutEngine
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.rollout.rollout import Progress, check_failures, load_rollout_fn
from geo_sokoban_pipeline.runs.storage import Files
from geo_sokoban_pipeline.training.ray_group import RayWorkers
from geo_sokoban_pipeline.training.sharding import shard_groups
from geo_sokoban_pipeline.training.worker import Worker, WorkerSpec
from geo_sokoban_pipeline.trajectories.types import Trajectory

if TYPE_CHECKING:
    from geo_sokoban_pipeline.rollout.engines.sglang.servers import Launcher

Result = TypeVar("Result")


class WorkerGroup:
    """The driver and `options.processes` − 1 workers.

    Args:
        policy: of the driver; the workers take over its weights at the first job. Afterwards only the backend may
            change them, on all ranks alike. An empty one (`load_driver_policy`) gives them none.
        options: of the run; every worker uses as many threads as the driver.
        ranks: idle processes of workers over the same policy and options; None: they are started here.

    Attributes:
        size: number of ranks.
        options: of the run, with the number of ranks that there are.
        missing: ranks for which there was no place.
        before_rollout: set by a backend whose weights are sharded.
        own: the worker of rank 0, in this process.
        weights: folder from which the ranks read what they hold of the weights; None: they have them.

    Raises:
        ValueError: the policy is on a GPU, and there is not one for each process.
    """

    def __init__(self, policy: Policy, options: TrainOptions, ranks: Ranks | None = None) -> None:
        self._device = policy.device
        if self._device != "cpu" and torch.cuda.device_count() < options.processes:
            raise ValueError(
                f"processes={options.processes} with the policy on {self._device}: each takes a GPU of its own, and "
                f"there are {torch.cuda.device_count()}. Lower processes, or set policy.device=cpu."
            )
        self._prepare(policy, options)
        self.own = Worker(policy, options)
        self.weights: Path | None = policy.folder if policy.is_empty else None
        self._ranks = ranks or Ranks([WorkerSpec.of(policy, options)] * (self.size - 1))

    def _prepare(self, policy: Policy, options: TrainOptions) -> None:
        self.size, self.options, self.missing = options.processes, options, 0
        self.before_rollout: Callable[[], None] | None = None
        self._policy = policy
        # A server that comes back reads its weights from the thread of its engine.
        self._lock = threading.Lock()

    @property
    def drives_a_rank(self) -> bool:
        """Whether rank 0 is this process."""
        return True

    @property
    def launcher(self) -> Launcher | None:
        """Of servers that sample; None: they are launched on this machine."""
        return None

    @property
    def is_open(self) -> bool:
        """Whether the workers take jobs."""
        return self._ranks.is_open

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the workers."""
        return self._ranks.process_ids

    @property
    def cpu_seconds(self) -> float:
        """CPU-seconds of the workers' answered jobs."""
        return self._ranks.cpu_seconds

    def cpu_clock(self) -> float:
        """CPU-seconds of the driver and of the workers' jobs, from an arbitrary zero; take differences."""
        return time.process_time() + self.cpu_seconds

    def run(self, own: Callable[[], Result], jobs: Sequence[Job]) -> list[Any]:
        """Run `own` here while the first workers run one job each; returns all results in order, `own`'s first.

        Raises:
            RankError: a worker failed or ended, or the group is closed. Any exception closes the group.
        """
        with self._lock:
            try:
                if self.own.group is None and self.is_open:
                    meeting = Meeting(self.size)
                    given = [(rank, self.size, meeting.port, self._device) for rank in range(1, self.size)]
                    self._ranks.run(
                        lambda: self.own.join_as_first(meeting, self.size, self._device),
                        [Call("join", arguments) for arguments in given],
                    )
                return self._ranks.run(own, jobs)
            except BaseException:
                self.leave()
                raise

    def run_jobs(self, jobs: Sequence[Job]) -> list[Any]:
        """Run one job on each of the first ranks, from rank 0 on; returns their results.

        Raises:
            RankError: as `run`.
        """
        return self.run(lambda: jobs[0](self.own), jobs[1:])

    def call_each(self, method: str, given: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of the first workers, from rank 0 on, each with its arguments; returns the results in order.

        Raises:
            RankError: as `run`.
        """
        return self.run_jobs([Call(method, arguments) for arguments in given])

    def call_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker with the same arguments; returns the results in order.

        Raises:
            RankError: as `run`.
        """
        return self.run_jobs([Call(method, arguments)] * self.size)

    def read(self, folder: Path, method: str, *arguments: Any) -> None:
        """Call a method of every worker that reads a folder of the driver.

        Args:
            arguments: of the method, after the place where the worker finds the folder.
        """
        self.call_all(method, folder, *arguments)

    def write(self, folder: Path, method: str, *, everywhere: bool) -> Files:
        """Call a method that writes into a folder of the driver, of every worker or of rank 0 alone.

        Args:
            method: given the place where a worker writes; returns sizes and digests of its own files.

        Returns:
            Those of all ranks.
        """
        parts: list[Files] = self.call_each(method, [(folder,)] * (self.size if everywhere else 1))
        return {name: record for part in parts for name, record in part.items()}

    def broadcast(self, job: Job) -> None:
        """Run a job in every worker."""
        self.run(lambda: None, [job] * (self.size - 1))

    def update_weights(self, version: int) -> None:
        """Make the workers drop what they computed with earlier weights."""
        if self.before_rollout is not None:
            self.before_rollout()
        self.broadcast(Call("update_weights", (version,)))

    def rollout(
        self,
        engine: RolloutEngine,
        policy: Policy,
        tasks: Sequence[EpisodeRequest],
        settings: RolloutSettings,
        progress: Progress | None = None,
    ) -> list[Trajectory]:
        """Roll out by `rollout.function`, groups sharded over the processes; the driver uses the given engine."""
        if self.before_rollout is not None:
            self.before_rollout()
        shards = shard_groups(tasks, self.size)
        # `max_failed_share` is checked over all episodes below, not within a shard.
        lenient = replace(settings, rollout=settings.rollout.model_copy(update={"max_failed_share": 1.0}))
        parts = [[tasks[index] for index in shard] for shard in shards] or [[]]
        results = self._roll_out(engine, policy, parts, lenient, progress)
        episodes = dict(zip([i for shard in shards for i in shard], [e for part in results for e in part], strict=True))
        trajectories = [episodes[index] for index in range(len(tasks))]
        check_failures(trajectories, settings.rollout.max_failed_share)
        return trajectories

    def _roll_out(
        self,
        engine: RolloutEngine,
        policy: Policy,
        parts: Sequence[Sequence[EpisodeRequest]],
        settings: RolloutSettings,
        progress: Progress | None,
    ) -> list[list[Trajectory]]:
        """Roll out one part on each of the first ranks."""
        rollout_fn = load_rollout_fn(settings.rollout)
        watching = () if progress is None else (progress,)
        results: list[list[Trajectory]] = self.run(
            lambda: rollout_fn(engine, policy, parts[0], settings, *watching),
            [Call("rollout", (part, settings)) for part in parts[1:]],
        )
        if progress is not None and len(parts) > 1:
            progress(sum(map(len, parts[1:])))
        return results

    def close(self) -> None:
        """End the workers."""
        self._ranks.close()
        self.leave()

    def leave(self) -> None:
        """Leave the collectives, as every worker does at its end; the next `run` joins them again."""
        group, self.own.group = self.own.group, None
        if group is not None:
            group.close()


class RayWorkerGroup(WorkerGroup):
    """`options.processes` workers in a Ray cluster, or as few as `ray.min_processes`; the driver is none of them.

    Raises:
        RankError, ValueError: as `RayWorkers`.
    """

    def __init__(self, policy: Policy, options: TrainOptions) -> None:
        self._workers = RayWorkers(policy, options)
        self._prepare(policy, self._workers.options)
        self.missing = options.processes - self.size
        self.weights = self._workers.weights

    @property
    def drives_a_rank(self) -> bool:
        """Whether rank 0 is this process."""
        return False

    @property
    def launcher(self) -> Launcher | None:
        """See `WorkerGroup`."""
        return self._workers.launcher

    @property
    def is_open(self) -> bool:
        """Whether the workers take jobs."""
        return self._workers.ranks.is_open

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the workers, each on its node."""
        return [place.pid for place in self._workers.ranks.places]

    @property
    def cpu_seconds(self) -> float:
        """CPU-seconds of the workers' answered jobs."""
        return self._workers.ranks.cpu_seconds

    def run_jobs(self, jobs: Sequence[Job]) -> list[Any]:
        """Run one job on each of the first ranks, from rank 0 on; returns their results.

        Raises:
            RankError: see `RayRanks.run`.
        """
        with self._lock:
            return self._workers.joined().run(jobs)

    def read(self, folder: Path, method: str, *arguments: Any) -> None:
        """See `WorkerGroup`."""
        with self._lock:
            self._workers.joined().read(folder, lambda place: Call(method, (place, *arguments)))

    def write(self, folder: Path, method: str, *, everywhere: bool) -> Files:
        """See `WorkerGroup`."""
        with self._lock:
            ranks = self.size if everywhere else 1
            return self._workers.joined().write(folder, lambda place: Call(method, (place,)), ranks)

    def broadcast(self, job: Job) -> None:
        """Run a job in every worker."""
        self.run_jobs([job] * self.size)

    def close(self) -> None:
        """End the workers, and the cluster where it was started for them."""
        self._workers.close()

    def leave(self) -> None:
        """The driver is in no group."""

    def _roll_out(
        self,
        engine: RolloutEngine,
        policy: Policy,
        parts: Sequence[Sequence[EpisodeRequest]],
        settings: RolloutSettings,
        progress: Progress | None,
    ) -> list[list[Trajectory]]:
        own = self._workers.code.renamed(settings)
        results = self.call_each("rollout", [(part, own) for part in parts])
        if progress is not None:
            progress(sum(map(len, parts)))
        return results


def load_driver_policy(options: TrainOptions, folder: Path) -> Policy:
    """The policy of a driver that trains: empty where the weights are elsewhere: in other ranks, or off the device.

    The backend then reads them from the folder, and gives the policy whole weights when an engine of this process needs
    them.

    Raises:
        FileNotFoundError, ValueError, RuntimeError: as `load_as`.
    """
    is_elsewhere = options.shares_weights or options.optimizer.offload or options.placement == "ray"
    return load_empty(options.policy, folder) if is_elsewhere else load_as(options.policy, folder)


@contextmanager
def open_worker_group(policy: Policy, options: TrainOptions) -> Iterator[WorkerGroup | None]:
    """A worker group of `options.processes` for the `with` block; None where this process alone is enough.

    Raises:
        ValueError: Megatron-Core would ask for a GPU where there is none.
    """
    layout = options.megatron_layout
    if layout is not None and layout.sequence_parallel and device_of(options.policy) == "cpu":
        raise ValueError(
            f"megatron.sequence_parallel=true with policy.device={options.policy.device}: torch sees no GPU, which "
            "Megatron-Core asks for its buffers. Set sequence_parallel=false."
        )
    workers: WorkerGroup
    if options.placement == "ray":
        workers = RayWorkerGroup(policy, options)
    elif options.processes == 1:
        yield None
        return
    else:
        workers = WorkerGroup(policy, options)
    try:
        yield workers
    finally:
        workers.close()
