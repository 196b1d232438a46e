"""Workers that are all actors of a Ray cluster; the driver has no weights and computes no step.

They get policy and own code through Ray's object store, so they need none of the driver's files.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.distributed.links import Conversation, Link
from geo_sokoban_pipeline.distributed.ray_placement import RayLink, RayRanks, connected, gpus_of_a_rank
from geo_sokoban_pipeline.distributed.slices import read_weights
from geo_sokoban_pipeline.policies.policy import Policy, save_policy
from geo_sokoban_pipeline.rollout.episode import RolloutSettings
from geo_sokoban_pipeline.runs.own_code import own_files
from geo_sokoban_pipeline.tasks import registered_here
from geo_sokoban_pipeline.training.worker import Blueprint, JoinGroup, OpenMeeting, Worker

Renamed = TypeVar("Renamed", TrainOptions, RolloutSettings)


class RayWorkers:
    """`options.processes` workers in a Ray cluster, over a policy whose weights they get as a folder.

    Args:
        policy: of the driver; where it is empty, the workers get the weights of its folder, else its own.

    Attributes:
        weights: folder from which the workers read what they hold of the weights; None: they have them.
        code: of the user, as the workers have it.

    Raises:
        RankError, ValueError: as `RayRanks`, `connected`.
    """

    def __init__(self, policy: Policy, options: TrainOptions) -> None:
        self._size = options.processes
        with ExitStack() as opened:
            opened.enter_context(connected(options.ray, self._size + (options.rollout.workers or 0)))
            folder = policy.folder
            if not policy.is_empty:
                folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
                save_policy(policy, folder)
            assert folder is not None  # an empty policy is that of a folder
            self._source = folder
            gpus = gpus_of_a_rank(options.ray, options.policy.device)
            self._device = "cuda" if gpus else "cpu"
            self.code = OwnCode.of(options)
            chosen = options.policy.model_copy(update={"device": self._device})
            own = self.code.renamed(options.model_copy(update={"policy": chosen}))
            is_shared = options.shares_weights
            self.weights = folder if is_shared else None
            build = replace(Blueprint.of(policy, own), folder=None, is_empty=is_shared)
            self.ranks = RayRanks(self._size, build, options.ray, gpus, self.code.files, self.code.imports)
            opened.callback(self.ranks.close)
            self._has_joined = False
            self._owned = opened.pop_all()

    def joined(self) -> RayRanks:
        """The ranks, which have joined each other and have their weights."""
        if self._has_joined:
            return self.ranks
        ranks, is_empty = self.ranks, self.weights is not None
        if not is_empty:
            ranks.read(self._source, ReadWeights, 1)
        port: int = ranks.run([OpenMeeting(self._size, ranks.host)])[0]
        join = JoinGroup(0, self._size, port, is_empty, self._device, ranks.host)
        ranks.run(
            [
                replace(join, rank=rank, address=None if ranks.is_on_one_machine else place.address)
                for rank, place in enumerate(ranks.places)
            ]
        )
        self._has_joined = True
        return ranks

    def close(self) -> None:
        """End the workers, and the cluster where it was started for them."""
        self._owned.close()


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
        changes: dict[str, Any] = {
            "env": env.model_copy(update={"factory": self.names.get(env.factory, env.factory)}),
            "reward": reward.model_copy(update={"function": self.names.get(reward.function, reward.function)}),
            "rollout": rollout.model_copy(update={"function": self.names.get(rollout.function, rollout.function)}),
        }
        if isinstance(options, TrainOptions):
            return options.model_copy(update=changes)
        return replace(options, **changes)


class RayStart:
    """Starts rollout workers as actors of a Ray cluster.

    Attributes:
        options: of the run, with the names that objects have in the workers.
    """

    def __init__(self, options: TrainOptions) -> None:
        in_worker = options.rollout.engine == "transformers"
        self._gpus = gpus_of_a_rank(options.ray, options.policy.device) if in_worker else 0
        self._code = OwnCode.of(options)
        device = {"device": "cuda" if self._gpus else "cpu"}
        self.options = self._code.renamed(
            options.model_copy(update={"policy": options.policy.model_copy(update=device)})
        )

    def renamed(self, settings: RolloutSettings) -> RolloutSettings:
        """Settings with the names that objects have in the workers."""
        return self._code.renamed(settings)

    def __call__(self, title: str, talk: Conversation) -> Link:
        """Start a worker."""
        return RayLink(title, talk, self.options.ray, self._gpus, self._code.files, self._code.imports)


@dataclass(frozen=True)
class ReadWeights:
    """Fill a worker's model with the weights of a folder."""

    folder: Path

    def __call__(self, worker: Worker) -> None:
        """Run in a worker."""
        read_weights(dict(worker.policy.model.named_parameters()), self.folder)
