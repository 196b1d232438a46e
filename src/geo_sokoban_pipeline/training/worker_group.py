"""A worker group: the driver is rank 0, and workers are the other ranks; each has a copy of the policy.

Rollouts are sharded by whole groups; steps are sharded by the backend that `backends/ranks.py` builds on the group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.distributed.group import Group, Meeting
from geo_sokoban_pipeline.distributed.launch import Job, Ranks
from geo_sokoban_pipeline.policies.policy import Policy, device_of, load_as, load_empty
from geo_sokoban_pipeline.rollout.engines.base import RolloutEngine
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.rollout.rollout import Progress, check_failures, load_rollout_fn
from geo_sokoban_pipeline.training.sharding import shard_groups
from geo_sokoban_pipeline.training.worker import Blueprint, JoinGroup, Rollout, UpdateWeights, model_tensors
from geo_sokoban_pipeline.trajectories.types import Trajectory

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
        before_rollout: set by a backend whose weights are sharded.

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
        self.size, self.options = options.processes, options
        self.before_rollout: Callable[[], None] | None = None
        self._policy = policy
        # A server that comes back reads its weights from the thread of its engine.
        self._lock = threading.Lock()
        self._group: Group | None = None
        self._ranks = ranks or Ranks([Blueprint.of(policy, options)] * (self.size - 1))

    @property
    def group(self) -> Group:
        """The collectives of the driver; within `run`."""
        assert self._group is not None
        return self._group

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
                if self._group is None and self.is_open:
                    meeting, is_empty = Meeting(self.size), self._policy.is_empty
                    joining = [
                        JoinGroup(rank, self.size, meeting.port, is_empty, self._device) for rank in range(1, self.size)
                    ]
                    self._ranks.run(lambda: self._join(meeting, is_empty), joining)
                return self._ranks.run(own, jobs)
            except BaseException:
                self.leave()
                raise

    def broadcast(self, job: Job) -> None:
        """Run a job in every worker."""
        self.run(lambda: None, [job] * (self.size - 1))

    def update_weights(self, version: int) -> None:
        """Make the workers drop what they computed with earlier weights."""
        if self.before_rollout is not None:
            self.before_rollout()
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
        if self.before_rollout is not None:
            self.before_rollout()
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

    def close(self) -> None:
        """End the workers."""
        self._ranks.close()
        self.leave()

    def leave(self) -> None:
        """Leave the collectives, as every worker does at its end; the next `run` joins them again."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _join(self, meeting: Meeting, is_empty: bool) -> None:
        self._group = meeting.join(self.size, self._device)
        if not is_empty:
            self._group.broadcast(model_tensors(self._policy.model))


def load_driver_policy(options: TrainOptions, folder: Path) -> Policy:
    """The policy of a driver that trains: empty where the weights are elsewhere, in parts or off the device.

    The backend then reads them from the folder, and gives the policy whole weights when an engine of this process needs
    them.

    Raises:
        FileNotFoundError, ValueError, RuntimeError: as `load_as`.
    """
    is_elsewhere = options.shares_weights or options.optimizer.offload
    return load_empty(options.policy, folder) if is_elsewhere else load_as(options.policy, folder)


@contextmanager
def open_worker_group(policy: Policy, options: TrainOptions) -> Iterator[WorkerGroup | None]:
    """A worker group of `options.processes` for the `with` block; None with one process.

    Raises:
        ValueError: Megatron-Core would ask for a GPU where there is none.
    """
    layout = options.megatron_layout
    if layout is not None and layout.sequence_parallel and device_of(options.policy) == "cpu":
        raise ValueError(
            f"megatron.sequence_parallel=true with policy.device={options.policy.device}: torch sees no GPU, which "
            "Megatron-Core asks for its buffers. Set sequence_parallel=false."
        )
    if options.processes == 1:
        yield None
        return
    workers = WorkerGroup(policy, options)
    try:
        yield workers
    finally:
        workers.close()
