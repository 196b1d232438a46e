"""Ranks as actors of a Ray cluster: Ray places them and carries what they are sent; they run the same jobs as without.

No rank is the driver, so the driver may sit on a machine without a GPU. A rank sees none of the driver's files: folders
travel as arrays, and lie in a folder of the rank's own while a job uses them. Ray restarts nothing by itself: a group
that has lost a rank is over, and its owner builds another one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from geo_sokoban_pipeline.config.ray import RayOptions
from geo_sokoban_pipeline.distributed.group import LOOPBACK
from geo_sokoban_pipeline.distributed.messages import (
    Conversation,
    DeadRankError,
    Done,
    Failed,
    Job,
    LostRankError,
    RankError,
    checked,
)
from geo_sokoban_pipeline.distributed.ray_actors import (
    CHUNK_BYTES,
    Actor,
    ActorPlace,
    Rank,
    Talker,
    files_of,
    send_tensors_as_arrays,
)
from geo_sokoban_pipeline.processes import count_cores
from geo_sokoban_pipeline.runs.storage import Files

logger = logging.getLogger(__name__)

_PATIENCE = 30.0  # seconds in which Ray notices that a process or a node has ended
_ASKING = 5.0  # seconds between two looks at whether what waits for resources is still wanted
# Variables of Ray: no usage data; what a rank without a GPU sees; seconds that the start of a node may take.
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_raylet_start_wait_time_s": "120",
}


class RayLink:
    """A link to an actor in a placement group of its own; it is placed when `settle` has returned.

    Args:
        talk: its life, in its process.
        gpus: of the actor.
        files, imports: see `Actor`.

    Raises:
        RankError: the cluster has not the resources.
    """

    def __init__(
        self,
        title: str,
        talk: Conversation,
        options: RayOptions,
        gpus: int = 0,
        files: Mapping[str, bytes] | None = None,
        imports: Sequence[str] = (),
    ) -> None:
        self.title = title
        self._talk, self._options = talk, options
        self._given = gpus, files or {}, imports
        self._folders: dict[Path, str] = {}
        self._count = 0
        self._heard: deque[Any] = deque()
        self._is_silent = True
        self._lock, self._is_free = threading.Lock(), True
        self._is_closed = threading.Event()
        self._begin()

    def settle(self) -> None:
        """See `Link`."""
        for is_last in placings(self._options):
            try:
                self._place: ActorPlace = self._call(self._actor.place.remote())
                break
            except DeadRankError:
                with self._lock:
                    self._free()
                    if self._is_closed.is_set() or is_last():
                        raise
                    self._begin()
        self.title = f"{self.title} (pid {self._place.pid} on {self._place.address})"
        self._life = self._actor.talk.remote(self._talk)

    @property
    def pid(self) -> int:
        """See `Link`."""
        return self._place.pid

    def send(self, message: Any) -> None:
        """See `Link`."""
        self._call(self._actor.tell.remote(message))

    def receive(self, timeout: float | None) -> Any:
        """See `Link`."""
        import ray

        if not self._heard:
            hearing = self._actor.hear.remote()
            if self._is_silent:
                # It may import its libraries for long before its first message; without them it says nothing.
                ended, _ = ray.wait([hearing, self._life], num_returns=1)
                if hearing not in ended:
                    self._call(self._life)
            self._heard.extend(self._call(hearing, None if self._is_silent else timeout))
            self._is_silent = False
        return checked(self.title, self._heard.popleft())

    def place(self, folder: Path, pattern: str) -> Path:
        """See `Link`."""
        if folder not in self._folders:
            self._count += 1
            copy = self._folders[folder] = f"{self._place.scratch}/{self._count}"
            for path in files_of(folder, pattern):
                for chunk in _chunks(path):
                    self._call(self._actor.store.remote(f"{copy}/{path.relative_to(folder)}", chunk))
        return Path(self._folders[folder])

    def clear(self, folder: Path) -> None:
        """See `Link`."""
        if folder in self._folders:
            self._call(self._actor.remove.remote(self._folders.pop(folder)))

    def close(self, *, patient: bool = True) -> None:
        """See `Link`."""
        import ray

        if not ray.is_initialized():
            return
        with suppress(Exception):  # of an actor that is gone
            if patient:
                self.send(None)
                ray.get(self._actor.remove.remote(self._place.scratch), timeout=1.0)
        self._is_closed.set()
        with self._lock:
            self._free()

    def _begin(self) -> None:
        """Have Ray start the actor."""
        gpus, files, imports = self._given
        self._bundles = reserve(1, f"{self.title} with", self._options, gpus, self._is_closed.is_set)
        self._actor = start_actor(Talker, self.title, self._bundles, 0, self._options, gpus, files, imports, calls=4)
        self._is_free = False

    def _free(self) -> None:
        """End the actor, and free what it took, once: after the end of the connection, a call would start a cluster."""
        import ray
        from ray.util.placement_group import remove_placement_group

        if not self._is_free:
            self._is_free = True
            ray.kill(self._actor)
            remove_placement_group(self._bundles)

    def _call(self, reference: Any, timeout: float | None = None) -> Any:
        """The result of a call.

        Raises:
            DeadRankError: the actor has ended, or takes longer than `timeout` seconds.
        """
        import ray

        try:
            return ray.get(reference, timeout=timeout)
        except ray.exceptions.GetTimeoutError as failure:
            raise DeadRankError(f"{self.title} hangs: it has been silent for {timeout:g} s.{_logs()}") from failure
        except ray.exceptions.RayTaskError as failure:
            raise RankError(f"{self.title} failed:\n{failure}") from failure
        except ray.exceptions.RayError as failure:
            kind = RankError if getattr(failure, "actor_init_failed", False) else DeadRankError
            raise kind(f"{self.title} has ended: {first_line(failure)}{_logs()}") from failure


def bundle_of(options: RayOptions, gpus: int) -> dict[str, float]:
    """Resources of an actor."""
    wanted: dict[str, float] = {"CPU": options.cpus, "GPU": gpus, **options.resources}
    return {name: amount for name, amount in wanted.items() if amount} or {"CPU": 0.001}


def start_actor(
    kind: type[Actor],
    title: str,
    bundles: Any,
    number: int,
    options: RayOptions,
    gpus: int,
    files: Mapping[str, bytes],
    imports: Sequence[str],
    *,
    calls: int = 1,
) -> Any:
    """Start an actor in a bundle of a placement group.

    Args:
        number: of the bundle.
        gpus: of the actor.
        files, imports: see `Actor`.
        calls: that run at the same time.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundle = bundle_of(options, gpus)
    placed = ray.remote(kind).options(
        num_cpus=bundle.get("CPU", 0),
        num_gpus=bundle.get("GPU", 0),
        resources={name: bundle[name] for name in options.resources},
        scheduling_strategy=PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=number),
        max_restarts=0,
        max_task_retries=0,
        max_concurrency=calls,
    )
    return placed.remote(title, files, imports)


