"""A worker group whose ranks are all actors of a Ray cluster; the driver has no weights and computes no step.

The ranks get the policy as a folder through Ray's object store, so they need none of the driver's files.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.distributed.launch import Job
from geo_sokoban_pipeline.distributed.ray_placement import RayRanks, connected, gpus_of_a_rank
from geo_sokoban_pipeline.distributed.slices import read_weights
from geo_sokoban_pipeline.policies.policy import Policy, save_policy
from geo_sokoban_pipeline.rollout.engines.base import RolloutEngine
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.rollout.rollout import Progress
from geo_sokoban_pipeline.runs.own_code import own_files
from geo_sokoban_pipeline.runs.storage import Files
from geo_sokoban_pipeline.tasks import registered_here
from geo_sokoban_pipeline.training.worker import Blueprint, JoinGroup, OpenMeeting, Rollout, Worker
from geo_sokoban_pipeline.training.worker_group import WorkerGroup
from geo_sokoban_pipeline.trajectories.types import Trajectory

Renamed = TypeVar("Renamed", TrainOptions, RolloutSettings)


class RayWorkerGroup(WorkerGroup):
    """`options.processes` workers in a Ray cluster, see `WorkerGroup`.

    Args:
        policy: of the driver; where it is empty, the ranks get the weights of its folder, else its own.

    Raises:
        RankError, ValueError: as `RayRanks`, `connected`.
    """

    def __init__(self, policy: Policy, options: TrainOptions) -> None:
        self._prepare(policy, options)
        with ExitStack() as opened:
            opened.enter_context(connected(options.ray, self.size))
            folder = policy.folder
            if not policy.is_empty:
                folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
                save_policy(policy, folder)
            assert folder is not None  # an empty policy is that of a folder
            self._source = folder
            gpus = gpus_of_a_rank(options.ray, options.policy.device)
            self._device = "cuda" if gpus else "cpu"
            chosen = options.policy.model_copy(update={"device": self._device})
            self._code = OwnCode.of(options)
            own = self._code.renamed(options.model_copy(update={"policy": chosen}))
            is_shared = options.sharding != "none"
            build = replace(Blueprint.of(policy, own), folder=None, is_empty=is_shared)
            self.weights = folder if is_shared else None
            code = self._code
            self._actors = RayRanks(self.size, build, options.ray, gpus, code.files, code.imports)
            opened.callback(self._actors.close)
            self._has_joined = False
            self._owned = opened.pop_all()

    @property
    def drives_a_rank(self) -> bool:
        """Whether rank 0 is this process."""
        return False

    @property
    def is_open(self) -> bool:
        """Whether the workers take jobs."""
        return self._actors.is_open

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the workers, each on its node."""
        return [place.pid for place in self._actors.places]

    @property
    def cpu_seconds(self) -> float:
        """CPU-seconds of the workers' answered jobs."""
        return self._actors.cpu_seconds

    def run_jobs(self, jobs: Sequence[Job]) -> list[Any]:
        """Run one job on each of the first ranks, from rank 0 on; returns their results.

        Raises:
            RankError: see `RayRanks.run`.
        """
        with self._lock:
            self._gather()
            return self._actors.run(jobs)

    def read(self, folder: Path, job: Callable[[Path], Job]) -> None:
        """See `WorkerGroup`."""
        with self._lock:
            self._gather()
            self._actors.read(folder, job)

    def write(self, folder: Path, job: Callable[[Path], Job], *, everywhere: bool) -> Files:
        """See `WorkerGroup`."""
        with self._lock:
            self._gather()
            return self._actors.write(folder, job, self.size if everywhere else 1)

    def broadcast(self, job: Job) -> None:
        """Run a job in every worker."""
        self.run_jobs([job] * self.size)

    def close(self) -> None:
        """End the workers, and the cluster where this group has started it."""
        self._owned.close()

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
        settings = self._code.renamed(settings)
        results = self.run_jobs([Rollout(part, settings) for part in parts])
        if progress is not None:
            progress(sum(map(len, parts)))
        return results

    def _gather(self) -> None:
        """Have the ranks join each other, and give them their weights, before the first job."""
        if self._has_joined:
            return
        ranks, is_empty = self._actors, self.weights is not None
        if not is_empty:
            ranks.read(self._source, ReadWeights, 1)
        port: int = ranks.run([OpenMeeting(self.size, ranks.host)])[0]
        join = JoinGroup(0, self.size, port, is_empty, self._device, ranks.host)
        ranks.run(
            [
                replace(join, rank=rank, address=None if ranks.is_on_one_machine else place.address)
                for rank, place in enumerate(ranks.places)
            ]
        )
        self._has_joined = True


@dataclass(frozen=True)
class OwnCode:
    """The user's own code, which ranks on other machines get as files in their working folder.

    Attributes:
        files: contents by name; with own tasks also the `conf/base/tasks.yml` that names them.
        imports: folders of them that modules are imported from.
        names: of objects in files, as the driver's parameters give them, and as they are in the ranks.
    """

    files: Mapping[str, bytes]
    imports: Sequence[str]
    names: Mapping[str, str]

    @classmethod
    def of(cls, options: TrainOptions) -> OwnCode:
        """The code that the options name, and that of the project's own tasks."""
        tasks = registered_here()
        named = [options.env.factory, options.reward.function, options.rollout.function, *tasks.values()]
        files: dict[str, bytes] = {}
        imports: list[str] = []
        names: dict[str, str] = {}
        for number, spec in enumerate(dict.fromkeys(named)):
            found = own_files(spec)
            place = f"own_code/{number}"
            files |= {f"{place}/{name}": path.read_bytes() for name, path in found.items()}
            path, colon, name = ("", "", "") if spec.endswith(".py") else spec.rpartition(":")
            if (path or spec).endswith(".py") and found:
                names[spec] = f"{place}/{next(iter(found))}{colon}{name}"
            elif found:
                imports.append(place)
        if tasks:
            registered = {task: names.get(spec, spec) for task, spec in tasks.items()}
            files["conf/base/tasks.yml"] = yaml.safe_dump(registered).encode()
        return cls(files, imports, names)

    def renamed(self, options: Renamed) -> Renamed:
        """Options with the names that objects have in the ranks."""
        env, reward, rollout = options.env, options.reward, options.rollout
        changes = {
            "env": env.model_copy(update={"factory": self.names.get(env.factory, env.factory)}),
            "reward": reward.model_copy(update={"function": self.names.get(reward.function, reward.function)}),
            "rollout": rollout.model_copy(update={"function": self.names.get(rollout.function, rollout.function)}),
        }
        if isinstance(options, TrainOptions):
            return options.model_copy(update=changes)
        return replace(options, **changes)


@dataclass(frozen=True)
class ReadWeights:
    """Fill a worker's model with the weights of a folder."""

    folder: Path

    def __call__(self, worker: Worker) -> None:
        """Run in a worker."""
        read_weights(dict(worker.policy.model.named_parameters()), self.folder)
