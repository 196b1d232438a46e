"""Processes of a run, each behind a handle: the driver calls methods of the object that a process holds.

Calls return futures. Calls of the main lane run one after the other; those that are sent aside are answered at once,
also while a call runs. The end of a process fails all its futures: no caller waits for one that is gone. No process
outlives the driver: it ends when its connection closes, however busy it is.

Handles of processes elsewhere are in `ray_process.py`. Nothing here imports torch, which takes a process seconds and
300 MB: the host of a server never does.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

from geo_sokoban_pipeline.background import CallThread
from geo_sokoban_pipeline.progress import Clock
from geo_sokoban_pipeline.runs.storage import Files

# Libraries of all processes of a run; never a user's code.
_LIBRARIES = ["geo_sokoban_pipeline.training.worker", "transformers.models.qwen3_vl.modeling_qwen3_vl"]
_PATIENCE = 5.0  # seconds before a process that does not end is terminated, then killed
_GRACE = 2.0  # seconds in which a process without a driver ends by itself
_READY = 0  # number of the call that builds a process's object
ASKING = 5.0  # seconds between two looks at whether work gets on
SAID = 30.0  # seconds of standstill that are said


class WorkerError(RuntimeError):
    """A process of a run failed, ended or hangs; the message says which and why."""


class WorkerFailed(WorkerError):
    """A call raised.

    Attributes:
        error: what it raised; None: that could not be sent.
        lost: whether it failed because another process did.
    """

    def __init__(self, message: str, error: Exception | None = None, *, lost: bool = False) -> None:
        super().__init__(message)
        self.error, self.lost = error, lost


class WorkerDied(WorkerError):
    """A process or its node has ended; another one can take its place."""


class WorkerHangs(WorkerDied):
    """A process is silent, or its work does not get on."""


class WorkerHandle(Protocol):
    """The driver's side of a process.

    Attributes:
        title: its name in errors.
        ready: done when it has built its object.
        ended: raises `WorkerError` when it has ended.
    """

    title: str
    ready: Future[Any]
    ended: Future[Any]

    @property
    def cpu_seconds(self) -> float:
        """CPU-seconds of the process since it was ready, as of its last answer."""

    @property
    def pid(self) -> int:
        """Process id, on the process's machine."""

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of the object, after all earlier calls."""

    def send(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method aside: at once, whatever call runs. `standstill` is answered by the process itself."""

    def stream(self, method: str, *arguments: Any, each: Callable[[Any], None]) -> Future[Any]:
        """Call a method that emits items before it returns.

        Args:
            method: its first argument is a function that sends an item.
            each: called with every item, in a thread of this handle, before the future is done.
        """

    def shares(self, folder: Path) -> bool:
        """Whether the process can write into a folder of the driver, under the same path."""

    def place(self, folder: Path, pattern: str = "*") -> Path:
        """Where the process finds a folder of the driver, whose files do not change, until `clear`.

        Args:
            pattern: of the names of files that it reads.
        """

    def clear(self, folder: Path) -> None:
        """The process needs a folder of the driver no longer."""

    def outbox(self, folder: Path) -> Path:
        """Where the process writes files for a folder of the driver, until `take`."""

    def take(self, written: Path, folder: Path, known: Files) -> None:
        """Move the files of an outbox to a folder.

        Args:
            known: records of the files whose digests the process has taken.

        Raises:
            WorkerError: a file did not arrive as it was written.
        """

    def close(self, *, patient: bool = True) -> None:
        """End the process: one that does nothing by itself where `patient`, else at once.

        Any thread may call this, more than once; all that waits for the process fails.
        """


def results_of(futures: Sequence[Future[Any]], patience: float, asking: Callable[[], None] | None = None) -> list[Any]:
    """Results of one call each, in order.

    Where a process fails because another one did, the failure of that one is awaited for so many seconds and raised.

    Args:
        asking: called every few seconds; what it raises ends the wait.

    Raises:
        WorkerError, Exception: that of the first process that failed by itself.
        WorkerDied: all that failed had lost another one.
    """
    left, deadline = set(futures), float("inf")
    while left and time.monotonic() < deadline:
        left = set(wait(left, min(ASKING, deadline - time.monotonic()), FIRST_EXCEPTION).not_done)
        failures = [error for future in futures if future.done() and (error := future.exception()) is not None]
        if causes := [error for error in failures if not _is_lost(error)]:
            raise causes[0]
        if failures:
            deadline = min(deadline, time.monotonic() + patience)
        if asking is not None:
            asking()
    lost = [error for future in futures if future.done() and (error := future.exception()) is not None]
    if lost:
        raise WorkerDied(str(lost[0])) from lost[0]
    return [future.result() for future in futures]


