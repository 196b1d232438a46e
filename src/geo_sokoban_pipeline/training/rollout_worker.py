"""A rollout worker: a process that only rolls out, with an engine of its own or connections to the servers.

It is the `Worker` of a rank without a group and a backend. It is sent whole groups and sends back their
trajectories; which groups are rolled out, and when the others are aborted, the driver decides.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from geo_sokoban_pipeline.distributed.messages import Beat, Call, Hanging, Line
from geo_sokoban_pipeline.rollout.engines.base import RolloutEngine
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.rollout.own_code import STUCK
from geo_sokoban_pipeline.rollout.rollout import check_episodes, load_rollout_fn, rollout
from geo_sokoban_pipeline.training.worker import Worker, WorkerSpec
from geo_sokoban_pipeline.trajectories.types import Trajectory

if TYPE_CHECKING:
    pass

_BEATS = 4  # in the time in which a worker has to be heard of


# What a worker is sent.


@dataclass(frozen=True)
class Begin:
    """Begin a rollout.

    Attributes:
        number: of the rollout; what is sent back carries it.
        requests: whole groups.
        is_all: whether no further groups follow.
        is_streamed: whether each group is sent back at once, not all of them at the end.
    """

    number: int
    requests: Sequence[EpisodeRequest]
    settings: RolloutSettings
    is_all: bool
    is_streamed: bool


@dataclass(frozen=True)
class Further:
    """Further groups of the rollout.

    Attributes:
        is_all: whether none follow.
    """

    requests: Sequence[EpisodeRequest]
    is_all: bool


@dataclass(frozen=True)
class Stop:
    """Abort all episodes of the rollout that have not ended.

    Attributes:
        requests: of groups that nobody has begun; in one message, so that no worker begins them before it stops.
    """

    requests: Sequence[EpisodeRequest] = ()


@dataclass(frozen=True)
class Do:
    """Call a method of the worker; answered with `CallOver`."""

    call: Call


# What it sends back.


@dataclass(frozen=True)
class CallOver:
    """A call has returned.

    Attributes:
        call: None: the worker is built.
    """

    call: Call | None = None


@dataclass(frozen=True)
class GroupOver:
    """A group whose episodes have all ended."""

    number: int
    group: int
    trajectories: list[Trajectory]


@dataclass(frozen=True)
class RolloutOver:
    """All groups of a rollout are sent.

    Attributes:
        busy: seconds in which the worker had something to roll out.
        cpu_seconds: of the worker's process since it was ready.
        stuck: environments that are left in a call that does not end.
    """

    number: int
    busy: float
    cpu_seconds: float
    stuck: int


# Its life.


@dataclass(frozen=True)
class RolloutProcess:
    """The life of a rollout worker, in its process.

    Attributes:
        build: makes its state; the policy is empty.
        timeout: seconds in which it has to be heard of; None: unlimited.
        gpu: number of the GPU on which its engine computes; None: it has none, or sees one alone.
    """

    build: WorkerSpec
    timeout: float | None
    gpu: int | None = None

    def __call__(self, line: Line) -> None:
        """Serve until the link closes."""
        pulse = Pulse()
        if self.timeout is not None:
            threading.Thread(target=_beat, args=(pulse, self.timeout, line), name="beat", daemon=True).start()
        if self.gpu is not None:
            torch.cuda.set_device(self.gpu)
        with pulse.waiting():
            worker = self.build()
        worker.line = line
        ready = time.process_time()
        line.send(CallOver())
        while True:
            with pulse.waiting():
                message = line.inbox.get()
            if message is None:
                return
            if isinstance(message, Do):
                with pulse.waiting():
                    message.call(worker)
                line.send(CallOver(message.call))
            elif isinstance(message, Begin):
                _roll_out(worker, message, line, pulse, ready)
            # Others belong to a rollout that is over.


def _beat(pulse: Pulse, timeout: float, line: Line) -> None:
    """Send signs of life, until the rollout stands still for longer than the limit."""
    with suppress(OSError):  # the link is closed
        while pulse.standstill < timeout:
            line.send(Beat())
            time.sleep(timeout / _BEATS)
        line.send(Hanging(timeout))


class Pulse:
    """When the rollout of this process has last called its engine, or whether it waits."""

    def __init__(self) -> None:
        self._moved, self._is_waiting = time.monotonic(), False

    @property
    def standstill(self) -> float:
        """Seconds of the stretch of work that goes on between two calls of the engine; 0 while it waits."""
        return 0.0 if self._is_waiting else time.monotonic() - self._moved

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """For the `with` block this process waits, or is in the engine or a reward, which have limits of their own."""
        self._is_waiting = True
        try:
            yield
        finally:
            self._moved, self._is_waiting = time.monotonic(), False


class WatchedEngine:
    """An engine whose calls a pulse notes; all else is the engine's own."""

    def __init__(self, engine: RolloutEngine, pulse: Pulse) -> None:
        self._engine, self._pulse = engine, pulse

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._engine, name)
        return self._watched(found) if callable(found) else found

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            with self._pulse.waiting():
                return function(*arguments, **named)

        return call