def start_beside(
    kind: type[Actor], title: str, node: str, files: Mapping[str, bytes], imports: Sequence[str], *, calls: int = 1
) -> Any:
    """Start an actor on a node, beside ranks whose resources it shares; it takes none itself.

    Args:
        node: Ray's id of it.
        files, imports: see `Actor`.
        calls: that run at the same time.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    placed = ray.remote(kind).options(
        num_cpus=0,
        num_gpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        max_restarts=0,
        max_task_retries=0,
        max_concurrency=calls,
    )
    return placed.remote(title, files, imports)


def placings(options: RayOptions) -> Iterator[Callable[[], bool]]:
    """Tries to place actors, a second between two; each yields whether it is the last one.

    Until Ray has seen that a node has ended, which takes a busy machine a minute, it still places actors there. Who
    ends before it answers where it is was never at work: that is no loss of ranks, and it may wait for its place as for
    resources. Who ends later, also while it imports, is a loss.
    """
    deadline = time.monotonic() + options.patience
    while True:
        yield lambda: time.monotonic() > deadline
        time.sleep(1.0)


class NoPlaceError(RankError):
    """The cluster has not the resources for so many actors."""


def reserve(
    count: int, what: str, options: RayOptions, gpus: int, is_given_up: Callable[[], bool] = lambda: False
) -> Any:
    """A placement group of bundles for so many actors.

    Args:
        what: takes them, with its verb, for errors.
        gpus: of each.
        is_given_up: whether nobody waits for them any more; asked every few seconds.

    Raises:
        NoPlaceError: the cluster has not the resources, or nobody waits for them.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    bundle = bundle_of(options, gpus)
    group = placement_group([bundle] * count, strategy=options.strategy)
    deadline = time.monotonic() + options.patience
    try:
        while not group.wait(min(_ASKING, options.patience)):
            if is_given_up():
                raise NoPlaceError(f"{what} {_shown(bundle)} each are no longer wanted.")
            if time.monotonic() >= deadline:
                raise NoPlaceError(
                    f"{what} {_shown(bundle)} each, ray.strategy={options.strategy}, found no place in "
                    f"{options.patience:g} s: the cluster has {_shown(ray.cluster_resources())}, of which "
                    f"{_shown(ray.available_resources())} are free. Lower processes or what a rank takes (ray.cpus, "
                    "ray.gpus, ray.resources), choose another ray.strategy, or add nodes."
                )
    except BaseException:
        remove_placement_group(group)
        raise
    return group


