"""Rollout workers as the driver sees them: one object in place of an engine, whose episodes other processes roll out.

With engines in the workers, which are seeded, groups are dealt in a fixed order, so that no number depends on timing.
With servers each worker gets further groups as its own end. The driver alone decides when enough groups are complete.

A worker that ends or hangs is replaced. The new one has the same weights, and rolls out again what the old one had not
finished, with the same seeds; with seeded engines all groups of that worker, so that its batches are the same.
"""

from __future__ import annotations

import logging
import queue
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.rollout import RolloutOptions
from geo_sokoban_pipeline.distributed.links import Link, LocalLink
from geo_sokoban_pipeline.distributed.messages import (
    Beat,
    Call,
    Conversation,
    DeadRankError,
    LostServer,
    Question,
    RankError,
    Reply,
)
from geo_sokoban_pipeline.policies.policy import Policy, device_of, use_types
from geo_sokoban_pipeline.rollout.engines.base import EngineControl, WeightSource
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.rollout.rollout import Enough, Progress, RolloutFn, check_failures, load_rollout_fn, rollout
from geo_sokoban_pipeline.training.ray_group import RayStart
from geo_sokoban_pipeline.training.rollout_worker import (
    Begin,
    CallOver,
    Do,
    Further,
    GroupOver,
    RolloutOver,
    RolloutProcess,
    Stop,
)
from geo_sokoban_pipeline.training.worker import WorkerSpec
from geo_sokoban_pipeline.training.worker_group import WorkerGroup
from geo_sokoban_pipeline.trajectories.types import Trajectory, share_infos

if TYPE_CHECKING:
    from geo_sokoban_pipeline.rollout.engines.sglang.engine import SglangEngine
    from geo_sokoban_pipeline.rollout.engines.sglang.servers import Launcher, ServerPlace

logger = logging.getLogger(__name__)

_FILE_BYTES = 512 << 20  # of weights on their way
_WEIGHT_FILES = "model*"  # names of the files that workers read
_CLOSED = "the rollout workers are closed."
Groups = dict[int, list[EpisodeRequest]]
# (title, life of the process) → the link to a new one
Start = Callable[[str, Conversation], Link]


@dataclass
class _Seat:
    """The place of a worker.

    Attributes:
        link: to the process that has it now.
        load: the call that gave this process its weights; None: it has none.
        groups: of the rollout, that this worker has got.
        busy: seconds in which workers of this place had something to roll out.
        cpu_seconds: of the present process, and of earlier ones.
        stuck: environments of the present process that do not end.
    """

    number: int
    link: Link
    load: Call | None = None
    groups: Groups = field(default_factory=dict)
    busy: float = 0.0
    cpu_seconds: float = 0.0
    earlier_cpu_seconds: float = 0.0
    stuck: int = 0


class _Rollout:
    """Which groups of a rollout are done, which wait for a worker, and whether there are enough.

    Args:
        groups: requests by group, in the order of the tasks.
        window: groups that a worker has at a time; None: all of them are dealt at once.

    Attributes:
        done: trajectories by group.
        waiting: groups that no worker has.
    """

    def __init__(
        self,
        number: int,
        groups: Groups,
        settings: RolloutSettings,
        window: int | None,
        progress: Progress | None,
        enough: Enough | None,
    ) -> None:
        self.number, self.groups = number, groups
        self.done: dict[int, list[Trajectory]] = {}
        self.waiting = deque(groups)
        self._settings, self._window, self._progress, self._enough = settings, window, progress, enough
        self._is_streamed, self._is_stopped = enough is not None or window is not None, False
        self._reported = set[int]()

    def shares(self, workers: int) -> list[Groups]:
        """The first groups of each worker; neighbouring groups, which are often alike, go to different ones."""
        count = len(self.groups) if self._window is None else self._window * workers
        first = [self.waiting.popleft() for _ in range(min(count, len(self.waiting)))]
        return [self._chosen(first[worker::workers]) for worker in range(workers)]

    def beginning(self, own: Groups) -> list[Any]:
        """Messages with which a worker begins what is not done of its groups."""
        tasks = _tasks({number: tasks for number, tasks in own.items() if number not in self.done})
        begin = Begin(self.number, tasks, self._settings, not self.waiting, self._is_streamed)
        return [begin, Stop()] if self._is_stopped else [begin]

    def lose(self, own: Groups) -> None:
        """Note the end of a worker that had these groups."""
        if not self._is_streamed:  # batches of fewer groups would be rounded differently
            for number in own:
                self.done.pop(number, None)

    def note(self, group: int, trajectories: list[Trajectory]) -> bool:
        """Note a group that is over; returns whether all others are to be aborted from now on."""
        self.done[group] = trajectories
        if self._progress is not None and group not in self._reported:
            self._progress(len(trajectories))
        self._reported.add(group)
        if self._enough is None or self._is_stopped:
            return False
        complete = [episode for number in self.groups if number in self.done for episode in self.done[number]]
        self._is_stopped = self._enough(complete)
        return self._is_stopped

    def next_group(self) -> Groups | None:
        """A group for a worker that has finished one; None: there is none."""
        return self._chosen([self.waiting.popleft()]) if self.waiting else None

    def rest(self, workers: int) -> list[Groups]:
        """What nobody has begun, by the worker that aborts it."""
        left = list(self.waiting)
        self.waiting.clear()
        return [self._chosen(left[worker::workers]) for worker in range(workers)]

    def _chosen(self, numbers: Sequence[int]) -> Groups:
        return {number: self.groups[number] for number in numbers}


