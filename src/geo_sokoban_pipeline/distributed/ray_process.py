"""A process in a Ray cluster behind a handle, see `process.py`: an actor that Ray places, and that answers calls.

It reads and writes folders of the driver itself where its node has them too, under the same paths. Others travel as
arrays, and lie in a folder of the actor's own while it uses them. An actor is placed before it imports torch.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import queue
import shutil
import sys
import threading
import time
import uuid
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from geo_sokoban_pipeline.config.ray import RayOptions
from geo_sokoban_pipeline.distributed.process import CallResult, Host, WorkerDied, WorkerError, WorkerFailed
from geo_sokoban_pipeline.distributed.ray_cluster import (
    Bundles,
    connection,
    first_line,
    logs,
    send_tensors_as_arrays,
)
from geo_sokoban_pipeline.events import Event, emit
from geo_sokoban_pipeline.runs.scratch import Scratch
from geo_sokoban_pipeline.runs.storage import MANIFEST, Files

logger = logging.getLogger(__name__)

CHUNK_BYTES = 64 << 20  # of a file that travels; two are on their way at a time
PATIENCE = 30.0  # seconds in which Ray notices that a process or a node has ended
# Calls that run at the same time; those of a lane with one are in order.
_LANES = {"main": 1, "side": 1, "streams": 1, "files": 4, "life": 1}
_HEARING = 1.0  # seconds in which the driver sees that a stream has not begun
_SLOW = 2.0  # seconds of a call from which its end is logged

FileStamp = tuple[str, int, int]  # relative name, bytes, time of the last change in ns


@dataclass(frozen=True)
class ActorPlace:
    """Where an actor runs.

    Attributes:
        node: Ray's id of the node.
        address: at which the other nodes reach it.
        scratch: the actor's own folder there.
        gpus: ids of those that Ray has assigned to it, by which another process of the node can be shown them.
    """

    node: str
    address: str
    pid: int
    scratch: str
    gpus: tuple[str, ...] = ()


class Actor:
    """The process: a `Host`, and a scratch folder into which files are moved.

    Its working folder is its scratch folder, which holds nothing but the files it is given.

    Args:
        files: contents by relative name.
        imports: names of folders of them that modules are imported from.
    """

    def __init__(self, title: str, files: Mapping[str, bytes], imports: Sequence[str]) -> None:
        self._title = title
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stdout)
        logging.getLogger(__package__.partition(".")[0]).setLevel(logging.INFO)
        self._folder = Scratch()
        self._scratch = str(self._folder.path)
        os.chdir(self._scratch)
        for name, content in files.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_bytes(content)
        sys.path += [f"{self._scratch}/{name}" for name in imports]
        # Arrays of Ray's object store are read-only; nothing here writes into them.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        self._host = Host()
        self._streams: defaultdict[int, queue.SimpleQueue[Any]] = defaultdict(queue.SimpleQueue)

    def __repr__(self) -> str:
        """The name that Ray writes before the lines of this process."""
        return self._title

    def where(self) -> ActorPlace:
        """Where this actor runs."""
        import ray

        context = ray.get_runtime_context()
        gpus = tuple(context.get_accelerator_ids().get("GPU", ()))
        return ActorPlace(context.get_node_id(), ray.util.get_node_ip_address(), os.getpid(), self._scratch, gpus)

    def live(self) -> None:
        """Never return: the call fails with the end of the process."""
        threading.Event().wait()

    def build(self, data: bytes) -> CallResult:
        """Build the object by a pickled function."""

        def load() -> Callable[[], Any]:
            import ray

            build: Callable[[], Any] = ray.cloudpickle.loads(data)
            if "torch" in sys.modules:  # which the function has brought along
                send_tensors_as_arrays()
            return build

        return self._host.build(load)

    def call(self, method: str, stream: int | None, *arguments: Any) -> CallResult:
        """Call a method; its items wait for `hear`, and an end mark follows.

        Args:
            stream: number of its stream; None: it emits nothing.
        """
        began = time.perf_counter()
        answer = self._host.call(method, (*(() if stream is None else (self._streams[stream].put,)), *arguments))
        seconds = time.perf_counter() - began
        if seconds > _SLOW:
            logger.info("%s: %.1f s", method, seconds)
        if stream is not None:
            self._streams[stream].put(None)
        return answer

    def aside(self, method: str, *arguments: Any) -> CallResult:
        """Call a method beside another one."""
        return self._host.aside(method, arguments)

    def hear(self, stream: int) -> list[Any]:
        """Items of a stream; the last is None."""
        items = []
        with suppress(queue.Empty):
            items.append(self._streams[stream].get(timeout=_HEARING))
            while True:
                items.append(self._streams[stream].get_nowait())
        if items and items[-1] is None:
            del self._streams[stream]
        return items

    def store(self, path: str, chunk: np.ndarray) -> None:
        """Append bytes to a file."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            file.write(chunk.data)

    def make(self, folder: str) -> None:
        """Make a folder."""
        Path(folder).mkdir(parents=True)

    def remove(self, folder: str) -> None:
        """Remove a folder; no error if it is absent."""
        shutil.rmtree(folder, ignore_errors=True)

    def files(self, folder: str, pattern: str = "*") -> list[FileStamp]:
        """Marks of the files in a folder and below."""
        return stamps_of(Path(folder), pattern)

    def touch(self, path: str) -> None:
        """Make an empty file, where there is its folder and this process may write there."""
        with suppress(OSError):
            Path(path).touch()

    def load(self, path: str, first: int) -> np.ndarray:
        """Bytes of a file from a place on, at most `CHUNK_BYTES`."""
        return np.fromfile(path, np.uint8, CHUNK_BYTES, offset=first)


