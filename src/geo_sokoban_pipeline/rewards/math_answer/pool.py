"""Worker processes for questions to algebra: each question ends within its time, or its worker is killed.

A worker is a fresh interpreter at the other end of two pipes. It reads questions as JSON lines and writes answers as
JSON lines, within limits on memory and processor time that the kernel enforces. Only killing stops every
computation, and an interrupted library may give wrong answers afterwards. A worker ends with its parent.

Ours instead of `pebble.ProcessPool`, which starts and answers as fast: `multiprocessing` imports the caller's main
module into every worker, which fails for a script without `if __name__ == "__main__"` and loads torch for one that
imports it; and it passes on the caller's hash seed, by which SymPy orders terms.
"""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, Literal, Self

from geo_sokoban_pipeline.config.base import refuse_first
from geo_sokoban_pipeline.processes import count_cores, end_with_parent
from geo_sokoban_pipeline.rewards.math_answer.verdict import Differences, Equivalence

TIME_LIMIT = 2.5  # seconds on one answer
Question = Equivalence | Differences
# `failed`: the worker died over it; `late`: the deadline passed before the question had its full time
Decision = Literal["yes", "no", "timeout", "failed", "late"]

_PACKAGE_ROOT = Path(__file__).parents[3]
_STARTING_SECONDS = 120.0  # a busy machine needs many for the imports
_MOST_MEMORY = 2 << 30  # bytes of a worker's address space
_RETIRE_AT = 400 << 20  # bytes in use after which a worker is replaced
_SPARE_SECONDS = 1  # of processor time beyond a question's limit, before the kernel ends the worker


class GradingWorkerError(RuntimeError):
    """A worker cannot be started; the message says why."""


