"""A run in a Ray cluster: how many ranks and servers find a place, and the user's code that they get.

Where the cluster is too small for all ranks, the group has fewer, down to `ray.min_processes`. The same holds for
servers without ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.ray import RayOptions
from geo_sokoban_pipeline.distributed.process import WorkerHandle
from geo_sokoban_pipeline.distributed.ray_cluster import Bundles, NoPlaceError, connected, gpus_of_a_rank
from geo_sokoban_pipeline.distributed.ray_process import ActorPlace, start_ray_processes
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


def sizes(options: TrainOptions) -> Iterator[TrainOptions]:
    """Options with every number of ranks that is allowed, the largest first."""
    fewest = options.ray.min_processes or options.processes
    unit = options.rank_unit
    yield options
    for processes in range((options.processes - 1) // unit * unit, fewest - 1, -unit):
        yield options.with_processes(processes)


def find_largest(
    tries: Iterable[TrainOptions], place: Callable[[TrainOptions, RayOptions], Placed]
) -> tuple[TrainOptions, Placed]:
    """The first options whose processes find their places, and what `place` made of them; it gets Ray's patience.

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


def warn_of_fewer(what: str, found: int, wanted: int, options: TrainOptions) -> None:
    if found < wanted:
        logger.warning(
            "the cluster has place for %d of %d %s: continuing with these (ray.min_processes=%d)",
            found,
            wanted,
            what,
            options.ray.min_processes,
        )


@contextmanager
def servers_of_ray(options: TrainOptions, beside: Sequence[ActorPlace] | None = None) -> Iterator[Launcher]:
    """A launcher of servers in the Ray cluster, for the `with` block; they end with it.

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
            options, _ = find_largest(tries, _try_servers)
            warn_of_fewer("servers", options.rollout.server.count, wanted.count, options)
        yield options, launcher


def _try_servers(options: TrainOptions, ray: RayOptions) -> None:
    """See that servers find their places, and leave these free for them.

    Raises:
        NoPlaceError: they do not.
    """
    server = options.rollout.server
    # Each is placed by itself, so the strategy of the ranks does not hold for them.
    apart = ray.model_copy(update={"strategy": "PACK"})
    Bundles(server.count, f"{server.count} servers with", apart, server.gpus).free()


def count_actors(options: TrainOptions) -> int:
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
    """Starts rollout workers in a Ray cluster.

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

    def __call__(self, title: str, build: WorkerSpec, is_given_up: Callable[[], bool]) -> WorkerHandle:
        """Start a worker."""
        given = ([title], f"{title} with", self.options.ray, self._gpus, self._code.files, self._code.imports)
        return start_ray_processes(*given, is_given_up=is_given_up)[0].build(build)