@dataclass(frozen=True)
class Writing:
    """A job that fills a new folder of its rank."""

    folder: str
    job: Job

    def __call__(self, state: Any) -> Any:
        """Run in a rank."""
        Path(self.folder).mkdir(parents=True)
        return self.job(state)


class RayRanks:
    """A group of ranks in a Ray placement group, one bundle of resources each.

    The ranks of a node have neighbouring numbers. The constructor returns when Ray has placed them; they build their
    states meanwhile, and the first `run` waits for that.

    Args:
        build: makes the state of a rank, in its process.
        options: of Ray.
        gpus: of each rank.
        files, imports: see `Actor`.

    Raises:
        RankError: the cluster cannot be reached, or has not the resources.

    Attributes:
        places: of the ranks.
        cpu_seconds: of their jobs so far.
    """

    def __init__(
        self,
        size: int,
        build: Callable[[], Any],
        options: RayOptions,
        gpus: int = 0,
        files: Mapping[str, bytes] | None = None,
        imports: Sequence[str] = (),
    ) -> None:
        self.size = size
        self._seconds, self._job_timeout = [0.0] * size, options.job_timeout
        self._folders = 0
        self._actors: list[Any] = []
        self._bundles: Any = None
        for is_last in placings(options):
            try:
                self.places = self._place(gpus, options, files or {}, imports)
                break
            except BaseException as error:
                self.close()
                if not isinstance(error, DeadRankError) or is_last():
                    raise
        self._sort()
        logger.info("ranks: %s", ", ".join(map(self._name, range(size))))
        self._building: list[Any] = [actor.build.remote(build) for actor in self._actors]

    def _place(
        self, gpus: int, options: RayOptions, files: Mapping[str, bytes], imports: Sequence[str]
    ) -> list[ActorPlace]:
        """Start the actors; returns where they are."""
        self._bundles = reserve(self.size, f"{self.size} ranks of", options, gpus)
        for number in range(self.size):
            title = f"process {number + 1} of {self.size}"
            self._actors.append(start_actor(Rank, title, self._bundles, number, options, gpus, files, imports))
        places: list[ActorPlace] = self._together([actor.place.remote() for actor in self._actors])
        return places

    @property
    def is_open(self) -> bool:
        """Whether there are ranks to send jobs to."""
        return bool(self._actors)

    @property
    def cpu_seconds(self) -> float:
        """CPU-seconds of the ranks' answered jobs."""
        return sum(self._seconds)

    @property
    def host(self) -> str:
        """Address at which all ranks reach rank 0."""
        return LOOPBACK if self.is_on_one_machine else self.places[0].address

    @property
    def is_on_one_machine(self) -> bool:
        """Whether all ranks are on one node of the cluster."""
        return len({place.node for place in self.places}) == 1

    def run(self, jobs: Sequence[Job]) -> list[Any]:
        """Run one job on each of the first ranks; returns their results in order.

        Raises:
            RankError: a rank failed; rank 0's own exception is raised as it is. Any failure closes the group.
            DeadRankError: a rank's process or node has ended.
        """
        import ray

        if not self._actors:
            raise RankError("this group of ranks is closed.")
        try:
            if self._building:
                building, self._building = self._building, []
                self._answers(building)
            # A job that all ranks get is sent to each node once.
            sent: dict[int, Any] = {}
            for job in jobs:
                if id(job) not in sent:
                    sent[id(job)] = ray.put(job)
            answers = self._answers(
                [actor.run.remote(sent[id(job)]) for actor, job in zip(self._actors, jobs, strict=False)],
                self._job_timeout,
            )
        except BaseException:
            self.close()
            raise
        for rank, answer in enumerate(answers):
            self._seconds[rank] = answer.cpu_seconds
        return [answer.result for answer in answers]

    def read(self, folder: Path, job: Callable[[Path], Job], ranks: int | None = None) -> list[Any]:
        """Run a job on the first ranks (None: on all), which finds a copy of a folder of the driver.

        Args:
            job: given the place of the copy, which is removed afterwards.
        """
        chosen = range(self.size if ranks is None else ranks)
        # One copy a node, in the folder of its first rank.
        keepers: dict[str, int] = {}
        for rank in chosen:
            keepers.setdefault(self.places[rank].node, rank)
        copies = {node: self._new_folder(rank) for node, rank in keepers.items()}
        try:
            self._send(folder, {rank: copies[node] for node, rank in keepers.items()})
            return self.run([job(Path(copies[self.places[rank].node])) for rank in chosen])
        finally:
            self._remove({rank: copies[node] for node, rank in keepers.items()})

    def write(self, folder: Path, job: Callable[[Path], Job], ranks: int) -> Files:
        """Run a job on the first ranks, each of which writes into a folder of its own; the files are moved to `folder`.

        Args:
            job: given the place where a rank writes; returns sizes and digests of the files that it has taken them of.

        Returns:
            Those of all ranks.

        Raises:
            RankError: a file did not arrive as it was written.
        """
        made = {rank: self._new_folder(rank) for rank in range(ranks)}
        try:
            parts: list[Files] = self.run([Writing(made[rank], job(Path(made[rank]))) for rank in range(ranks)])
            for rank, known in enumerate(parts):
                self._fetch(rank, made[rank], folder, known)
        finally:
            self._remove(made)
        return {name: record for part in parts for name, record in part.items()}

    def close(self) -> None:
        """End the ranks, and free what they took."""
        import ray
        from ray.util.placement_group import remove_placement_group

        actors, self._actors = self._actors, []
        if not ray.is_initialized():
            return
        with suppress(Exception):  # of ranks that are gone
            cleared = [
                actor.remove.remote(place.scratch)
                for actor, place in zip(actors, getattr(self, "places", []), strict=False)
            ]
            ray.wait(cleared, num_returns=len(cleared), timeout=1.0)
        for actor in actors:
            ray.kill(actor)
        if self._bundles is not None:
            remove_placement_group(self._bundles)

    def _sort(self) -> None:
        """Number the ranks so that those of a node are neighbours."""
        nodes = [place.node for place in self.places]
        order = sorted(range(self.size), key=lambda rank: (nodes.index(nodes[rank]), rank))
        self.places = [self.places[rank] for rank in order]
        self._actors = [self._actors[rank] for rank in order]

    def _answers(self, references: Sequence[Any], timeout: float | None = None) -> list[Done]:
        """Answers to one call each, in order; raises as soon as the cause of a failure is known.

        Args:
            timeout: seconds after which ranks that have not answered count as lost. None: unlimited.
        """
        import ray

        waiting, answers = list(references), {}
        lost: RankError | None = None
        deadline = None if timeout is None else time.monotonic() + timeout
        while waiting:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=left)
            if not ready:
                break
            rank = references.index(ready[0])
            error = None
            try:
                answer = ray.get(ready[0])
            except ray.exceptions.RayTaskError as failure:
                raise RankError(f"{self._name(rank)} failed:\n{failure}") from failure
            except ray.exceptions.RayError as failure:
                raise self._death(rank, failure) from failure
            if isinstance(answer, Failed):
                error = self._error(rank, answer)
            if isinstance(error, LostRankError):
                # The rank that has ended shows itself when Ray has noticed.
                if lost is None:
                    lost, deadline = error, time.monotonic() + _PATIENCE
            elif error is not None:
                raise error
            else:
                answers[rank] = answer
        if lost is not None:
            raise DeadRankError(str(lost)) from lost
        if waiting:
            names = ", ".join(self._name(references.index(reference)) for reference in waiting)
            raise DeadRankError(f"{names}: no answer in {timeout:g} s (ray.job_timeout).{_logs()}")
        return [answers[rank] for rank in range(len(references))]

    def _together(self, references: Sequence[Any]) -> list[Any]:
        """Results of calls that move files or ask for places."""
        import ray

        try:
            results: list[Any] = ray.get(list(references))
        except ray.exceptions.RayTaskError as failure:
            raise RankError(f"a rank failed:\n{failure}") from failure
        except ray.exceptions.RayError as failure:
            # What fails before the first job would fail again.
            kind = RankError if getattr(failure, "actor_init_failed", False) else DeadRankError
            raise kind(f"a rank has ended: {first_line(failure)}{_logs()}") from failure
        return results

    def _error(self, rank: int, answer: Failed) -> Exception:
        if answer.lost:
            return LostRankError(f"{self._name(rank)} failed:\n{answer.text}")
        # As where rank 0 is the driver, whose exceptions pass unchanged.
        if rank == 0 and answer.error is not None:
            answer.error.add_note(f"in {self._name(rank)}:\n{answer.text}")
            return answer.error
        return RankError(f"{self._name(rank)} failed:\n{answer.text}")

    def _death(self, rank: int, failure: Exception) -> DeadRankError:
        return DeadRankError(f"{self._name(rank)} has ended: {first_line(failure)}{_logs()}")

    def _name(self, rank: int) -> str:
        where = f" (pid {self.places[rank].pid} on {self.places[rank].address})" if hasattr(self, "places") else ""
        return f"process {rank + 1} of {self.size}{where}"

    def _new_folder(self, rank: int) -> str:
        self._folders += 1
        return f"{self.places[rank].scratch}/{self._folders}"

    def _send(self, folder: Path, copies: Mapping[int, str]) -> None:
        """Copy a folder to some ranks, without its manifest."""
        import ray

        on_the_way: list[Any] = []
        for path in files_of(folder):
            for chunk in _chunks(path):
                sent = ray.put(chunk)
                stored = [
                    self._actors[rank].store.remote(f"{place}/{path.relative_to(folder)}", sent)
                    for rank, place in copies.items()
                ]
                self._together(on_the_way)
                on_the_way = stored
            logger.debug("%s: sent to ranks", path.name)
        self._together(on_the_way)

    def _fetch(self, rank: int, source: str, folder: Path, known: Files) -> None:
        """Move the files of a rank's folder to one of the driver."""
        actor = self._actors[rank]
        for name, size in self._together([actor.files.remote(source)])[0]:
            path, digest, first = folder / name, hashlib.blake2b(digest_size=16), 0
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                coming = actor.load.remote(f"{source}/{name}", 0)
                while first < size:
                    (chunk,) = self._together([coming])
                    first += len(chunk)
                    if first < size:
                        coming = actor.load.remote(f"{source}/{name}", first)
                    file.write(chunk.data)
                    digest.update(chunk.data)
            logger.debug("%s: fetched from a rank", name)
            if name in known and known[name]["blake2b"] != digest.hexdigest():
                raise RankError(f"{path} did not arrive as {self._name(rank)} has written it.")

    def _remove(self, folders: Mapping[int, str]) -> None:
        if self._actors:
            self._together([self._actors[rank].remove.remote(folder) for rank, folder in folders.items()])


