"""Workers that are all actors of a Ray cluster; the driver has no weights and computes no step.

They get policy and own code through Ray's object store, so they need none of the driver's files. Where the cluster has
too little place for all of them, the group is smaller if `ray.min_processes` allows it. So are servers without ranks.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.ray import RayOptions
from geo_sokoban_pipeline.distributed.links import Link
from geo_sokoban_pipeline.distributed.messages import Call, Conversation
from geo_sokoban_pipeline.distributed.ray_actors import ActorPlace
from geo_sokoban_pipeline.distributed.ray_placement import (
    NoPlaceError,
    RayLink,
    RayRanks,
    connected,
    gpus_of_a_rank,
    reserve,
)
from geo_sokoban_pipeline.policies.policy import Policy, save_policy
from geo_sokoban_pipeline.rollout.episode import RolloutSettings
from geo_sokoban_pipeline.runs.own_code import own_files
from geo_sokoban_pipeline.tasks import registered_here
from geo_sokoban_pipeline.training.worker import WorkerSpec

if TYPE_CHECKING:
    from geo_sokoban_pipeline.rollout.engines.sglang.servers import Launcher

logger = logging.getLogger(__name__)
Placed = TypeVar("Placed")
Renamed = TypeVar("Renamed", TrainOptions, RolloutSettings)
_SHORT = 10.0  # seconds in which fewer ranks than wanted find their places, when the cluster has been waited for


class RayWorkers:
    """`options.processes` workers in a Ray cluster, over a policy whose weights they get as a folder.

    Args:
        policy: of the driver; where it is empty, the workers get the weights of its folder, else its own.

    Attributes:
        options: with the number of workers that there are.
        launcher: of servers, with which the workers may take turns; None: Ray places none.
        weights: folder from which the workers read what they hold of the weights; None: they have them.
        code: of the user, as the workers have it.

    Raises:
        RankError, ValueError: as `RayRanks`, `connected`.
    """

    def __init__(self, policy: Policy, options: TrainOptions) -> None:
        with ExitStack() as opened:
            opened.enter_context(connected(options.ray, _actors(options)))
            folder = policy.folder
            if not policy.is_empty:
                folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
                save_policy(policy, folder)
            assert folder is not None  # an empty policy is that of a folder
            self._source = folder
            gpus = gpus_of_a_rank(options.ray, options.policy.device)
            self._device = "cuda" if gpus else "cpu"
            self.code = OwnCode.of(options)
            self.options, self.ranks = _largest(sizes(options), partial(self._place, policy, gpus))
            _warn_of_fewer("ranks", self.options.processes, options.processes, options)
            opened.callback(self.ranks.close)
            self.weights = folder if self.options.shares_weights else None
            self.launcher: Launcher | None = None
            if self.options.places_servers:
                places = self.ranks.places if self.options.rollout.server.colocated else None
                self.launcher = opened.enter_context(servers_of_ray(self.options, places))
            self._has_joined = False
            self._owned = opened.pop_all()

    def _place(self, policy: Policy, gpus: int, found: TrainOptions, ray: RayOptions) -> RayRanks:
        """The ranks of some options.

        Raises:
            NoPlaceError: there is no place for them.
        """
        chosen = found.model_copy(update={"policy": found.policy.model_copy(update={"device": self._device})})
        build = replace(WorkerSpec.of(policy, self.code.renamed(chosen)), folder=None, is_empty=found.shares_weights)
        return RayRanks(found.processes, build, ray, gpus, self.code.files, self.code.imports)

    def joined(self) -> RayRanks:
        """The ranks, which have joined each other and have their weights."""
        if self._has_joined:
            return self.ranks
        ranks = self.ranks
        if self.weights is None:
            ranks.read(self._source, lambda folder: Call("read_weights", (folder,)), 1)
        port: int = ranks.run([Call("open_meeting", (ranks.size, ranks.host))])[0]
        addresses = [None if ranks.is_on_one_machine else place.address for place in ranks.places]
        common = (ranks.size, port, self._device, ranks.host)
        ranks.run([Call("join", (rank, *common, address)) for rank, address in enumerate(addresses)])
        self._has_joined = True
        return ranks

    def close(self) -> None:
        """End the workers, and the cluster where it was started for them."""
        self._owned.close()


def sizes(options: TrainOptions) -> Iterator[TrainOptions]:
    """Options with every number of ranks that is allowed, the largest first."""
    fewest = options.ray.min_processes or options.processes
    unit = options.rank_unit
    yield options
    for processes in range((options.processes - 1) // unit * unit, fewest - 1, -unit):
        yield options.with_processes(processes)


def _largest(
    tries: Iterable[TrainOptions], place: Callable[[TrainOptions, RayOptions], Placed]
) -> tuple[TrainOptions, Placed]:
    """The first options whose actors find their places, and what `place` made of them; it gets Ray's patience.

    Args:
        tries: the largest first.

    Raises:
        NoPlaceError: there is no place for the last ones.
    """
    refusal: NoPlaceError | None = None
    for found in tries:
        patience = found.ray.patience if refusal is None else min(_SHORT, found.ray.patience)
        try:
            return found, place(found, found.ray.model_copy(update={"patience": patience}))
        except NoPlaceError as error:
            logger.debug("%s", error)
            refusal = error
    assert refusal is not None
    raise refusal


def _warn_of_fewer(what: str, found: int, wanted: int, options: TrainOptions) -> None:
    if found < wanted:
        logger.warning(
            "the cluster has place for %d of %d %s, which go on alone (ray.min_processes=%d)",
            found,
            wanted,
            what,
            options.ray.min_processes,
        )


@contextmanager
def servers_of_ray(options: TrainOptions, beside: Sequence[ActorPlace] | None = None) -> Iterator[Launcher]:
    """What launches servers in the Ray cluster, for the `with` block; they end with it.

    Args:
        beside: places of ranks with which the servers take turns. None: they have GPUs of their own.
    """
    from geo_sokoban_pipeline.distributed.ray_servers import RayServers

    with connected(options.ray, options.rollout.server.count), closing(RayServers(options.ray, beside)) as servers:
        yield servers.launcher


@contextmanager
def servers_alone(options: TrainOptions) -> Iterator[tuple[TrainOptions, Launcher | None]]:
    """Options, and what launches their servers in a Ray cluster without ranks; None: Ray places none.

    With `ray.min_processes` they are as many as there is place for, one at least.

    Raises:
        NoPlaceError: there is place for none.
    """
    if not options.places_servers:
        yield options, None
        return
    wanted = options.rollout.server
    with servers_of_ray(options) as launcher:
        if options.ray.min_processes is not None:
            tries = (options.with_servers(count) for count in range(wanted.count, 0, -1))
            options, _ = _largest(tries, _try_servers)
            _warn_of_fewer("servers", options.rollout.server.count, wanted.count, options)
        yield options, launcher


def _try_servers(options: TrainOptions, ray: RayOptions) -> None:
    """See that servers find their places, and leave these free for them.

    Raises:
        NoPlaceError: they do not.
    """
    from ray.util.placement_group import remove_placement_group

    server = options.rollout.server
    # Each is placed by itself, so the strategy of the ranks does not hold for them.
    apart = ray.model_copy(update={"strategy": "PACK"})
    remove_placement_group(reserve(server.count, f"{server.count} servers with", apart, server.gpus))


def _actors(options: TrainOptions) -> int:
    """Actors that need resources of their own at the same time."""
    server = options.rollout.server
    apart = server.count if options.places_servers and not server.colocated else 0
    return options.processes + (options.rollout.workers or 0) + apart


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