@dataclass
class MessageSupply:
    """Further groups and the order to stop, from an inbox.

    Attributes:
        is_stopped: see `Supply`.
        is_all: whether no further groups follow.
        idle: seconds spent waiting.
    """

    inbox: queue.SimpleQueue[Any]
    pulse: Pulse
    is_all: bool
    is_stopped: bool = False
    idle: float = 0.0
    _taken: list[EpisodeRequest] = field(default_factory=list)

    def take(self, *, wait: bool) -> list[EpisodeRequest]:
        """See `Supply`."""
        began = time.perf_counter()
        with self.pulse.waiting():
            self.look(wait=wait)
        self.idle += time.perf_counter() - began
        taken, self._taken = self._taken, []
        return taken

    def look(self, *, wait: bool = False) -> None:
        """Read the messages that have come; requests are kept for `take`."""
        while self._read(wait=wait and not self._taken and not self.is_all):
            pass

    def _read(self, *, wait: bool) -> bool:
        """Take a message; False: there is none."""
        try:
            message = self.inbox.get(block=wait)
        except queue.Empty:
            return False
        if message is None:  # closed: nobody takes what follows
            self.is_stopped = self.is_all = True
            self.inbox.put(None)
            return False
        if isinstance(message, Further):
            self._taken += message.requests
            self.is_all = message.is_all
        elif isinstance(message, Stop):
            self._taken += message.requests
            self.is_stopped = self.is_all = True
        return True


def _roll_out(worker: Worker, begin: Begin, line: Line, pulse: Pulse, ready: float) -> None:
    """Roll out, and send the trajectories; `ready`: the process's CPU-seconds when it was ready."""
    began, sent = time.perf_counter(), set[int]()
    supply = MessageSupply(line.inbox, pulse, begin.is_all)

    def deliver(trajectories: Sequence[Trajectory]) -> None:
        """Send the groups that have not been sent."""
        for group, given in groupby(trajectories, key=lambda episode: episode.group_index):
            if group not in sent:
                sent.add(group)
                episodes = list(given)
                if rollout_fn is not rollout:  # which may call a group complete that is not
                    asked = [request for request in begin.requests if request.group_index == group]
                    check_episodes(options.function, asked, episodes)
                line.send(GroupOver(begin.number, group, episodes))

    def enough(complete: Sequence[Trajectory]) -> bool:
        deliver(complete)
        supply.look()
        return supply.is_stopped

    options = begin.settings.rollout
    rollout_fn = load_rollout_fn(options)
    engine = WatchedEngine(worker.engine, pulse)
    watching: dict[str, Any] = {}
    if begin.is_streamed:
        watching["enough"] = enough
    if rollout_fn is rollout and watching:
        watching["supply"] = supply
    settings = replace(begin.settings, awaiting=pulse.waiting)  # a judge may be slow, and is not replaced
    trajectories = rollout_fn(engine, worker.policy, begin.requests, settings, **watching)
    deliver(trajectories)
    busy = time.perf_counter() - began - supply.idle
    stuck = sum(thread.name == STUCK for thread in threading.enumerate())
    line.send(RolloutOver(begin.number, busy, time.process_time() - ready, stuck))