@dataclass
class _Copy:
    """A copy of a folder of the driver on a node, which the processes of the node share.

    Attributes:
        keeper: the process in whose scratch folder it lies.
        users: processes that need it.
        sending: held while it is sent.
    """

    keeper: RayProcess
    folder: str
    users: set[RayProcess] = field(default_factory=set)
    is_there: bool = False
    sending: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class Copies:
    """Copies of the driver's folders, by node and folder."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    found: dict[tuple[str, Path], _Copy] = field(default_factory=dict)


class RayProcess:
    """A process in a Ray cluster; see `WorkerHandle`.

    Args:
        title: with what tells the process from others.
        actor: that was placed.
        where: it was placed.
        bundles: resources that it frees with its end; None: it shares those of others.
        copies: of folders, shared with other processes.

    Attributes:
        where: the process is.
    """

    def __init__(self, title: str, actor: Any, where: ActorPlace, bundles: Bundles | None, copies: Copies) -> None:
        self.title = f"{title} (pid {where.pid} on {where.address})"
        self.where, self.pid, self.cpu_seconds = where, where.pid, 0.0
        self.ready: Future[Any] = Future()
        self._actor, self._bundles, self._copies = actor, bundles, copies
        self._connection, self._folders = connection(), 0
        self._closing, self._is_closed = threading.Lock(), False
        self._numbers, self._hearing = itertools.count(), threading.Lock()
        self._pending, self._lock = set[Future[Any]](), threading.Lock()
        self.ended = self._call("life", "live")

    def build(self, build: Callable[[], Any]) -> RayProcess:
        """Have it build its object; returns this handle."""
        import ray

        self.ready = self._call("main", "build", ray.cloudpickle.dumps(build))
        return self

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        return self._call("main", "call", method, None, *arguments)

    def send(self, method: str, *arguments: Any) -> Future[Any]:
        return self._call("side", "aside", method, *arguments)

    def stream(self, method: str, *arguments: Any, each: Callable[[Any], None]) -> Future[Any]:
        number, future = next(self._numbers), Future[Any]()
        called = self._call("main", "call", method, number, *arguments)

        def hear() -> None:
            try:
                with self._hearing:  # the items of an earlier stream come first
                    items: list[Any] = []
                    while items[-1:] != [None]:
                        if called.done():
                            called.result()  # of one that could not begin nothing is heard
                        items = self._call("streams", "hear", number).result()
                        for item in items:
                            if item is not None:
                                each(item)
                future.set_result(called.result())
            except Exception as error:  # raised where the result is taken
                future.set_exception(error)

        threading.Thread(target=hear, name=self.title, daemon=True).start()
        return future

    def shares(self, folder: Path) -> bool:
        """See `WorkerHandle`; it is asked for a file that this process looks for."""
        token = folder / f".{uuid.uuid4().hex}.tmp"
        self._call("files", "touch", str(token)).result()
        found = token.exists()
        token.unlink(missing_ok=True)
        return found

    def place(self, folder: Path, pattern: str = "*") -> Path:
        """See `WorkerHandle`; processes of a node that ask at the same time share a copy.

        It is the folder itself where the process finds the same files there, last changed at the same times.

        Raises:
            WorkerDied: the process has ended.
        """
        try:
            if self._call("files", "files", str(folder), pattern).result() == stamps_of(folder, pattern):
                return folder
        except WorkerFailed as failure:
            if not isinstance(failure.error, OSError):  # it must not look there
                raise
        logger.info("%s does not see %s as this process does: its files are sent.", self.title, folder)
        key = self.where.node, folder
        with self._copies.lock:
            if key not in self._copies.found:
                self._copies.found[key] = _Copy(self, self._new_folder())
            copy = self._copies.found[key]
            copy.users.add(self)
        with copy.sending:
            if not copy.is_there:
                copy.keeper._copy(folder, pattern, copy.folder)
                copy.is_there = True
        return Path(copy.folder)

    def clear(self, folder: Path) -> None:
        key = self.where.node, folder
        with self._copies.lock:
            if (copy := self._copies.found.get(key)) is None:
                return
            copy.users.discard(self)
            if copy.users:
                return
            del self._copies.found[key]
        copy.keeper._call("files", "remove", copy.folder).result()

    def outbox(self, folder: Path) -> Path:
        if self.shares(folder):
            return folder
        made = self._new_folder()
        self._call("files", "make", made).result()
        return Path(made)

    def take(self, written: Path, folder: Path, known: Files) -> None:
        if written == folder:
            return
        for name, size, _ in self._call("files", "files", str(written)).result():
            path, digest, first = folder / name, hashlib.blake2b(digest_size=16), 0
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                coming = self._call("files", "load", f"{written}/{name}", 0)
                while first < size:
                    chunk = coming.result()
                    first += len(chunk)
                    if first < size:
                        coming = self._call("files", "load", f"{written}/{name}", first)
                    file.write(chunk.data)
                    digest.update(chunk.data)
            emit(Event.FILE_FETCHED, name)
            if name in known and known[name]["blake2b"] != digest.hexdigest():
                raise WorkerError(f"{path} did not arrive as {self.title} has written it.")
        self._call("files", "remove", str(written)).result()

    def close(self, *, patient: bool = True) -> None:
        import ray

        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            with self._copies.lock:  # what it held is gone
                for key in [key for key, copy in self._copies.found.items() if copy.keeper is self]:
                    del self._copies.found[key]
            if connection() == self._connection:  # else a call would start a cluster
                with suppress(Exception):  # of an actor that is gone
                    ray.get(self._actor.remove.remote(self.where.scratch), timeout=1.0 if patient else 0.2)
                ray.kill(self._actor)
                if self._bundles is not None:
                    self._bundles.release()
        for future in list(self._pending):
            if self._takes(future):
                future.set_exception(WorkerDied(f"{self.title} is closed."))

    def _copy(self, folder: Path, pattern: str, copy: str) -> None:
        """Send the files of a folder, without its manifest."""
        on_the_way: list[Future[Any]] = []
        for path in files_of(folder, pattern):
            for chunk in _chunks(path):
                sent = self._call("files", "store", f"{copy}/{path.relative_to(folder)}", chunk)
                for earlier in on_the_way:
                    earlier.result()
                on_the_way = [sent]
            emit(Event.FILE_SENT, path.name)
        for last in on_the_way:
            last.result()

    def _new_folder(self) -> str:
        self._folders += 1
        return f"{self.where.scratch}/{self._folders}"

    def _call(self, lane: str, name: str, *arguments: Any) -> Future[Any]:
        """Call a method of the actor; a `CallResult` is settled, what else it returns is the result."""
        future: Future[Any] = Future()
        if self._is_closed or connection() != self._connection:
            future.set_exception(WorkerDied(f"{self.title} is closed."))
            return future
        with self._lock:
            self._pending.add(future)
        reference = getattr(self._actor, name).options(concurrency_group=lane).remote(*arguments)

        def settle(done: Future[Any]) -> None:
            if not self._takes(future):
                return
            if (error := done.exception()) is not None:
                future.set_exception(self._error(error))
            elif isinstance(answer := done.result(), CallResult):
                self.cpu_seconds = max(self.cpu_seconds, answer.cpu_seconds)
                answer.settle(future, self.title)
            else:
                future.set_result(answer)

        reference.future().add_done_callback(settle)
        return future

    def _takes(self, future: Future[Any]) -> bool:
        """Whether nothing has settled a future; from now on something has."""
        with self._lock:
            is_pending = future in self._pending
            self._pending.discard(future)
        return is_pending

    def _error(self, failure: BaseException) -> WorkerError:
        import ray

        if isinstance(failure, ray.exceptions.RayTaskError):
            return WorkerFailed(f"{self.title} failed:\n{failure}")
        died = WorkerDied(f"{self.title} has ended: {first_line(failure)}{logs()}")
        died.__cause__ = failure
        return died


def start_ray_processes(
    titles: Sequence[str],
    what: str,
    options: RayOptions,
    gpus: int = 0,
    files: Mapping[str, bytes] | None = None,
    imports: Sequence[str] = (),
    *,
    node: str | None = None,
    is_given_up: Callable[[], bool] = lambda: False,
) -> list[RayProcess]:
    """Place processes, sorted by node, so that neighbours are often on one; they hold no object yet.

    Until Ray has seen that a node has ended, which takes a busy machine a minute, it still places actors there. An
    actor that ends before it says where it is is retried until `ray.patience` runs out; one that ends later, also while
    it imports, is a loss.

    Args:
        titles: of the processes, which differ in numbers alone.
        what: takes resources, with its verb, for errors.
        gpus: of each.
        files, imports: see `Actor`.
        node: on which they share the resources of others; None: they have their own.
        is_given_up: whether they are no longer wanted; asked every few seconds.

    Raises:
        NoPlaceError: the cluster has not the resources.
        WorkerError: a process fails before it says where it is.
        WorkerDied: it ended.
    """
    import ray

    deadline = time.monotonic() + options.patience
    while True:
        bundles = None if node is not None else Bundles(len(titles), what, options, gpus, is_given_up)
        actors = [
            _placed(number, bundles, options, node).remote(title, files or {}, imports)
            for number, title in enumerate(titles)
        ]
        try:
            places = ray.get([actor.where.remote() for actor in actors])
            break
        except BaseException as failure:
            for actor in actors:
                ray.kill(actor)
            if bundles is not None:
                bundles.free()
            if not isinstance(failure, ray.exceptions.RayError):
                raise
            said = f"{titles[0] if len(titles) == 1 else 'a process'} has ended: {first_line(failure)}{logs()}"
            # A fault of the constructor would come again; a node that has ended has no other place.
            if isinstance(failure, ray.exceptions.RayTaskError) or getattr(failure, "actor_init_failed", False):
                raise WorkerError(said) from failure
            if node is not None or time.monotonic() > deadline or is_given_up():
                raise WorkerDied(said) from failure
        time.sleep(1.0)
    nodes, copies = [place.node for place in places], Copies()
    order = sorted(range(len(titles)), key=lambda number: (nodes.index(nodes[number]), number))
    return [
        RayProcess(title, actors[number], places[number], bundles, copies)
        for title, number in zip(titles, order, strict=True)
    ]


def _placed(number: int, bundles: Bundles | None, options: RayOptions, node: str | None) -> Any:
    """The class of an actor with its place: a bundle, or a node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

    bundle = {} if bundles is None else bundles.bundle
    if bundles is None:
        strategy: Any = NodeAffinitySchedulingStrategy(node, soft=False)
    else:
        strategy = PlacementGroupSchedulingStrategy(bundles.group, placement_group_bundle_index=number)
    return ray.remote(concurrency_groups=_LANES)(Actor).options(
        num_cpus=bundle.get("CPU", 0),
        num_gpus=bundle.get("GPU", 0),
        resources={name: bundle[name] for name in options.resources if name in bundle},
        scheduling_strategy=strategy,
        max_restarts=0,
        max_task_retries=0,
    )


def stamps_of(folder: Path, pattern: str = "*") -> list[FileStamp]:
    """Marks of the files in a folder and below that travel, sorted."""
    found = ((path.relative_to(folder), path.stat()) for path in files_of(folder, pattern))
    return [(str(name), status.st_size, status.st_mtime_ns) for name, status in found]


def files_of(folder: Path, pattern: str = "*") -> list[Path]:
    """Files of a folder that travel, sorted: all but its manifest."""
    return sorted(path for path in folder.rglob(pattern) if path.is_file() and path.name != MANIFEST)


def _chunks(path: Path) -> Iterator[np.ndarray]:
    """The bytes of a file; one empty chunk of an empty file."""
    for first in range(0, max(path.stat().st_size, 1), CHUNK_BYTES):
        yield np.fromfile(path, np.uint8, CHUNK_BYTES, offset=first)
