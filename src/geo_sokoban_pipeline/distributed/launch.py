"""Ranks on this machine: rank 0 is the process that starts them; the others run the jobs they are sent.

A failed rank is named with its traceback or its exit code. Any error closes all ranks, so no stale answer is read
later. Answers are received in the order of the ranks. No rank outlives rank 0: its pipe closes when rank 0 ends.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from torch import multiprocessing

from geo_sokoban_pipeline.distributed.group import has_lost_a_rank
from geo_sokoban_pipeline.distributed.messages import Done, Failed, Job, LostRankError, RankError

_PATIENCE = 5.0  # seconds before a rank that does not exit is terminated, then killed

Result = TypeVar("Result")


def serve(pipe: Connection, build: Callable[[], Any]) -> None:
    """A rank's main function: build its state, run the jobs that arrive on a pipe, send one answer each.

    It returns when the pipe closes, and after a failed job: the other ranks may be waiting in a collective, which fails
    when the connections of this rank close.
    """
    leave_interrupts()
    try:
        state = build()
        began = time.process_time()
        pipe.send(Done(None, 0.0))
        while True:
            job: Job = pipe.recv()
            try:
                result = job(state)
            except (EOFError, ConnectionError) as error:  # of the job's own connections
                pipe.send(_failure(error))
                return
            pipe.send(Done(result, time.process_time() - began))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # rank 0 has closed the pipe or ended
    except Exception as error:  # rank 0 raises it again
        with suppress(OSError):
            pipe.send(_failure(error))


def leave_interrupts() -> None:
    """Leave Ctrl-C, which reaches every process of a terminal, to rank 0."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _failure(error: Exception) -> Failed:
    return Failed("".join(traceback.format_exception(error)), has_lost_a_rank(error))


@dataclass
class Handle:
    """Rank 0's side of another rank.

    Attributes:
        title: its name in errors.
        cpu_seconds: of its jobs so far.
    """

    title: str
    process: Any
    pipe: Any
    cpu_seconds: float = 0.0

    def send(self, job: Job) -> None:
        """Send a job."""
        try:
            self.pipe.send(job)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self.lost() from error

    def receive(self) -> Any:
        """Wait for the answer to the last job; returns its result."""
        try:
            answer = self.pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self.lost() from error
        if isinstance(answer, Failed):
            raise (LostRankError if answer.lost else RankError)(f"{self.title} failed:\n{answer.text}")
        self.cpu_seconds = answer.cpu_seconds
        return answer.result

    def failure(self, patience: float) -> RankError | None:
        """The rank's own failure, if one shows within so many seconds."""
        try:
            while self.pipe.poll(patience):
                self.receive()
        except (LostRankError, OSError):
            return None
        except RankError as error:
            return error
        return None

    def lost(self) -> RankError:
        """Error of a rank whose pipe has closed."""
        # A rank that failed before its first job has sent its traceback.
        with suppress(EOFError, OSError):
            while self.pipe.poll():
                answer = self.pipe.recv()
                if isinstance(answer, Failed):
                    return RankError(f"{self.title} failed:\n{answer.text}")
        return RankError(
            f"{self.ending()} The same command continues from what is stored; processes=1 uses no further processes "
            "and less memory."
        )

    def ending(self) -> str:
        """How a process whose pipe has closed has ended, as a sentence."""
        self.process.join(_PATIENCE)
        code = self.process.exitcode
        name = f" ({signal.Signals(-code).name})" if code is not None and code < 0 else ""
        return f"{self.title} ended with exit code {code}{name}."

    def stop(self, *, patient: bool) -> None:
        """End the process: wait for its exit where `patient`, then terminate it, then kill it."""
        if patient:
            self.process.join(_PATIENCE)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(_PATIENCE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


class Ranks:
    """Rank 0, in this process, and `len(builds)` further ranks.

    The constructor returns at once, while the processes still import their libraries; the first `run` waits for them.

    Args:
        builds: make the state of each further rank, in its process; picklable.
    """

    def __init__(self, builds: Sequence[Callable[[], Any]]) -> None:
        self.size = len(builds) + 1
        self._handles: list[Handle] = []
        self._is_ready = False
        try:
            for number, build in enumerate(builds, start=2):
                self._handles.append(start_process(f"process {number} of {self.size}", serve, build))
        except BaseException:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        """Whether there are ranks to send jobs to."""
        return bool(self._handles)

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the further ranks, in order."""
        return [handle.process.pid for handle in self._handles]

    @property
    def cpu_seconds(self) -> float:
        """CPU-seconds of the further ranks' answered jobs."""
        return sum(handle.cpu_seconds for handle in self._handles)

    def run(self, own: Callable[[], Result], jobs: Sequence[Job]) -> list[Any]:
        """Run `own` here while the first further ranks run one job each; returns all results in order, `own`'s first.

        Raises:
            RankError: a rank failed or ended, or the ranks are closed. Any exception closes them.
        """
        if not self._handles:
            raise RankError("this worker group is closed.")
        chosen = self._handles[: len(jobs)]
        try:
            if not self._is_ready:
                for handle in self._handles:
                    handle.receive()
                self._is_ready = True
            for handle, job in zip(chosen, jobs, strict=True):
                handle.send(job)
            return [own(), *(handle.receive() for handle in chosen)]
        except BaseException as error:  # an interrupt too: no answer to this step may stay in a pipe for the next one
            cause = self._find_cause(error)
            self.close(patient=False)
            if cause is None:
                raise
            raise cause from error

    def _find_cause(self, error: BaseException) -> RankError | None:
        """The failure of another rank that an error follows from; None: there is none."""
        if not isinstance(error, Exception) or not (isinstance(error, LostRankError) or has_lost_a_rank(error)):
            return None
        # The rank whose failure it is has answered, or its pipe is closed; the others wait or have lost it too.
        failures = (handle.failure(_PATIENCE) for handle in self._handles)
        return next((found for found in failures if found is not None), None)

    def close(self, *, patient: bool = True) -> None:
        """End the further ranks: an idle one exits when its pipe closes; `patient` gives a busy one time to do so."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.pipe.close()
        for handle in handles:
            handle.stop(patient=patient)


def start_process(title: str, main: Callable[[Connection, Any], None], argument: Any) -> Handle:
    """Start a process that ends with this one.

    Args:
        main: its main function, given its end of a pipe and the argument, which is picklable.
    """
    context = multiprocessing.get_context("spawn")
    pipe, far_end = context.Pipe()
    # A rank inherits the signal mask, so Ctrl-C never reaches it. Python's resource tracker, which the first rank would
    # start, must not inherit it.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process = context.Process(target=main, args=(far_end, argument), daemon=True)
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    # Only the rank may hold its end of the pipe: then the pipe closes when the rank ends.
    far_end.close()
    return Handle(f"{title} (pid {process.pid})", process, pipe)