class GradingPool:
    """Worker processes that answer questions side by side; each is started by its first question.

    Args:
        workers: largest number; None: one for each core that this process may use, up to four.
        time_limit: seconds of work on one question, more than 0.
    """

    def __init__(self, workers: int | None = None, time_limit: float = TIME_LIMIT) -> None:
        refuse_first(
            (workers is not None and workers < 1, f"workers={workers}: at least one is needed"),
            (time_limit <= 0, f"time_limit={time_limit}: must be more than 0 seconds"),
        )
        self.size = min(4, count_cores()) if workers is None else workers
        self._time_limit = time_limit
        self._jobs: SimpleQueue[tuple[Question, float, Future[Decision]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        # Not a ThreadPoolExecutor: the interpreter's end would wait for its jobs.
        self._threads: list[threading.Thread] = []
        self._workers: list[WorkerProcess] = []
        self._spare = 0  # idle threads less waiting jobs
        self._process = os.getpid()
        self._closed = False

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers that run."""
        return [pid for worker in self._workers if (pid := worker.pid) is not None]

    def submit(self, question: Question, deadline: float) -> Future[Decision]:
        """Submit a question.

        Args:
            deadline: time of `time.monotonic()` after which the question is `late` if it did not get its full time.

        Returns:
            Future of the decision. It raises GradingWorkerError if no worker can be started; closing the pool cancels
            it.

        Raises:
            RuntimeError: the pool is closed, or was made in another process.
        """
        if os.getpid() != self._process:
            raise RuntimeError(f"this pool belongs to process {self._process}; after a fork, make a new one")
        decision: Future[Decision] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("this pool is closed")
            self._jobs.put((question, deadline, decision))
            self._spare -= 1
            if self._spare < 0 and len(self._threads) < self.size:
                self._add_thread()
        return decision

    def close(self) -> None:
        """End all workers and cancel waiting questions; running ones count as failed. Closing twice does nothing."""
        with self._lock:
            self._closed = True
            threads, self._threads = self._threads, []
            while not self._jobs.empty():
                job = self._jobs.get()
                if job is not None:
                    job[2].cancel()
            for _ in threads:
                self._jobs.put(None)
        for worker in self._workers:
            worker.interrupt()
        for thread in threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add_thread(self) -> None:
        worker = WorkerProcess()
        thread = threading.Thread(target=self._serve, args=(worker,), name="grading", daemon=True)
        self._workers.append(worker)
        self._threads.append(thread)
        self._spare += 1
        thread.start()

    def _serve(self, worker: WorkerProcess) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                question, deadline, decision = job
                if decision.set_running_or_notify_cancel():
                    try:
                        decision.set_result(self._answer(worker, question, deadline))
                    except Exception as error:  # the caller gets the error, and the thread continues
                        decision.set_exception(error)
                with self._lock:
                    self._spare += 1
        finally:
            worker.stop()

    def _answer(self, worker: WorkerProcess, question: Question, deadline: float) -> Decision:
        if not worker.start(deadline - time.monotonic()):
            return "late"  # it keeps starting, for the next question
        seconds = min(self._time_limit, deadline - time.monotonic())
        if seconds <= 0:
            return "late"
        decision = worker.ask(question, seconds)
        # An answer that the deadline cut short might have been right.
        return "late" if decision == "timeout" and seconds < self._time_limit else decision


class WorkerProcess:
    """The parent's end of a worker, which is started by its first question and replaced after its last one.

    Not thread-safe, except `interrupt`. On Linux the kernel ends the worker with the thread
    that started it.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._started = 0.0
        self._ready = False
        self._interrupted = False

    @property
    def pid(self) -> int | None:
        """Process id; None: it is not running."""
        return None if self._process is None else self._process.pid

    def start(self, seconds: float = _STARTING_SECONDS) -> bool:
        """Start the worker if it does not run, and wait until it is ready.

        Returns:
            Whether it can be asked; else it is still starting.

        Raises:
            GradingWorkerError: it has ended, or takes more than two minutes.
        """
        if self._process is None:
            self._launch()
        if self._ready:
            return True
        left = self._started + _STARTING_SECONDS - time.monotonic()
        try:
            response = self._read(min(seconds, left))
        except EOFError:
            response = {"failed": "it ended"}
        if response is None and seconds < left:
            return False
        if response is None or "failed" in response:
            self.stop()
            reason = f"not ready after {_STARTING_SECONDS} s" if response is None else response["failed"]
            raise GradingWorkerError(f"no grading worker: {reason}. Is SymPy installed, and is there memory left?")
        self._ready = True
        return True

    def ask(self, question: Question, seconds: float) -> Decision:
        """The answer to a question; a worker that exceeds the time or dies is stopped.

        Args:
            seconds: time to work on it, more than 0.

        Raises:
            GradingWorkerError: no worker can be started.
        """
        self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        response: dict[str, Any] | None
        try:
            self._process.stdin.write(json.dumps({**asdict(question), "seconds": seconds}).encode("ascii") + b"\n")
            self._process.stdin.flush()
            response = self._read(seconds)
        except (BrokenPipeError, EOFError):
            response = {"answer": "failed", "last": True}
        if response is None:
            response = {"answer": "timeout", "last": True}
        if response["last"]:
            self.stop()
        answer: Decision = response["answer"]
        return answer

    def stop(self) -> None:
        """Kill the worker and wait for its end; nothing if it does not run."""
        process, self._process, self._unread = self._process, None, b""
        if process is not None:
            process.kill()
            process.communicate()

    def interrupt(self) -> None:
        """Kill the worker for good, from another thread; its running question gets `failed`."""
        self._interrupted = True
        if (process := self._process) is not None:
            process.kill()

    def _launch(self) -> None:
        path = os.pathsep.join([str(_PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        code = f"from {__name__} import serve; serve({os.getpid()})"
        self._started, self._ready = time.monotonic(), False
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],  # -P: a file in the working directory must not pass for a library
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Equal verdicts in every process: SymPy orders by hashes.
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"},
            start_new_session=True,  # Ctrl-C is for the parent, which closes it
        )
        if self._interrupted:
            self._process.kill()

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
            # Looked at once even when the time is over: an answer written by then counts.
            left = max(0.0, deadline - time.monotonic())
            if not poller.poll(left * 1000):
                return None
            read = os.read(pipe, 1 << 16)
            if not read:
                raise EOFError
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        response: dict[str, Any] = json.loads(line)
        return response


def serve(parent: int) -> None:
    """In the worker: answer one question at a time until the input ends.

    If the parent is gone when a question takes too long, the kernel ends the worker by its limit on CPU time.

    Args:
        parent: process id of who started this.
    """
    import psutil

    responses = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent)
    try:
        _warm_up()
    except BaseException:
        _send(responses, {"failed": traceback.format_exc()})
        raise
    usage = psutil.Process()  # the peak of `getrusage` may be that of the parent
    _limit(resource.RLIMIT_AS, _MOST_MEMORY)
    _send(responses, {"ready": True})
    for line in sys.stdin:
        question = json.loads(line)
        _limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + question["seconds"]) + _SPARE_SECONDS)
        answer: Decision
        try:
            answer = "yes" if _decide(question) else "no"
        except MemoryError:
            answer = "failed"
        except Exception:  # whatever a library stumbles over, the answer is not shown to be the label
            answer = "no"
        _send(responses, {"answer": answer, "last": usage.memory_info().rss > _RETIRE_AT or answer == "failed"})


def _warm_up() -> None:
    """Import and use the libraries once, so that no question pays for it."""
    logging.disable(logging.CRITICAL)
    for answer, label in (("x^2 + 1", "1 + x^{2}"), ("x > 1", "1 < x"), ("(1, 2)", "(1, 3)"), ("\\sin(x)", "\\cos{5}")):
        _decide({"answer": answer, "label": label})
    _decide({"texts": ["(1.5*x+pi)-(sqrt(2))"], "tolerance": 0.05})


def _decide(question: dict[str, Any]) -> bool:
    # Algebra is imported in workers alone.
    from geo_sokoban_pipeline.rewards.math_answer.algebra import are_equivalent
    from geo_sokoban_pipeline.rewards.math_answer.slime_exact import difference_vanishes

    if "texts" in question:
        return all(difference_vanishes(text, question["tolerance"]) for text in question["texts"])
    return are_equivalent(question["answer"], question["label"], question.get("links", ()))


def _limit(what: int, most: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _send(responses: IO[str], response: dict[str, Any]) -> None:
    responses.write(json.dumps(response) + "\n")
    responses.flush()