def _is_lost(error: BaseException) -> bool:
    """Whether this is what a process raises because another one has failed."""
    if isinstance(error, WorkerFailed):
        return error.lost
    if "torch" not in sys.modules:  # without it there is no group
        return False
    from geo_sokoban_pipeline.distributed.group import has_lost_a_rank

    return isinstance(error, Exception) and has_lost_a_rank(error)


class Watch:
    """Looks how long a process has been silent, or its work has not got on."""

    def __init__(self, handle: WorkerHandle) -> None:
        self.handle = handle
        self._asked: Future[Any] | None = None
        self._since, self._still = time.monotonic(), 0.0

    def standstill(self) -> float:
        """Seconds, as far as is known; 0 while the process imports its libraries, which takes as long as it takes."""
        if not self.handle.ready.done():
            return 0.0
        if self._asked is None or self._asked.done():
            if self._asked is not None and self._asked.exception() is None:
                self._still = self._asked.result()
            self._asked, self._since = self.handle.send("standstill"), time.monotonic()
        return max(self._still, self.silence)

    @property
    def silence(self) -> float:
        """Seconds for which the last question has waited for its answer."""
        return 0.0 if self._asked is None or self._asked.done() else time.monotonic() - self._since


# In a process.


@dataclass(frozen=True)
class CallResult:
    """The answer of a process to a call.

    Attributes:
        kind: `item` of a stream, `done` or `failed`.
        value: item or result; of a failure the exception, None where it does not travel.
        text: of a failure: its traceback.
        lost: of a failure: whether another process had failed before.
    """

    kind: str
    value: Any = None
    text: str = ""
    lost: bool = False
    cpu_seconds: float = 0.0

    def settle(self, future: Future[Any], title: str) -> None:
        """Hand it on to those who wait for it."""
        if self.kind == "failed":
            future.set_exception(WorkerFailed(f"{title} failed:\n{self.text}", self.value, lost=self.lost))
        else:
            future.set_result(self.value)


class Host:
    """The object of a process, and what becomes of its calls.

    Attributes:
        is_built: set when there is an object, or none could be built.
    """

    def __init__(self) -> None:
        self.clock, self.is_built = Clock(), threading.Event()
        self._state: Any = None
        self._failure: CallResult | None = None  # of `build`, which is that of all calls
        self._began = 0.0

    def build(self, load: Callable[[], Callable[[], Any]]) -> CallResult:
        """Build the object by a function that is loaded first."""

        def begin() -> None:
            self._state = load()()
            gc.freeze()
            self._began = time.process_time()

        answer = self._answer(begin)
        self._failure = answer if answer.kind == "failed" else None
        self.is_built.set()
        return answer

    def call(self, method: str, arguments: Sequence[Any]) -> CallResult:
        """Call a method on the main lane, which does nothing else meanwhile."""
        with self.clock.working():
            return self._failure or self._answer(lambda: attrgetter(method)(self._state)(*arguments))

    def aside(self, method: str, arguments: Sequence[Any]) -> CallResult:
        """Call a method beside the main lane."""
        if method == "standstill":
            return CallResult("done", self.clock.standstill)
        self.is_built.wait()
        return self._failure or self._answer(lambda: attrgetter(method)(self._state)(*arguments))

    def _answer(self, work: Callable[[], Any]) -> CallResult:
        try:
            result = work()
        except Exception as error:
            return failure_of(error)
        return CallResult("done", result, cpu_seconds=time.process_time() - self._began)


def failure_of(error: Exception) -> CallResult:
    """The answer that tells of an exception; it travels itself where it can."""
    text = "".join(traceback.format_exception(error))
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:  # its text travels
        return CallResult("failed", None, text, _is_lost(error))
    return CallResult("failed", error, text, _is_lost(error))


