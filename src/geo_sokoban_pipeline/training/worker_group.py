"""A worker group: ranks that take every step together, each a process with a worker, here or in a Ray cluster.

On one machine the driver is rank 0; in a Ray cluster it is none of them. Rollouts are sharded by whole groups; steps
are sharded by the backend that `backend.py` builds on the group. Any failure closes the group: no stale answer is read
later. Where a cluster is too small for all ranks, the group has fewer, down to `ray.min_processes`; the same holds for
servers without ranks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import yaml

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.ray import RayOptions
from geo_sokoban_pipeline.distributed.group import LOOPBACK
from geo_sokoban_pipeline.distributed.process import (
    SAID,
    InProcess,
    LocalProcess,
    Watch,
    WorkerDied,
    WorkerError,
    WorkerFailed,
    WorkerHandle,
    WorkerHangs,
    results_of,
)
from geo_sokoban_pipeline.distributed.ray_cluster import Bundles, NoPlaceError, connected, gpus_of_a_rank
from geo_sokoban_pipeline.distributed.ray_process import PATIENCE, ActorPlace, RayProcess, start_ray_processes
from geo_sokoban_pipeline.events import Event, emit
from geo_sokoban_pipeline.policies.lora import Adapter
from geo_sokoban_pipeline.policies.policy import Policy, device_of, load_as, load_empty, save_policy
from geo_sokoban_pipeline.rollout.engines.base import RolloutEngine
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.rollout.rollout import Progress, check_failures
from geo_sokoban_pipeline.runs.own_code import own_files
from geo_sokoban_pipeline.runs.policy_folder import find_base
from geo_sokoban_pipeline.runs.scratch import Scratch
from geo_sokoban_pipeline.runs.storage import Files
from geo_sokoban_pipeline.tasks import registered_here
from geo_sokoban_pipeline.training.sharding import shard_groups
from geo_sokoban_pipeline.training.worker import Worker, WorkerSpec
from geo_sokoban_pipeline.trajectories.types import Trajectory

if TYPE_CHECKING:
    from geo_sokoban_pipeline.rollout.engines.sglang.servers import Launcher

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
_PATIENCE = 5.0  # seconds in which the end of a process of this machine shows


class WorkerGroup:
    """The driver and `options.processes` − 1 further ranks on this machine.

    Args:
        policy: of the driver; the others take over its weights at the first call. Afterwards only the backend may
            change them, on all ranks alike. An empty one (`load_driver_policy`) gives them none.
        options: of the run; every worker uses as many threads as the driver.
        others: idle processes of workers over the same policy and options; None: they are started here.

    Attributes:
        handles: of the ranks, from rank 0 on; empty once the group is closed.
        size: number of ranks.
        options: of the run, with the number of ranks that there are.
        missing: ranks for which there was no place.
        before_rollout: set by a backend whose weights are sharded.
        own: the worker of rank 0, in this process; None: that is elsewhere.
        weights: folder from which the ranks read what they hold of the weights; None: they have them.
        launcher: of servers that sample; None: they are launched on this machine.

    Raises:
        ValueError: the policy is on a GPU, and there is not one for each process.
    """

    def __init__(self, policy: Policy, options: TrainOptions, others: Sequence[WorkerHandle] | None = None) -> None:
        device = policy.device
        if device != "cpu" and torch.cuda.device_count() < options.processes:
            raise ValueError(
                f"processes={options.processes} with the policy on {device}: each takes a GPU of its own, and "
                f"there are {torch.cuda.device_count()}. Lower processes, or set policy.device=cpu."
            )
        self.own: Worker | None = Worker(policy, options)
        titles = [f"process {number} of {options.processes}" for number in range(1, options.processes + 1)]
        handles: list[WorkerHandle] = [InProcess(titles[0], self.own)]
        try:
            spec = WorkerSpec.of(policy, options)
            handles += others or ()
            for title in titles[len(handles) :]:
                handles.append(LocalProcess(title, spec, on_gpu=device != "cpu"))
        except BaseException:
            for handle in handles:
                handle.close(patient=False)
            raise
        self._prepare(options, handles, device, policy.folder if policy.is_empty else None)

    def _prepare(
        self, options: TrainOptions, handles: Sequence[WorkerHandle], device: str, weights: Path | None
    ) -> None:
        self.options, self.size, self.missing = options, len(handles), 0
        self.weights = weights
        self.launcher: Launcher | None = None
        self.before_rollout: Callable[[], None] | None = None
        self._device, self._has_joined = device, False
        self.handles: list[WorkerHandle] = list(handles)
        self._patience, self._has_said = _PATIENCE, False
        # A server that comes back reads its weights from the thread of its engine.
        self._lock = threading.RLock()

    @property
    def drives_a_rank(self) -> bool:
        """Whether rank 0 is this process."""
        return self.own is not None

    @property
    def is_open(self) -> bool:
        """Whether the workers take calls."""
        return bool(self.handles)

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the ranks, each on its machine; without that of the driver."""
        return [handle.pid for handle in self._further]

    @property
    def cpu_seconds(self) -> float:
        """CPU-seconds of the ranks' answered calls, without the driver's."""
        return sum(handle.cpu_seconds for handle in self._further)

    @property
    def _further(self) -> list[WorkerHandle]:
        return self.handles[1:] if self.drives_a_rank else self.handles

    def cpu_clock(self) -> float:
        """CPU-seconds of the driver and of the workers' calls, from an arbitrary zero; take differences."""
        return time.process_time() + self.cpu_seconds

    def call_each(self, method: str, given: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of the first workers, from rank 0 on, each with its arguments; returns the results in order.

        Raises:
            WorkerError: a worker failed, or the group is closed. Any exception closes the group; that of rank 0 is
                raised as it is.
            WorkerDied: a worker has ended or hangs.
        """
        return self._call(self.handles[: len(given)], method, given)

    def call_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker with the same arguments; returns the results in order.

        Raises:
            WorkerError: as `call_each`.
        """
        return self.call_each(method, [arguments] * self.size)

    def shares(self, folder: Path) -> bool:
        """Whether every worker can write into a folder of the driver."""
        with self._closing_on_failure():
            return all(self._together([partial(handle.shares, folder) for handle in self.handles]))

    def read(self, folder: Path, method: str, *arguments: Any) -> None:
        """Call a method of every worker that reads a folder of the driver.

        Args:
            arguments: of the method, after the place where the worker finds the folder.
        """
        with self._closing_on_failure():
            places = self._together([partial(handle.place, folder) for handle in self.handles])
            self.call_each(method, [(place, *arguments) for place in places])
            self._together([partial(handle.clear, folder) for handle in self.handles])

    def write(self, folder: Path, method: str, *, everywhere: bool) -> Files:
        """Call a method that writes into a folder of the driver, of every worker or of rank 0 alone.

        Args:
            method: given the place where a worker writes; returns sizes and digests of its own files.

        Returns:
            Those of all ranks.
        """
        chosen = self.handles if everywhere else self.handles[:1]
        with self._closing_on_failure():
            places = [handle.outbox(folder) for handle in chosen]
            parts: list[Files] = self.call_each(method, [(place,) for place in places])
            for handle, place, known in zip(chosen, places, parts, strict=True):
                handle.take(place, folder, known)
        return {name: record for part in parts for name, record in part.items()}

    def update_weights(self, version: int) -> None:
        """Make the workers drop what they computed with earlier weights."""
        if self.before_rollout is not None:
            self.before_rollout()
        self._call(self._further, "update_weights", [(version,)] * len(self._further))

    def free_caches(self) -> None:
        """Make the workers give up the caches of their engines, until they roll out with other weights."""
        self._call(self._further, "free_caches", [()] * len(self._further))

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
        given: list[tuple[Any, ...]] = [(part, self._settings_there(lenient)) for part in parts]
        if self.own is not None:
            self.own.engine = engine
            given[0] = (parts[0], lenient, progress)
        results: list[list[Trajectory]] = self.call_each("rollout", given)
        elsewhere = parts[1:] if self.drives_a_rank else parts
        if progress is not None and elsewhere:
            progress(sum(map(len, elsewhere)))
        episodes = dict(zip([i for shard in shards for i in shard], [e for part in results for e in part], strict=True))
        trajectories = [episodes[index] for index in range(len(tasks))]
        check_failures(trajectories, settings.rollout.max_failed_share)
        return trajectories

    def close(self, *, patient: bool = True) -> None:
        """End the workers."""
        handles, self.handles = self.handles, []
        # Rank 0 of this process comes last: its collectives fail when the others have ended.
        self._together([partial(handle.close, patient=patient) for handle in handles[1:]])
        for handle in handles[:1]:
            handle.close(patient=patient)
        # A collective that does not fail by that would not let the group end either.
        if self.own is not None and not any(isinstance(one, InProcess) and one.is_left_behind for one in handles[:1]):
            self.own.leave()

    def _settings_there(self, settings: RolloutSettings) -> RolloutSettings:
        """Settings with the names that objects have in the workers."""
        return settings

    def _call(self, handles: Sequence[WorkerHandle], method: str, given: Sequence[tuple[Any, ...]]) -> list[Any]:
        with self._lock, self._closing_on_failure():
            if not self.handles:
                raise WorkerError("this worker group is closed.")
            self._join()
            return self._results(handles, method, given)

    def _results(self, handles: Sequence[WorkerHandle], method: str, given: Sequence[tuple[Any, ...]]) -> list[Any]:
        futures = [handle.call(method, *arguments) for handle, arguments in zip(handles, given, strict=True)]
        watches = [(Watch(handle), future) for handle, future in zip(handles, futures, strict=True)]
        self._has_said = False
        try:
            return results_of(futures, self._patience, partial(self._look, method, watches))
        except WorkerFailed as failure:
            cause = failure.error
            is_of_first = futures and futures[0].done() and futures[0].exception() is failure
            if cause is None or not is_of_first or handles[0] is not self.handles[0]:
                raise
            cause.add_note(str(failure))
            raise cause from None  # as where rank 0 is this process

    def _join(self) -> None:
        """Have the ranks find each other, once."""
        if self._has_joined:
            return
        results_of([handle.ready for handle in self.handles], self._patience)
        self._prepare_weights()
        host, addresses = self._addresses()
        port = self._results(self.handles[:1], "open_rendezvous", [(self.size, host)])[0]
        common = (self.size, port, self._device, host)
        self._results(self.handles, "join", [(rank, *common, address) for rank, address in enumerate(addresses)])
        self._has_joined = True

    def _prepare_weights(self) -> None:
        """Give rank 0 its weights."""

    def _addresses(self) -> tuple[str, list[str | None]]:
        """Address at which all reach rank 0, and that of each on the network; None: all are on one machine."""
        return LOOPBACK, [None] * self.size

    def _look(self, method: str, watches: Sequence[tuple[Watch, Future[Any]]]) -> None:
        """Find ranks that have ended; say that none gets on, and end all after the limit: one may wait for another."""
        for handle in self.handles:
            if handle.ended.done():
                handle.ended.result()
        waited = [watch for watch, future in watches if not future.done()]
        seconds = min((watch.standstill() for watch in waited), default=0.0)
        if seconds > SAID and not self._has_said:
            self._has_said = True
            logger.warning("%s: no rank has got on for %.0f s", method, seconds)
        if (limit := self.options.rank_timeout) is not None and seconds > limit:
            silent = [watch.handle.title for watch in waited if watch.silence > limit]
            which = ", ".join(silent or [watch.handle.title for watch in waited])
            raise WorkerHangs(f"{which}: {method} has not got on for {limit:g} s (rank_timeout).")

    def _together(self, work: Sequence[Callable[[], Result]]) -> list[Result]:
        """Results of work that moves files or waits for processes, done at the same time."""
        with ThreadPoolExecutor(max(1, len(work))) as threads:
            return [future.result() for future in [threads.submit(one) for one in work]]

    @contextmanager
    def _closing_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # an interrupt too: no answer to this call may be taken for the next one's
            with self._lock:
                self.close(patient=False)
            if isinstance(error, WorkerDied) and self.drives_a_rank:  # only ranks of a cluster are built anew
                raise WorkerError(
                    f"{error} The same command continues from what is stored; processes=1 uses no further processes "
                    "and less memory."
                ) from error
            raise


class RayWorkerGroup(WorkerGroup):
    """`options.processes` ranks in a Ray cluster, or as few as `ray.min_processes`; the driver is none of them.

    They get policy and own code through Ray's object store, unless they find the driver's folders under the same paths.

    Args:
        policy: of the driver; where it is empty, the workers get the weights of its folder, else its own.

    Raises:
        WorkerError, ValueError: see `connected`, `start_ray_processes`.
    """

    def __init__(self, policy: Policy, options: TrainOptions) -> None:
        with ExitStack() as opened:
            opened.enter_context(connected(options.ray, count_actors(options)))
            folder = policy.folder
            if not policy.is_empty:
                self._scratch = Scratch()  # which lasts as long as this object
                opened.callback(self._scratch.cleanup)
                folder = self._scratch.path
                save_policy(policy, folder)
            assert folder is not None  # an empty policy is that of a folder
            gpus = gpus_of_a_rank(options.ray, options.policy.device)
            device = "cuda" if gpus else "cpu"
            self.own, self._source, self._code = None, folder, OwnCode.of(options)
            found, ranks = find_largest(sizes(options), partial(self._place, gpus))
            warn_of_fewer("ranks", found.processes, options.processes, options)
            self._prepare(found, ranks, device, folder if found.shares_weights else None)
            opened.callback(super().close)
            self.missing, self._patience = options.processes - self.size, PATIENCE
            self._places = [rank.where for rank in ranks]
            logger.info("ranks: %s", ", ".join(rank.title for rank in ranks))
            there = found.model_copy(update={"policy": found.policy.model_copy(update={"device": device})})
            spec = WorkerSpec.of(policy, self._code.renamed(there))
            for rank in ranks:
                rank.build(replace(spec, is_empty=found.shares_weights))
            if found.places_servers:
                beside = self._places if found.rollout.server.colocated else None
                self.launcher = opened.enter_context(servers_of_ray(found, beside))
            self._owned = opened.pop_all()

    def _place(self, gpus: int, options: TrainOptions, ray: RayOptions) -> list[RayProcess]:
        """Places of the ranks of some options.

        Raises:
            NoPlaceError: there are none.
        """
        titles = [f"process {number} of {options.processes}" for number in range(1, options.processes + 1)]
        what = f"{options.processes} ranks of"
        return start_ray_processes(titles, what, ray, gpus, self._code.files, self._code.imports)

    def close(self, *, patient: bool = True) -> None:
        """End the workers, and with `patient` the cluster where it was started for them."""
        if patient:
            self._owned.close()
        else:
            super().close(patient=False)

    def _settings_there(self, settings: RolloutSettings) -> RolloutSettings:
        return self._code.renamed(settings)

    def _prepare_weights(self) -> None:
        if self.weights is None:
            first = self.handles[:1]
            self._results(first, "read_weights", [(first[0].place(self._source),)])
            first[0].clear(self._source)

    def _addresses(self) -> tuple[str, list[str | None]]:
        if len({place.node for place in self._places}) == 1:
            return super()._addresses()
        return self._places[0].address, [place.address for place in self._places]


def load_driver_policy(options: TrainOptions, folder: Path, seed: int = 0) -> Policy:
    """The policy of a driver that trains: empty where the weights are elsewhere: in other ranks, or off the device.

    The backend then reads them from the folder, and gives the policy whole weights when an engine of this process needs
    them.

    Args:
        folder: of a policy, or of an adapter, which the backend reads: here it is fresh.
        seed: of a fresh adapter.

    Raises:
        FileNotFoundError, ValueError, RuntimeError: as `load_as`.
        ValueError: the folder has an adapter, but the options have none, or the other way round.
    """
    if (base := find_base(folder)) is not None:
        if options.policy.adapter is None:
            raise ValueError(
                f"{folder} holds an adapter, but policy.adapter is not set: give this command the adapter of the run, "
                "or the run's final policy."
            )
        folder = base
    adapter = Adapter.fresh(options.policy.adapter, folder, seed)
    is_elsewhere = options.shares_weights or options.optimizer.offload or options.placement == "ray"
    return (load_empty if is_elsewhere else load_as)(options.policy, folder, adapter)


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
    in_ray = options.placement == "ray"
    if not in_ray and options.processes == 1:
        yield None
        return
    with closing(RayWorkerGroup(policy, options) if in_ray else WorkerGroup(policy, options)) as workers:
        emit(Event.RANKS, workers.process_ids)
        yield workers


def restarting(options: TrainOptions, stored: Callable[[], str]) -> Iterator[AbstractContextManager[int]]:
    """Contexts for one piece of work, another one each time that it has lost its ranks: `for one in …: with one: …`.

    Each context's value is how often the ranks were lost since something of the work was stored.

    Args:
        stored: describes what there is to go on from; another description is progress.

    Raises:
        WorkerDied: within a context: the ranks were lost more often than `ray.max_restarts` allows.
        WorkerError: within a context: a rank failed, or rollout workers were lost more often than allowed; the message
            also says what is stored.
    """
    lost, before, again = 0, stored(), True

    @contextmanager
    def attempt() -> Iterator[int]:
        nonlocal lost, before, again
        again = False
        try:
            yield lost
        except WorkerDied as error:
            found = stored()
            lost, before, again = lost + 1 if found == before else 1, found, True
            allowed = options.ray.max_restarts
            if lost > allowed:
                raise WorkerDied(
                    f"{error} These ranks were built anew {allowed} times (ray.max_restarts={allowed}); {found}. The "
                    "same command continues from there."
                ) from error
            logger.warning("%s All ranks are built anew (%d of %d); %s", error, lost, allowed, found)
        except WorkerError as error:
            found = stored()
            raise WorkerError(f"{error} {found[0].upper()}{found[1:]}.") from error

    while again:
        yield attempt()


Placed = TypeVar("Placed")
Renamed = TypeVar("Renamed", TrainOptions, RolloutSettings)
_SHORT = 10.0  # seconds in which fewer ranks than wanted find their places, when the cluster has been waited for


def sizes(options: TrainOptions) -> Iterator[TrainOptions]:
    """Options with every number of ranks that is allowed, the largest first."""
    fewest, unit = options.ray.min_processes or options.processes, options.rank_unit
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
    from geo_sokoban_pipeline.distributed.ray_servers import ray_launcher

    with connected(options.ray, options.rollout.server.count), ray_launcher(options.ray, beside) as launcher:
        yield launcher


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
        environment = options.env.named_code.values()
        named = [*environment, options.reward.function, options.rollout.function, *tasks.values()]
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
            "env": env.renamed(self.names),
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
