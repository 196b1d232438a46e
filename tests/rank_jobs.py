"""What the tests of processes call in them: an object with the group of all ranks, whose methods fail, hang and sum."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from geo_sokoban_pipeline.distributed.group import LOOPBACK, Group, join_group, open_rendezvous
from geo_sokoban_pipeline.distributed.process import InProcess, LocalProcess, WorkerHandle, results_of
from geo_sokoban_pipeline.progress import note_progress, waiting
from geo_sokoban_pipeline.runs.storage import file_digest

PATIENCE = 5.0


class Member:
    """The object of a process."""

    def __init__(self) -> None:
        self.group: Group | None = None
        self.rendezvous: Any = None
        self.free = threading.Event()
        self.noted: list[int] = []

    def open_rendezvous(self, size: int, host: str = LOOPBACK) -> int:
        self.rendezvous = open_rendezvous(size, host)
        return int(self.rendezvous.port)

    def join(self, rank: int, size: int, port: int, host: str = LOOPBACK, address: str | None = None) -> None:
        """Join, given where rank 0 is and where this rank is; None: on the same machine."""
        self.group = join_group(rank, size, port, host=host, address=address)

    def fail_then_sum(self, how: str = "", gradients: bool = False, connected: bool = False) -> Any:
        """One rank fails before a collective that the others wait in: of counts, or of gradients by shared memory."""
        if connected:
            self.sum_gradients()
        fail(how)
        assert self.group is not None
        return self.sum_gradients(50_000) if gradients else self.group.sum_counts([1])

    def fail_then_wait(self, how: str) -> None:
        """One rank fails, and the others wait in a collective that never returns."""
        fail(how)
        threading.Event().wait()

    def sum_gradients(self, count: int = 40_001) -> list[torch.Tensor | None]:
        """Sum of (count,) and (3,) gradients that differ by rank; one is on the second rank alone, one nowhere."""
        assert self.group is not None
        generator = torch.Generator().manual_seed(self.group.rank)
        parameters = [torch.nn.Parameter(torch.zeros(length)) for length in (count, 3, 2, 1)]
        for parameter in parameters[:2]:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        if self.group.rank == 1:
            parameters[2].grad = torch.ones(2)
        self.group.sum_gradients(parameters)
        return [parameter.grad for parameter in parameters]

    def leave(self) -> None:
        if self.group is not None:
            self.group.close()

    def look(self, folder: Path) -> tuple[str, list[str], dict[str, int]]:
        """Working folder, what is in it, and the content of a folder."""
        found = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*.*"))}
        return os.getcwd(), sorted(os.listdir()), found

    def write_rank(self, folder: Path, count: int, wrong: bool = False) -> dict[str, dict[str, Any]]:
        """Write a file of so many bytes that name the rank; returns its record as a wrong one where asked for."""
        assert self.group is not None
        path = folder / f"{self.group.rank}.bin"
        path.write_bytes(bytes([self.group.rank]) * count)
        record = {"bytes": count, "blake2b": "0" * 32 if wrong else file_digest(path)}
        return {path.name: record}

    def parent(self) -> int:
        """Process that started this one."""
        return os.getppid()

    def sleep(self, seconds: float) -> str:
        """Answer late, without progress."""
        time.sleep(seconds)
        logging.getLogger("geo_sokoban_pipeline.rollout").info("awake again")
        return "awake"

    def work(self, seconds: float, is_waiting: bool = False) -> str:
        """Answer late, with progress or for something that has a limit of its own."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if not is_waiting:
                note_progress()
                time.sleep(0.01)
                continue
            with waiting():
                time.sleep(seconds)
        return "done"

    def count(self, emit: Callable[[int], None], numbers: int) -> str:
        """Emit numbers, then wait until freed."""
        for number in range(numbers):
            emit(number)
        self.free.wait()
        return "freed"

    def emit_lock(self, emit: Callable[[Any], None]) -> str:
        """Emit what cannot be sent, and then what can."""
        for item in (threading.Lock(), 1):
            emit(item)
        return "emitted"

    def note(self, number: int) -> list[int]:
        """Append a number to those so far."""
        self.noted.append(number)
        return list(self.noted)

    def release(self) -> str:
        self.free.set()
        return "released"

    def environment(self, name: str) -> tuple[str | None, str, list[bool]]:
        """A variable, the working folder, and whether Ctrl-C is ignored and open."""
        is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        is_open = signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        return os.environ.get(name), os.getcwd(), [is_ignored, is_open]

    def echo(self, given: Any) -> Any:
        return given

    def echo_lock(self) -> Any:
        """What cannot be sent."""
        return threading.Lock()


def fail(how: str) -> None:
    if how == "raise":
        raise ValueError("out of luck")
    if how == "reset":
        raise ConnectionResetError("a server of its own")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(3)


def build() -> Member:
    torch.set_num_threads(1)
    return Member()


def build_badly() -> Member:
    raise ValueError("no place to build on")


def die_while_building() -> Member:
    os._exit(3)


def start(size: int) -> tuple[list[WorkerHandle], Member]:
    """Ranks that have joined, the first in this process, and its object."""
    own = Member()
    handles: list[WorkerHandle] = [InProcess(f"process 1 of {size}", own)]
    handles += [LocalProcess(f"process {number} of {size}", build) for number in range(2, size + 1)]
    join(handles)
    return handles, own


def join(handles: Sequence[WorkerHandle], host: str = LOOPBACK, addresses: Sequence[str] | None = None) -> None:
    size = len(handles)
    (port,) = results_of([handles[0].call("open_rendezvous", size, host)], PATIENCE)
    places = addresses or [None] * size
    given = [(rank, size, port, host, place) for rank, place in enumerate(places)]
    run(handles, "join", given)


def run(handles: Sequence[WorkerHandle], method: str, given: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Results of a call each."""
    calls = [handle.call(method, *arguments) for handle, arguments in zip(handles, given, strict=True)]
    return results_of(calls, PATIENCE)


def close(handles: Sequence[WorkerHandle], *, patient: bool = True) -> None:
    for handle in reversed(handles):
        handle.close(patient=patient)


if __name__ == "__main__":  # a driver that is killed while a process of its works
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    started = LocalProcess("busy", build)
    started.ready.result()
    busy = started.call("sleep", 600.0)
    sys.stdout.write(f"{started.pid}\n")
    sys.stdout.flush()
    busy.result()