@dataclass(frozen=True)
class Surroundings:
    """Environment and working folder of a driver, which its processes take over."""

    environment: dict[str, str]
    folder: str

    @classmethod
    def here(cls) -> Surroundings:
        """Those of this process."""
        return cls(dict(os.environ), os.getcwd())

    def enter(self) -> None:
        """Take them over; Ctrl-C, which reaches every process of a terminal, is left to the driver."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)


def serve(pipe: Connection, given: Surroundings, build: bytes) -> None:
    """Main function of a process: build its object, answer calls until the pipe closes.

    Args:
        build: pickled function that makes the object.
    """
    given.enter()
    gc.freeze()  # what a fork shares stays shared
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # else all forks would draw the same numbers from the global generator
    host, lock = Host(), threading.Lock()
    calls: queue.SimpleQueue[tuple[int, str, bytes] | None] = queue.SimpleQueue()
    asides: queue.SimpleQueue[tuple[int, str, bytes]] = queue.SimpleQueue()

    def say(number: int, answer: CallResult) -> None:
        try:
            data = ForkingPickler.dumps(answer)
        except Exception as error:  # a result that does not travel
            data = ForkingPickler.dumps(failure_of(error))
        with lock, suppress(OSError):  # the driver has ended
            pipe.send(number)
            pipe.send_bytes(data)

    def run(lane: Callable[[str, Sequence[Any]], CallResult], number: int, method: str, data: bytes) -> CallResult:
        try:
            is_stream, arguments = ForkingPickler.loads(data)
        except Exception as error:  # of a module that is not here
            return failure_of(error)
        emit = (lambda item: say(number, CallResult("item", item)),) if is_stream else ()
        return lane(method, (*emit, *arguments))

    def answer_asides() -> None:
        while True:
            call = asides.get()
            say(call[0], run(host.aside, *call))

    def listen() -> None:
        with suppress(EOFError, OSError):
            while (message := pipe.recv()) is not None:
                number, is_aside, method = message
                (asides if is_aside else calls).put((number, method, pipe.recv_bytes()))
        calls.put(None)
        time.sleep(_GRACE)
        os._exit(1)

    for work in (listen, answer_asides):
        threading.Thread(target=work, name=work.__name__, daemon=True).start()
    say(_READY, host.build(partial(ForkingPickler.loads, build)))
    while (call := calls.get()) is not None:
        say(call[0], run(host.call, *call))


# In the driver.


class _OnThisMachine:
    """The folders of a handle whose process finds and writes those of the driver."""

    def shares(self, folder: Path) -> bool:
        return True

    def place(self, folder: Path, pattern: str = "*") -> Path:
        return folder

    def clear(self, folder: Path) -> None:
        """See `WorkerHandle`; the folder is the driver's."""

    def outbox(self, folder: Path) -> Path:
        return folder

    def take(self, written: Path, folder: Path, known: Files) -> None:
        """See `WorkerHandle`; they are there."""


