"""Grading pool: questions are answered by a few worker processes, side by side, each within its time.

One thread owns one worker and passes it one question after the other, so nothing is shared between them. Workers start
with the first questions that need them. Every question has an end: it is answered, it exceeds its time, or its deadline
passes while others are before it or while a worker starts.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Literal, Self

from geo_sokoban_pipeline.rewards.math_answer.deadlines import Deadlines
from geo_sokoban_pipeline.rewards.math_answer.verdict import Differences, Equivalence
from geo_sokoban_pipeline.rewards.math_answer.worker_process import Answer, WorkerProcess

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
