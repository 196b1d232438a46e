"""Deadlines: whoever waits for a worker waits no longer than was said, however long workers take to start.

One thread sleeps until the next deadline and settles what is then still open; it starts with the first one.
"""

from __future__ import annotations

import heapq
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, Self

from geo_sokoban_pipeline.rewards.math_answer.verdict import Differences, Equivalence


class Deadlines:
    """Calls a function at its time, unless closed before."""

    def __init__(self) -> None:
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()  # of equal times the earlier call is first
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, when: float, call: Callable[[], None]) -> None:
        """Have a function called, which must be quick and must not raise.

        Args:
            when: of `time.monotonic()`; a time that has passed means at once.
        """
        with self._changed:
            if self._closed:
                return
            heapq.heappush(self._calls, (when, next(self._numbers), call))
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="grading deadlines", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Call nothing any more. Closing twice does nothing."""
        with self._changed:
            self._closed = True
            self._calls.clear()
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        while (call := self._next()) is not None:
            call()

    def _next(self) -> Callable[[], None] | None:
        """The next call, once its time has come; None: closed."""
        with self._changed:
            while not self._closed:
                left = self._calls[0][0] - time.monotonic() if self._calls else None
                if left is not None and left <= 0:
                    return heapq.heappop(self._calls)[2]
                self._changed.wait(left)
            return None


# A worker as its parent sees it: a fresh interpreter at the other end of two pipes, which can be killed at any moment.


Answer = Literal["yes", "no", "timeout", "failed"]
_PACKAGE_ROOT = Path(__file__).parents[3]
_STARTING_SECONDS = 120.0  # a busy machine needs many for the imports


class WorkerError(RuntimeError):
    """A worker cannot be started; the message says why."""


class WorkerProcess:
    """A worker that is started by its first question and replaced after its last one.

    Not for use from several threads at once. On Linux the kernel ends the worker with the thread that asked first.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""

    @property
    def pid(self) -> int | None:
        """Process id; None: it is not running."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the worker and wait until it can be asked; nothing if it runs.

        Raises:
            WorkerError: it ended or said nothing.
        """
        if self._process is not None:
            return
        path = os.pathsep.join([str(_PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            # -P: a file in the working directory must not pass for a library.
            [sys.executable, "-P", "-m", f"{__package__}.worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Equal verdicts in every process: SymPy orders by hashes.
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"},
            start_new_session=True,  # Ctrl-C is for the parent, which closes it
        )
        try:
            reply = self._read(_STARTING_SECONDS)
        except EOFError:
            reply = {"failed": "it ended"}
        if reply is None or "failed" in reply:
            self.stop()
            reason = f"not ready after {_STARTING_SECONDS} s" if reply is None else reply["failed"]
            raise WorkerError(f"no grading worker: {reason}. Is math-verify installed, and is there memory left?")

    def ask(self, question: Equivalence | Differences, seconds: float) -> Answer:
        """The answer to a question; a worker that exceeds the time or dies is stopped.

        Args:
            seconds: time to work on it, more than 0.

        Raises:
            WorkerError: no worker can be started.
        """
        self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({**asdict(question), "seconds": seconds}).encode("ascii") + b"\n")
            self._process.stdin.flush()
            reply = self._read(seconds)
        except (BrokenPipeError, EOFError):
            reply = {"answer": "failed", "last": True}
        if reply is None:
            reply = {"answer": "timeout", "last": True}
        if reply["last"]:
            self.stop()
        return reply["answer"]

    def stop(self) -> None:
        """Kill the worker and wait for its end; nothing if it does not run."""
        process, self._process, self._unread = self._process, None, b""
        if process is not None:
            process.kill()
            process.communicate()

    def interrupt(self) -> None:
        """Kill the worker from another thread; who waits for its answer gets `failed`."""
        if (process := self._process) is not None:
            process.kill()

    def _read(self, seconds: float) -> dict[str, Any] | None:
        """The next line of the worker; None: it did not come in time.

        Raises:
            EOFError: the worker has ended.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        poller = select.poll()
        poller.register(pipe, select.POLLIN)
        deadline = time.monotonic() + seconds
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not poller.poll(left * 1000):
                return None
            read = os.read(pipe, 1 << 16)
            if not read:
                raise EOFError
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)


# Grading pool: questions are answered by a few worker processes, side by side, each within its time.


TIME_LIMIT = 2.5  # seconds on one answer

Outcome = Answer | Literal["late"]  # late: the deadline passed before the question had its full time


@dataclass(eq=False)
class _Job:
    """A question and its outcome, which the first one sets who has one."""

    question: Equivalence | Differences
    deadline: float
    outcome: Future[Outcome] = field(default_factory=Future)
    is_settled: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def settle(self, outcome: Outcome | Exception | None) -> None:
        """Set the outcome, or the error; None: cancel. Nothing if it is settled."""
        with self.lock:
            is_first, self.is_settled = not self.is_settled, True
        if not is_first:
            return
        if outcome is None:
            self.outcome.cancel()
        elif self.outcome.set_running_or_notify_cancel():
            if isinstance(outcome, Exception):
                self.outcome.set_exception(outcome)
            else:
                self.outcome.set_result(outcome)


class GradingPool:
    """Worker processes that answer what only algebra can.

    Args:
        workers: how many at most; None: one for each core that this process may use, up to four.
        time_limit: seconds of work on one question, more than 0.
    """

    def __init__(self, workers: int | None = None, time_limit: float = TIME_LIMIT) -> None:
        if workers is not None and workers < 1:
            raise ValueError(f"workers={workers}: at least one is needed")
        if time_limit <= 0:
            raise ValueError(f"time_limit={time_limit}: must be more than 0 seconds")
        self.size = min(4, _cores()) if workers is None else workers
        self._time_limit = time_limit
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._workers: list[WorkerProcess] = []
        self._waiting = 0  # jobs that no thread has taken yet
        self._idle = 0
        self._deadlines = Deadlines()
        self._process = os.getpid()
        self._closed = False

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers that run."""
        return [pid for worker in self._workers if (pid := worker.pid) is not None]

    def submit(self, question: Equivalence | Differences, deadline: float) -> Future[Outcome]:
        """Have a question answered.

        Args:
            deadline: time of `time.monotonic()` at which it is `late`, if it is still open.

        Returns:
            Its outcome. It raises WorkerError if no worker can be started; closing the pool cancels it.

        Raises:
            RuntimeError: the pool is closed, or was made in another process.
        """
        if os.getpid() != self._process:
            raise RuntimeError(f"this pool belongs to process {self._process}; after a fork, make a new one")
        job = _Job(question, deadline)
        with self._lock:
            if self._closed:
                raise RuntimeError("this pool is closed")
            self._waiting += 1
            self._jobs.put(job)
            if self._waiting > self._idle and len(self._threads) < self.size:
                self._add_worker()
        self._deadlines.add(deadline, partial(job.settle, "late"))
        return job.outcome

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        """Have a function called, which must be quick and must not raise; a closed pool does not call it."""
        self._deadlines.add(time.monotonic() + seconds, call)

    def close(self) -> None:
        """End all workers and cancel what waits; a question in work counts as failed. Closing twice does nothing."""
        with self._lock:
            self._closed = True
            threads, self._threads = self._threads, []
            while not self._jobs.empty():
                job = self._jobs.get()
                if job is not None:
                    job.settle(None)
            for _ in threads:
                self._jobs.put(None)
        self._deadlines.close()
        for worker in self._workers:
            worker.interrupt()
        for thread in threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add_worker(self) -> None:
        worker = WorkerProcess()
        thread = threading.Thread(target=self._serve, args=(worker,), name="grading", daemon=True)
        self._workers.append(worker)
        self._threads.append(thread)
        self._idle += 1
        thread.start()

    def _serve(self, worker: WorkerProcess) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                with self._lock:
                    self._waiting -= 1
                    self._idle -= 1
                if not (job.is_settled or job.outcome.cancelled()):
                    self._answer(job, worker)
                with self._lock:
                    self._idle += 1
        finally:
            worker.stop()

    def _answer(self, job: _Job, worker: WorkerProcess) -> None:
        try:
            worker.start()
            seconds = min(self._time_limit, job.deadline - time.monotonic())
            outcome: Outcome = "late" if seconds <= 0 else worker.ask(job.question, seconds)
            # Who was cut short by the deadline might have been right.
            late = outcome == "timeout" and seconds < self._time_limit
            job.settle("late" if late else outcome)
        except Exception as error:  # it belongs to who asked, and the thread goes on
            job.settle(error)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