@contextmanager
def connected(options: RayOptions, ranks: int) -> Iterator[None]:
    """A connection to a Ray cluster for the `with` block: a given one, or one of this machine that ends with it.

    Args:
        ranks: that a cluster of this machine has room for, however few its cores are.

    Raises:
        ValueError: Ray is not installed.
        RankError: the given cluster cannot be reached.
    """
    address = options.address or os.environ.get("RAY_ADDRESS") or None
    environment = dict(_SETTINGS)
    if address is None:
        # Ray listens on the network: whoever reaches it could run code here, if it did not ask for a token.
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ.update({name: value for name, value in environment.items() if name not in os.environ})
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ValueError(
            "placement=ray needs Ray: pip install 'geo-sokoban-pipeline[ray]', here and on every node."
        ) from error
    if ray.is_initialized():  # by the process in which this runs, which ends it too
        send_tensors_as_arrays()
        yield
        return
    ray._raylet.Config.initialize("")  # it has read the environment, perhaps before this
    chosen: dict[str, Any]
    if address is None:
        cores = max(count_cores(), int(np.ceil(ranks * options.cpus)))
        chosen = {
            "address": "local",
            "num_cpus": cores,
            "include_dashboard": False,
            "resources": {name: ranks * amount for name, amount in options.resources.items()} or None,
        }
    else:
        chosen = {"address": address}
    handler = signal.getsignal(signal.SIGTERM) if threading.current_thread() is threading.main_thread() else None
    try:
        ray.init(**chosen, logging_level=logging.WARNING, log_to_driver=True)
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        raise RankError(
            f"no connection to the Ray cluster at {address or 'this machine'}: {first_line(error)}. Check ray.address "
            "and RAY_ADDRESS, and RAY_AUTH_TOKEN where the cluster asks for a token."
        ) from error
    if handler is not None:  # Ray sets one of its own
        signal.signal(signal.SIGTERM, handler)
    try:
        send_tensors_as_arrays()
        yield
    finally:
        ray.shutdown()