def _tasks(groups: Groups) -> list[EpisodeRequest]:
    return [task for own in groups.values() for task in own]


class RolloutWorkers:
    """`rollout.workers` processes that roll out; see `EngineControl`.

    Args:
        policy: of the driver; its weights are sent by `update_weights`.
        options: of the run.
        launcher: of servers; None: they are launched on this machine.

    Attributes:
        in_process: see `EngineControl`; False: weights are sent.
        version: of the weights.
        servers: from which the workers sample; None: each has an engine.
        replaced: how often another worker has taken the place of one.

    Raises:
        ValueError: the policy is on a GPU, and there is not one for each worker.
    """

    in_process = False

    def __init__(self, policy: Policy, options: TrainOptions, launcher: Launcher | None = None) -> None:
        self.version = 0
        in_ray = self._in_ray = RayStart(options) if options.placement == "ray" else None
        self._policy, self._options = policy, options if in_ray is None else in_ray.options
        self._count = options.rollout.workers or 1
        self._device = device_of(self._options.policy) if in_ray is None else self._options.policy.device
        is_own_gpu = self._device != "cpu" and in_ray is None and options.rollout.engine == "transformers"
        self._first_gpu = options.processes if is_own_gpu else None
        if self._first_gpu is not None and torch.cuda.device_count() < options.processes + self._count:
            raise ValueError(
                f"rollout.workers={self._count} with processes={options.processes} and the policy on {self._device}: "
                f"each takes a GPU of its own, and there are {torch.cuda.device_count()}. Lower one of both, or take "
                "rollout.engine=sglang."
            )
        self._start: Start = in_ray or LocalLink
        self.servers: SglangEngine | None = None
        self._build = replace(WorkerSpec.of(policy, self._options), folder=None, is_empty=True)
        self._scratch = tempfile.TemporaryDirectory(prefix="geo_sokoban_weights_")
        self._load: Call | None = None
        self._folder: Path | None = None
        self._sent_state: Hashable = None
        self.replaced = 0
        self._sets = self._number = self._lost = 0
        self._seconds = 0.0  # of the rollouts since `take_metrics`
        # Number, link and message of a worker; no link: what the rollout raises.
        self._inbox: queue.SimpleQueue[tuple[int, Link | None, Any]] = queue.SimpleQueue()
        self._is_closed = False
        self._seats: list[_Seat] = []
        try:
            if options.rollout.engine == "sglang":
                from geo_sokoban_pipeline.rollout.engines.sglang.engine import SglangEngine
                from geo_sokoban_pipeline.rollout.engines.sglang.servers import HERE

                self.servers = SglangEngine(policy, options.rollout.server, launcher or HERE)
            # All start at the same time, before one of them has settled.
            for number in range(self._count):
                self._seats.append(_Seat(number, self._begin_worker(number)))
            for seat in self._seats:
                self._settle(seat)
        except BaseException:
            self.close()
            raise

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the workers, each on its machine."""
        return [seat.link.pid for seat in self._seats]

    @property
    def cpu_seconds(self) -> float:
        """CPU-seconds of the workers, as of their last rollouts."""
        return sum(seat.cpu_seconds + seat.earlier_cpu_seconds for seat in self._seats)

    def take_metrics(self) -> dict[str, float]:
        """Of the rollouts since the last call: the share in which each worker had nothing to do."""
        seconds, self._seconds = max(self._seconds, 1e-9), 0.0
        found = {f"perf/idle_share/worker_{seat.number}": max(0.0, 1.0 - seat.busy / seconds) for seat in self._seats}
        for seat in self._seats:
            seat.busy = 0.0
        return found

    def update_weights(self, weights: WeightSource | None, version: int) -> None:
        """Send the workers new weights; they drop everything computed with the old ones.

        Args:
            weights: None: those of the driver's model. Unchanged ones are not sent twice.

        Raises:
            RankError: a worker failed, or more were lost than `rollout.worker_restarts` allows.
        """
        before = self._load
        self._load = self._make_load(weights or WeightSource.of_model(self._policy.model), version)
        self.version = version
        self._lost = 0
        waiting = set(range(self._count))
        for seat in self._seats:
            self._give_weights(seat)
        while waiting:
            seat, message = self._next()
            if isinstance(message, DeadRankError):
                self._replace(seat, message)
            elif isinstance(message, CallOver) and message.call == seat.load:
                waiting.discard(seat.number)
        if before is not None and self.servers is None and before.arguments[0] != self._folder:
            self._forget(before.arguments[0])

    def rollout(
        self,
        engine: Any,
        policy: Policy,
        tasks: Sequence[EpisodeRequest],
        settings: RolloutSettings,
        progress: Progress | None = None,
        enough: Enough | None = None,
    ) -> list[Trajectory]:
        """Roll out by `rollout.function` in the workers; see `rollout`.

        Args:
            engine, policy: unused; the workers have their own.

        Raises:
            RankError: as `update_weights`.
            TooManyFailuresError: see `rollout`.
        """
        began = time.perf_counter()
        # `max_failed_share` is checked over all episodes below, not within a worker.
        lenient = replace(settings, rollout=settings.rollout.model_copy(update={"max_failed_share": 1.0}))
        if self._in_ray is not None:
            lenient = self._in_ray.renamed(lenient)
        groups: Groups = {number: list(own) for number, own in groupby(tasks, key=lambda task: task.group_index)}
        window = self._window(settings.rollout, max(map(len, groups.values()), default=1))
        self._number += 1
        done = self._roll_out(_Rollout(self._number, groups, lenient, window, progress, enough))
        trajectories = [episode for group in done.values() for episode in group]
        self._seconds += time.perf_counter() - began
        check_failures(trajectories, settings.rollout.max_failed_share)
        share_infos(turn for trajectory in trajectories for turn in trajectory.turns)
        return trajectories

    def sleep(self) -> None:
        """See `EngineControl`; the memory of workers is their own, that of servers is not."""
        if self.servers is not None:
            self.servers.sleep()

    def close(self) -> None:
        """End the workers; a rollout in another thread fails."""
        self._is_closed = True
        self._inbox.put((0, None, None))
        for seat in self._seats:  # all of them end at the same time
            with suppress(RankError):  # of one that could not be built
                self._send(seat, None)
        for seat in self._seats:
            seat.link.close()
        if self.servers is not None:
            self.servers.close()
        self._scratch.cleanup()

    def _roll_out(self, current: _Rollout) -> dict[int, list[Trajectory]]:
        """Trajectories by group, in the order of the tasks."""
        self._lost = 0
        for seat, share in zip(self._seats, current.shares(self._count), strict=True):
            seat.groups = share
            self._send(seat, *current.beginning(seat.groups))
        at_work = set(range(self._count))
        while at_work:
            seat, message = self._next()
            if isinstance(message, DeadRankError):
                self._replace(seat, message)
                if seat.number in at_work:
                    current.lose(seat.groups)
                    self._send(seat, *current.beginning(seat.groups))
            elif isinstance(message, GroupOver) and message.number == current.number:
                self._note(current, seat, message)
            elif isinstance(message, RolloutOver) and message.number == current.number:
                at_work.discard(seat.number)
                seat.busy += message.busy
                seat.cpu_seconds, seat.stuck = message.cpu_seconds, message.stuck
        for seat in self._seats:
            if seat.stuck:
                logger.warning("%s is replaced: %d environments hang in it", seat.link.title, seat.stuck)
                self._restart(seat)
        return {number: current.done[number] for number in current.groups}

    def _note(self, current: _Rollout, seat: _Seat, over: GroupOver) -> None:
        """Note a group that is over; its worker gets another one, or all are told to stop."""
        if current.note(over.group, over.trajectories):
            for other, left in zip(self._seats, current.rest(self._count), strict=True):
                other.groups |= left
                self._send(other, Stop(_tasks(left)))
        elif (further := current.next_group()) is not None:
            seat.groups |= further
            self._send(seat, Further(_tasks(further), is_all=False))
            if not current.waiting:
                for other in self._seats:
                    self._send(other, Further([], is_all=True))

    def _window(self, options: RolloutOptions, size: int) -> int | None:
        """Groups that a worker has at a time: as many as the servers have places for. None: all, in a fixed order.

        Args:
            size: episodes of a group.
        """
        is_own = load_rollout_fn(options) is not rollout
        if is_own or options.engine == "transformers":
            return None
        server = options.server
        places = server.concurrency * (len(server.urls) or server.count)
        return max(1, places // (size * self._count))

    # Workers.

    def _begin_worker(self, number: int) -> Link:
        gpu = None if self._first_gpu is None else self._first_gpu + number
        life = RolloutProcess(self._build, self._options.rollout.worker_timeout, gpu)
        return self._start(f"rollout worker {number + 1} of {self._count}", life)

    def _settle(self, seat: _Seat) -> None:
        """Wait until a worker that was begun is there, then listen to it."""
        seat.link.settle()
        given = seat.number, seat.link
        threading.Thread(target=self._listen, args=given, name=seat.link.title, daemon=True).start()

    def _listen(self, number: int, link: Link) -> None:
        """Put what a worker sends into the inbox, and its end as an exception."""
        timeout = self._options.rollout.worker_timeout
        while True:
            try:
                message = link.receive(timeout)
                if isinstance(message, Question) and (place := self._bring_back(message.content)) is not None:
                    link.send(Reply(message.number, place))
            except Exception as error:
                link.close(patient=False)  # who waits to send to one that hangs waits no longer
                self._inbox.put((number, link, error))
                return
            if not isinstance(message, Beat | Question):
                self._inbox.put((number, link, message))

    def _next(self) -> tuple[_Seat, Any]:
        """The next message of a present worker.

        Raises:
            RankError: a worker failed, or this object is closed.
            Exception: a lost server was not brought back.
        """
        while True:
            number, link, message = self._inbox.get()
            if self._is_closed:
                raise RankError(_CLOSED)
            if link is None:
                raise message
            seat = self._seats[number]
            if link is not seat.link:
                continue
            if isinstance(message, Exception) and not isinstance(message, DeadRankError):
                raise message
            return seat, message

    def _send(self, seat: _Seat, *messages: Any) -> None:
        with suppress(DeadRankError):  # its end is in the inbox too
            for message in messages:
                seat.link.send(message)

    def _give_weights(self, seat: _Seat) -> None:
        load = self._load
        if load is None:
            return
        with suppress(DeadRankError):  # its end is in the inbox too
            arguments = load.arguments
            if self.servers is None:
                arguments = (seat.link.place(arguments[0], _WEIGHT_FILES), *arguments[1:])
            else:
                arguments = (*arguments[:-1], self._places())
            load = replace(load, arguments=arguments)
            seat.load = load
            seat.link.send(Do(load))

    def _replace(self, seat: _Seat, cause: DeadRankError) -> None:
        """Start another worker in the place of one that was lost.

        Raises:
            RankError: more were lost than allowed.
        """
        allowed = self._options.rollout.worker_restarts
        self._lost += 1
        if self._lost > allowed:
            raise RankError(
                f"{cause} {allowed} rollout workers were replaced before (rollout.worker_restarts={allowed}); the same "
                "command continues from what is stored."
            ) from cause
        logger.warning("%s It is replaced (%d of %d).", cause, self._lost, allowed)
        self._restart(seat)

    def _restart(self, seat: _Seat) -> None:
        self.replaced += 1
        seat.link.close(patient=False)
        seat.earlier_cpu_seconds += seat.cpu_seconds
        seat.cpu_seconds, seat.stuck = 0.0, 0
        seat.link = self._begin_worker(seat.number)
        if self._is_closed:  # meanwhile, by another thread
            seat.link.close(patient=False)
            raise RankError(_CLOSED)
        self._settle(seat)
        self._give_weights(seat)

    # Weights and servers.

    def _make_load(self, source: WeightSource, version: int) -> Call:
        """The call that gives a worker these weights."""
        if self.servers is not None:
            self.servers.update_weights(source, version)
            given = self._options.rollout.server
            options = given.model_copy(update={"mode": "attach", "count": 1, "colocated": False})
            return Call("follow_servers", (options, given.api_key(), self.servers.tag, version, []))
        state = source.state()
        if self._folder is None or state != self._sent_state:
            self._folder, self._sent_state = source.folder or self._write(source), state
        return Call("load_weights", (self._folder, version, self._device))

    def _write(self, source: WeightSource) -> Path:
        """Write weights into a folder, each in the type in which an engine uses it."""
        from geo_sokoban_pipeline.rollout.engines.sglang.weights import write_folder

        self._sets += 1
        folder, types = Path(self._scratch.name) / str(self._sets), use_types(self._policy)
        tensors = ((name, tensor.to(types[name])) for name, tensor in source.read(None))
        write_folder(folder, tensors, _FILE_BYTES, "model-")
        return folder

    def _forget(self, folder: Path) -> None:
        """Remove the copies of a folder of weights, and the folder if it was made here."""
        for seat in self._seats:
            with suppress(DeadRankError):
                seat.link.clear(folder)
        if folder.is_relative_to(self._scratch.name):
            shutil.rmtree(folder, ignore_errors=True)

    def _places(self) -> list[ServerPlace]:
        assert self.servers is not None
        return [self.servers.place_of(number) for number in range(len(self.servers.servers))]

    def _bring_back(self, lost: LostServer) -> ServerPlace | None:
        """Bring back the server that a worker has found lost; None: it does not come back.

        The thread of this worker's messages waits meanwhile, as its requests to this server do.
        """
        assert self.servers is not None
        try:
            self.servers.bring_back(lost.server, lost.life, lost.reason)
            return self.servers.place_of(lost.server)
        except Exception as error:  # raised by the rollout, which waits for the worker; it is no loss of a worker
            self._inbox.put((0, None, error))
            return None


@dataclass
class RolloutSide:
    """What rolls out for a run.

    Attributes:
        engine: in this process, or what stands for those in others.
        function: rolls out; None: `rollout.function`, in this process.
        workers: rollout workers; None: there are none.
        missing: ranks for which there was no place.
        servers: those that sample; None: there are none.
    """

    engine: EngineControl
    function: RolloutFn | None
    workers: RolloutWorkers | None = None
    missing: int = 0
    servers: SglangEngine | None = None
    _earlier: deque[dict[str, int]] = field(init=False)  # counts as of the last two calls

    def __post_init__(self) -> None:
        self._earlier = deque([self._counts()] * 2, maxlen=2)

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the rollouts since the last call, see `RolloutWorkers`, and of ranks, workers and servers.

        Who collects begins with a call that drops the times of validations. What is counted counts since the call
        before that one.
        """
        found = {} if self.workers is None else self.workers.take_metrics()
        if self.missing:
            found["perf/missing_ranks"] = float(self.missing)
        now, before = self._counts(), self._earlier[0]
        self._earlier.append(now)
        return found | {name: float(count - before[name]) for name, count in now.items() if count > before[name]}

    def _counts(self) -> dict[str, int]:
        """How often a worker was replaced, and a server brought back."""
        found = {} if self.workers is None else {"perf/worker_restarts": self.workers.replaced}
        return found if self.servers is None else found | {"perf/server_restarts": self.servers.restarts}

    def cpu_clock(self, ranks: WorkerGroup | None) -> float:
        """CPU-seconds of this process, of other ranks' jobs and of rollout workers, from an arbitrary zero."""
        own = time.process_time() if ranks is None else ranks.cpu_clock()
        return own + (0.0 if self.workers is None else self.workers.cpu_seconds)


@contextmanager
def open_rollouts(policy: Policy, options: TrainOptions, ranks: WorkerGroup | None) -> Iterator[RolloutSide]:
    """What rolls out, for the `with` block: an engine here, one in each rank, servers, or rollout workers."""
    launcher, missing = (None, 0) if ranks is None else (ranks.launcher, ranks.missing)
    if options.rollout.workers is None:
        with closing(build_engine(policy, options.rollout, launcher)) as engine:
            function = None if ranks is None or not engine.in_process else ranks.rollout
            servers = cast("SglangEngine", engine) if options.rollout.engine == "sglang" else None
            yield RolloutSide(engine, function, missing=missing, servers=servers)
    else:
        with closing(RolloutWorkers(policy, options, launcher)) as workers:
            yield RolloutSide(workers, workers.rollout, workers, missing, workers.servers)
