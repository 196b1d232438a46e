"""What the tests of ranks run in other processes: a state with the group of all ranks, and jobs of it."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from geo_sokoban_pipeline.distributed.group import Group, Meeting, join_group
from geo_sokoban_pipeline.distributed.launch import Ranks
from geo_sokoban_pipeline.runs.storage import file_digest


@dataclass
class State:
    """Of a rank."""

    group: Group | None = None
    kept: dict[str, Any] = field(default_factory=dict)


def build() -> State:
    torch.set_num_threads(1)
    return State()


@dataclass(frozen=True)
class Join:
    rank: int
    size: int
    port: int

    def __call__(self, state: State) -> None:
        state.group = join_group(self.rank, self.size, self.port)


@dataclass(frozen=True)
class FailThenSum:
    """One rank fails before a collective that the others wait in: of counts, or of gradients by shared memory."""

    how: str = ""
    gradients: bool = False
    connected: bool = False

    def __call__(self, state: State) -> Any:
        if self.connected:
            SumGradients()(state)
        if self.how == "raise":
            raise ValueError("out of luck")
        if self.how == "reset":
            raise ConnectionResetError("a server of its own")
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        assert state.group is not None
        return SumGradients(50_000)(state) if self.gradients else state.group.sum_counts([1])


@dataclass(frozen=True)
class SumGradients:
    """Sum of (count,) and (3,) gradients that differ by rank; one is on the second rank alone, one nowhere."""

    count: int = 40_001

    def __call__(self, state: State) -> list[torch.Tensor | None]:
        assert state.group is not None
        generator = torch.Generator().manual_seed(state.group.rank)
        parameters = [torch.nn.Parameter(torch.zeros(count)) for count in (self.count, 3, 2, 1)]
        for parameter in parameters[:2]:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        if state.group.rank == 1:
            parameters[2].grad = torch.ones(2)
        state.group.sum_gradients(parameters)
        return [parameter.grad for parameter in parameters]


def start(size: int) -> tuple[Ranks, State]:
    """Ranks that have joined, and the state of rank 0."""
    ranks, own, meeting = Ranks([build] * (size - 1)), State(), Meeting(size)

    def join() -> None:
        own.group = meeting.join(size)

    ranks.run(join, [Join(rank, size, meeting.port) for rank in range(1, size)])
    return ranks, own


@dataclass(frozen=True)
class OpenMeeting:
    """Open the place where the ranks of a Ray cluster find rank 0."""

    size: int
    host: str

    def __call__(self, state: State) -> int:
        state.kept["meeting"] = Meeting(self.size, self.host)
        return int(state.kept["meeting"].port)


@dataclass(frozen=True)
class JoinAt:
    """Join, given where rank 0 is and where this rank is; None: on the same machine."""

    rank: int
    size: int
    host: str
    port: int
    address: str | None

    def __call__(self, state: State) -> None:
        if self.rank == 0:
            state.group = state.kept["meeting"].join(self.size, address=self.address)
        else:
            state.group = join_group(self.rank, self.size, self.port, host=self.host, address=self.address)


@dataclass(frozen=True)
class Look:
    """Working folder, what is in it, and the content of a folder."""

    folder: Path

    def __call__(self, state: State) -> tuple[str, list[str], dict[str, int]]:
        found = {str(path.relative_to(self.folder)): path.stat().st_size for path in sorted(self.folder.rglob("*.*"))}
        return os.getcwd(), sorted(os.listdir()), found


@dataclass(frozen=True)
class WriteRank:
    """Write a file of so many bytes that name the rank; returns its record as a wrong one where asked for."""

    folder: Path
    count: int
    wrong: bool = False

    def __call__(self, state: State) -> dict[str, dict[str, Any]]:
        assert state.group is not None
        path = self.folder / f"{state.group.rank}.bin"
        path.write_bytes(bytes([state.group.rank]) * self.count)
        record = {"bytes": self.count, "blake2b": "0" * 32 if self.wrong else file_digest(path)}
        return {path.name: record}


@dataclass(frozen=True)
class Sleep:
    """Answer late."""

    seconds: float

    def __call__(self, state: State) -> None:
        time.sleep(self.seconds)