class LocalProcess(_OnThisMachine):
    """A process of this machine; see `WorkerHandle`.

    The constructor of the first one waits until the server of the forks has imported the libraries.

    Args:
        build: makes the object, in the process; picklable.
        on_gpu: whether it uses a GPU, which no fork can. Without one it is a fork of a server that has the libraries,
            and shares their memory with others.
    """

    def __init__(self, title: str, build: Callable[[], Any], *, on_gpu: bool = False) -> None:
        context: Any = multiprocessing.get_context("spawn" if on_gpu else "forkserver")
        if not on_gpu:
            context.set_forkserver_preload(_LIBRARIES)
        self._pipe, far_end = context.Pipe()
        given = (far_end, Surroundings.here(), bytes(ForkingPickler.dumps(build)))
        # Processes inherit the signal mask, so Ctrl-C never reaches them. Python's resource tracker, which the first
        # one would start, must not inherit it.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process = context.Process(target=serve, args=given, daemon=True)
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        far_end.close()  # only the process may hold its end: then the pipe closes when it ends
        self.pid = int(self._process.pid)
        self.title, self.cpu_seconds = f"{title} (pid {self.pid})", 0.0
        self.ready: Future[Any] = Future()
        self.ended: Future[Any] = Future()
        self._numbers, self._lock, self._closing = itertools.count(_READY + 1), threading.Lock(), threading.Lock()
        self._pending = {_READY: self.ready}
        self._emitting: dict[int, Callable[[Any], None]] = {}
        self._death: WorkerError | None = None
        self._is_closed = False
        self._out: queue.SimpleQueue[tuple[Any, bytes] | None] = queue.SimpleQueue()
        # Neither waits for the other: a process that is stopped reads nothing.
        self._threads = [threading.Thread(target=work, name=title, daemon=True) for work in (self._read, self._write)]
        for thread in self._threads:
            thread.start()

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        return self._submit(method, arguments)

    def send(self, method: str, *arguments: Any) -> Future[Any]:
        return self._submit(method, arguments, is_aside=True)

    def stream(self, method: str, *arguments: Any, each: Callable[[Any], None]) -> Future[Any]:
        return self._submit(method, arguments, each=each)

    def close(self, *, patient: bool = True) -> None:
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            if patient:
                self._out.put((None, b""))
                self._process.join(_PATIENCE)
                if self._process.is_alive():
                    self._process.terminate()
                    self._process.join(_PATIENCE)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
        self._out.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._pipe.close()
        self._process.close()  # else its descriptors wait for the garbage collector

    def _submit(
        self,
        method: str,
        arguments: tuple[Any, ...],
        each: Callable[[Any], None] | None = None,
        *,
        is_aside: bool = False,
    ) -> Future[Any]:
        future: Future[Any] = Future()
        data = bytes(ForkingPickler.dumps((each is not None, arguments)))
        with self._lock:
            if self._death is not None:
                future.set_exception(self._death)
                return future
            number = next(self._numbers)
            self._pending[number] = future
            if each is not None:
                self._emitting[number] = each
            self._out.put(((number, is_aside, method), data))
        return future

    def _write(self) -> None:
        with suppress(OSError):  # the process has ended, as the other thread sees
            while (message := self._out.get()) is not None:
                self._pipe.send(message[0])
                if message[0] is not None:
                    self._pipe.send_bytes(message[1])

    def _read(self) -> None:
        try:
            while True:
                number, data = self._pipe.recv(), self._pipe.recv_bytes()
                try:
                    answer: CallResult = ForkingPickler.loads(data)
                except Exception as error:  # of a class that cannot be made here
                    answer = failure_of(error)
                self._take_answer(number, answer)
        except (EOFError, OSError):
            pass
        except Exception as error:  # of those who are called with items
            self._fail(failure_of(error))
        with self._lock:
            self._death = self._death or WorkerDied(self._ending())
            pending, self._pending = list(self._pending.values()), {}
        for future in (*pending, self.ended):
            future.set_exception(self._death)

    def _take_answer(self, number: int, answer: CallResult) -> None:
        if answer.kind == "item":
            if number in self._emitting:  # its call may have failed by an earlier item
                self._emitting[number](answer.value)
            return
        with self._lock:
            future = self._pending.pop(number, None)
            self._emitting.pop(number, None)
        if future is None:
            return
        self.cpu_seconds = max(self.cpu_seconds, answer.cpu_seconds)
        answer.settle(future, self.title)
        if number == _READY and answer.kind == "failed":  # no call can succeed
            self._fail(answer)

    def _fail(self, answer: CallResult) -> None:
        with self._lock:
            self._death = WorkerFailed(f"{self.title} failed:\n{answer.text}", answer.value, lost=answer.lost)
        self._process.kill()

    def _ending(self) -> str:
        """How the process has ended, as a sentence."""
        if self._is_closed:
            return f"{self.title} is closed."
        with self._closing:  # of two threads that wait for a process, one gets no exit code
            self._process.join(_PATIENCE)
            code = self._process.exitcode
        name = f" ({signal.Signals(-code).name})" if code is not None and code < 0 else ""
        return f"{self.title} ended with exit code {code}{name}."


class InProcess(_OnThisMachine):
    """An object of this process as a handle, whose calls run in a thread; see `WorkerHandle`.

    So the driver, which waits for all ranks, sees the end of another one also while its own waits in a collective that
    never returns. An exception of a call is raised as it is.

    Args:
        state: the object.
    """

    def __init__(self, title: str, state: Any) -> None:
        self.title, self.state, self.pid, self.cpu_seconds = title, state, os.getpid(), 0.0  # the driver's own
        self.ready: Future[Any] = Future()
        self.ready.set_result(None)
        self.ended: Future[Any] = Future()  # with the driver
        self._is_closed, self._clock = False, Clock()
        self._thread = CallThread(title)

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        if self._is_closed:
            future: Future[Any] = Future()
            future.set_exception(WorkerDied(f"{self.title} is closed."))
            return future
        return self._thread.submit(self._work, method, *arguments)

    def send(self, method: str, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        is_asked = method == "standstill"
        future.set_result(self._clock.standstill if is_asked else attrgetter(method)(self.state)(*arguments))
        return future

    def stream(self, method: str, *arguments: Any, each: Callable[[Any], None]) -> Future[Any]:
        return self.call(method, each, *arguments)

    def close(self, *, patient: bool = True) -> None:
        """See `WorkerHandle`; a call that does not end soon is left behind."""
        self._is_closed = True
        self._thread.end()
        self._clock.is_cancelled = not patient
        self._thread.join(_PATIENCE)

    @property
    def is_left_behind(self) -> bool:
        """Whether a call has not ended, though this handle is closed."""
        return self._is_closed and self._thread.is_alive()

    def _work(self, method: str, *arguments: Any) -> Any:
        with self._clock.working():
            return attrgetter(method)(self.state)(*arguments)