def gpus_of_a_rank(options: RayOptions, device: str) -> int:
    """GPUs that each rank takes; needs a connection.

    Args:
        device: of the policy's options: `auto`, `cpu` or `cuda`.
    """
    import ray

    if options.gpus is not None:
        return options.gpus
    return int(device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU", 0) > 0))


def _chunks(path: Path) -> Iterator[np.ndarray]:
    """The bytes of a file; one empty chunk of an empty file."""
    size = path.stat().st_size
    for first in range(0, max(size, 1), CHUNK_BYTES):
        yield np.fromfile(path, np.uint8, CHUNK_BYTES, offset=first)


def _shown(resources: Mapping[str, float]) -> str:
    named = {name: amount for name, amount in sorted(resources.items()) if ":" not in name and "_group_" not in name}
    return ", ".join(f"{amount:g} {name}" for name, amount in named.items()) or "nothing"


def first_line(error: Exception) -> str:
    """What Ray says of a death, without its guesses; else the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next((line for line in lines if "died" in line or "dead" in line), lines[0] if lines else "")
    return said.partition(" Some common causes")[0]


def _logs() -> str:
    """Where the logs of all processes lie, as the end of a sentence."""
    import ray

    node = ray._private.worker._global_node
    return "" if node is None else f" Its log is in {node.get_session_dir_path()}/logs, on its node."
