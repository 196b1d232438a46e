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
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.rollout import RolloutOptions
from geo_sokoban_pipeline.distributed.process import (
    LocalProcess,
    Watch,
    WorkerDied,
    WorkerError,
    WorkerHandle,
    WorkerHangs,
)
from geo_sokoban_pipeline.policies.policy import Policy, device_of, use_types
from geo_sokoban_pipeline.policies.weights import WeightSource
from geo_sokoban_pipeline.rollout.engines.base import EngineControl
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.rollout.rollout import Enough, Progress, RolloutFn, check_failures, load_rollout_fn, rollout
from geo_sokoban_pipeline.runs.scratch import Scratch
from geo_sokoban_pipeline.training.worker import LostServer, WorkerSpec
from geo_sokoban_pipeline.training.worker_group import RayStart, WorkerGroup
from geo_sokoban_pipeline.trajectories.types import Trajectory, share_infos

if TYPE_CHECKING:
    from geo_sokoban_pipeline.rollout.engines.sglang.engine import SglangEngine
    from geo_sokoban_pipeline.rollout.engines.sglang.servers import Launcher

logger = logging.getLogger(__name__)

_FILE_BYTES = 512 << 20  # of weights on their way
_WEIGHT_FILES = "model*"  # names of the files that workers read
_CLOSED = "the rollout workers are closed."
Groups = dict[int, list[EpisodeRequest]]
# (title, how to build the worker, whether it is no longer wanted) → a new process
Start = Callable[[str, WorkerSpec, Callable[[], bool]], WorkerHandle]
_LOOKS = 4  # at a worker, in the time after which one that hangs is replaced


@dataclass
class WorkerSlot:
    """The place of a worker.

    Attributes:
        handle: of the process that has it now.
        groups: of the rollout, that this worker has got.
        busy: seconds in which workers of this place had something to roll out.
        earlier_cpu_seconds: of earlier processes.
        stuck: environments of the present process that do not end.
    """

    number: int
    handle: WorkerHandle
    watch: Watch
    groups: Groups = field(default_factory=dict)
    busy: float = 0.0
    earlier_cpu_seconds: float = 0.0
    stuck: int = 0


@dataclass(frozen=True)
class _Event:
    """A change in a call of a worker.

    Attributes:
        value: result, item of its stream, or what it raised.
        is_over: whether the call has ended.
    """

    handle: WorkerHandle
    call: int
    value: Any
    is_over: bool


class _Rollout:
    """Which groups of a rollout are done, which wait for a worker, and whether there are enough.

    Args:
        groups: requests by group, in the order of the tasks.
        window: groups that a worker has at a time; None: all of them are dealt at once.

    Attributes:
        done: trajectories by group.
        waiting: groups that no worker has.
        is_streamed: whether each group is sent as it ends.
        is_stopped: whether all that has not ended is aborted.
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
        self.settings, self.is_streamed, self.is_stopped = settings, enough is not None or window is not None, False
        self._window, self._progress, self._enough = window, progress, enough
        self._reported = set[int]()

    def shares(self, workers: int) -> list[Groups]:
        """The first groups of each worker; neighbouring groups, which are often alike, go to different ones."""
        count = len(self.groups) if self._window is None else self._window * workers
        first = [self.waiting.popleft() for _ in range(min(count, len(self.waiting)))]
        return [self._chosen(first[worker::workers]) for worker in range(workers)]

    def unfinished(self, own: Groups) -> list[EpisodeRequest]:
        """Requests of what is not done of a worker's groups."""
        return _tasks({number: tasks for number, tasks in own.items() if number not in self.done})

    def lose(self, own: Groups) -> None:
        """Note the end of a worker that had these groups."""
        if not self.is_streamed:  # batches of fewer groups would be rounded differently
            for number in own:
                self.done.pop(number, None)

    def note(self, group: int, trajectories: list[Trajectory]) -> bool:
        """Note a group that is over; returns whether all others are to be aborted from now on."""
        self.done[group] = trajectories
        if self._progress is not None and group not in self._reported:
            self._progress(len(trajectories))
        self._reported.add(group)
        if self._enough is None or self.is_stopped:
            return False
        self.is_stopped = self._enough([episode for number in self.groups for episode in self.done.get(number, ())])
        return self.is_stopped

    def next_group(self) -> Groups | None:
        """A group for a worker that has finished one; None: there is none."""
        return self._chosen([self.waiting.popleft()]) if self.waiting else None

    def rest(self, workers: int) -> list[Groups]:
        """Groups that have not begun, by the worker that aborts them."""
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
        self._start: Start = in_ray or (lambda title, build, _: LocalProcess(title, build, on_gpu=is_own_gpu))
        self.servers: SglangEngine | None = None
        self._build = replace(WorkerSpec.of(policy, self._options), is_empty=True, adapter=None)
        self._scratch = Scratch()
        self._folder: Path | None = None
        self._sent_state: Hashable = None
        self.replaced = 0
        self._sets = self._number = self._lost = self._calls = 0
        self._seconds = 0.0  # of the rollouts since `take_metrics`
        self._looked = time.monotonic()
        self._events: queue.SimpleQueue[_Event | Exception] = queue.SimpleQueue()
        self._is_closed = self._has_weights = False
        self._slots: list[WorkerSlot] = []
        try:
            if options.rollout.engine == "sglang":
                self.servers = cast("SglangEngine", build_engine(policy, options.rollout, launcher))
            # All start at the same time.
            with ThreadPoolExecutor(self._count) as threads:
                starting = [threads.submit(self._start_worker, number) for number in range(self._count)]
            for number, begun in enumerate(starting):
                if begun.exception() is None:
                    self._slots.append(WorkerSlot(number, begun.result(), Watch(begun.result())))
            for begun in starting:
                begun.result()
        except BaseException:
            self.close()
            raise

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the workers, each on its machine."""
        return [slot.handle.pid for slot in self._slots]

    @property
    def cpu_seconds(self) -> float:
        """CPU-seconds of the workers, as of their last rollouts."""
        return sum(slot.handle.cpu_seconds + slot.earlier_cpu_seconds for slot in self._slots)

    def take_metrics(self) -> dict[str, float]:
        """Of the rollouts since the last call: the share in which each worker had nothing to do."""
        seconds, self._seconds = max(self._seconds, 1e-9), 0.0
        found = {f"perf/idle_share/worker_{slot.number}": max(0.0, 1.0 - slot.busy / seconds) for slot in self._slots}
        for slot in self._slots:
            slot.busy = 0.0
        return found

    def update_weights(self, weights: WeightSource | None, version: int) -> None:
        """Send the workers new weights; they drop everything computed with the old ones.

        Args:
            weights: None: those of the driver's model. Unchanged ones are not sent twice.

        Raises:
            WorkerError: a worker failed, or more were lost than `rollout.worker_restarts` allows.
        """
        before, source = self._folder, weights or WeightSource.of_model(self._policy.model)
        self._has_weights = True
        if self.servers is not None:
            self.servers.update_weights(source, version)
        elif (state := source.state()) != self._sent_state or self._folder is None:
            self._folder, self._sent_state = source.folder or self._write(source), state
        self.version = version
        self._lost = 0
        self._on_all(self._give_weights)
        if before is not None and before != self._folder:
            self._forget(before)

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
            WorkerError: as `update_weights`.
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

    def offload(self) -> None:
        """See `EngineControl`; the memory of workers is their own, that of servers is not."""
        if self.servers is not None:
            self.servers.offload()

    def close(self) -> None:
        """End the workers; a rollout in another thread fails."""
        self._is_closed = True
        self._events.put(WorkerError(_CLOSED))
        with ThreadPoolExecutor(self._count) as threads:  # all of them end at the same time
            for slot in self._slots:
                threads.submit(slot.handle.close)
        if self.servers is not None:
            self.servers.close()
        self._scratch.cleanup()

    def _roll_out(self, current: _Rollout) -> dict[int, list[Trajectory]]:
        """Trajectories by group, in the order of the tasks."""
        self._lost = 0
        for slot, share in zip(self._slots, current.shares(self._count), strict=True):
            slot.groups = share

        def begin(slot: WorkerSlot) -> int:
            given = (current.number, current.unfinished(slot.groups), current.settings, not current.waiting)
            call = self._begin_call(slot, "rollout_groups", *given, current.is_streamed, is_stream=True)
            if current.is_stopped:
                self._add(current, slot, {})
            return call

        for slot, times in self._on_all(begin, lambda slot: current.lose(slot.groups), partial(self._note, current)):
            slot.busy += times.busy
            slot.stuck = times.stuck
        for slot in self._slots:
            if slot.stuck:
                logger.warning("%s is replaced: %d environments hang in it", slot.handle.title, slot.stuck)
                self._restart(slot)
        return {number: current.done[number] for number in current.groups}

    def _note(self, current: _Rollout, slot: WorkerSlot, episodes: list[Trajectory]) -> None:
        """Note a group that is over; its worker gets another one, or all are told to stop."""
        if current.note(episodes[0].group_index, episodes):
            for other, left in zip(self._slots, current.rest(self._count), strict=True):
                self._add(current, other, left)
        elif (further := current.next_group()) is not None:
            self._add(current, slot, further)
            for other in self._slots if not current.waiting else ():
                if other is not slot:
                    self._add(current, other, {})

    def _add(self, current: _Rollout, slot: WorkerSlot, groups: Groups) -> None:
        """Give a worker further groups, and tell it whether they are all, and whether all stops."""
        slot.groups |= groups
        slot.handle.send("add_groups", current.number, _tasks(groups), not current.waiting, current.is_stopped)

    def _window(self, options: RolloutOptions, size: int) -> int | None:
        """Groups that a worker has at a time: as many as the servers have places for. None: all, in a fixed order.

        Args:
            size: episodes of a group.
        """
        if load_rollout_fn(options) is not rollout or options.engine == "transformers":
            return None
        places = options.server.concurrency * (len(options.server.urls) or options.server.count)
        return max(1, places // (size * self._count))

    # Workers.

    def _on_all(
        self,
        begin: Callable[[WorkerSlot], int],
        lose: Callable[[WorkerSlot], None] = lambda slot: None,
        note: Callable[[WorkerSlot, Any], None] = lambda slot, item: None,
    ) -> list[tuple[WorkerSlot, Any]]:
        """Have every worker answer a call; returns the results in order.

        Args:
            begin: begins the call of a worker, again if that is replaced; returns its number.
            lose: called when a worker is lost within its call.
            note: called with each item that a worker sends.

        Raises:
            WorkerError: a worker failed, more were lost than allowed, or this object is closed.
        """
        at_work = {slot.number: begin(slot) for slot in self._slots}
        results: dict[int, Any] = {}
        while at_work:
            slot, event = self._next()
            if isinstance(event.value, WorkerDied):
                self._replace(slot, event.value)
                if slot.number in at_work:
                    lose(slot)
                    at_work[slot.number] = begin(slot)
            elif at_work.get(slot.number) != event.call:  # of weights, or of a rollout that has failed
                continue
            elif event.is_over:
                del at_work[slot.number]
                results[slot.number] = event.value
            else:
                note(slot, event.value)
        return [(slot, results[slot.number]) for slot in self._slots]

    def _next(self) -> tuple[WorkerSlot, _Event]:
        """The next change in a call of a present worker.

        Raises:
            WorkerError: a worker failed, or this object is closed.
            Exception: a lost server was not brought back.
        """
        timeout = self._options.rollout.worker_timeout
        while True:
            self._look(timeout)
            try:
                event = self._events.get(timeout=None if timeout is None else timeout / _LOOKS)
            except queue.Empty:
                continue
            if self._is_closed:
                raise WorkerError(_CLOSED)
            if isinstance(event, Exception):
                raise event
            slot = next((slot for slot in self._slots if slot.handle is event.handle), None)
            if slot is None:  # of a process that was replaced
                continue
            if isinstance(event.value, Exception) and not isinstance(event.value, WorkerDied):
                raise event.value
            return slot, event

    def _look(self, timeout: float | None) -> None:
        """Find workers that hang."""
        if timeout is None or time.monotonic() - self._looked < timeout / _LOOKS:
            return
        self._looked = time.monotonic()
        for slot in self._slots:
            if slot.watch.standstill() > timeout:
                how = "been silent" if slot.watch.silence > timeout else "made no progress"
                cause = WorkerHangs(f"{slot.handle.title} hangs: it has {how} for {timeout:g} s.")
                self._events.put(_Event(slot.handle, 0, cause, is_over=True))

    def _begin_call(self, slot: WorkerSlot, method: str, *arguments: Any, is_stream: bool) -> int:
        """Call a method of a worker, and have all that becomes of it noted; returns the number of the call."""
        self._calls += 1
        call, handle = self._calls, slot.handle

        def each(item: Any) -> None:
            if isinstance(item, LostServer):  # its requests to this server wait meanwhile
                threading.Thread(target=self._bring_back, args=(handle, item), daemon=True).start()
            else:
                self._events.put(_Event(handle, call, item, is_over=False))

        future = handle.stream(method, *arguments, each=each) if is_stream else handle.call(method, *arguments)
        future.add_done_callback(
            lambda done: self._events.put(_Event(handle, call, done.exception() or done.result(), is_over=True))
        )
        return call

    def _start_worker(self, number: int) -> WorkerHandle:
        build = replace(self._build, gpu=None if self._first_gpu is None else self._first_gpu + number)
        handle = self._start(f"rollout worker {number + 1} of {self._count}", build, lambda: self._is_closed)
        handle.ended.add_done_callback(lambda done: self._events.put(_Event(handle, 0, done.exception(), is_over=True)))
        return handle

    def _replace(self, slot: WorkerSlot, cause: WorkerDied) -> None:
        """Start another worker in the place of one that was lost.

        Raises:
            WorkerError: more were lost than allowed.
        """
        allowed = self._options.rollout.worker_restarts
        self._lost += 1
        if self._lost > allowed:
            raise WorkerError(
                f"{cause} {allowed} rollout workers were replaced before (rollout.worker_restarts={allowed}); the same "
                "command continues from what is stored."
            ) from cause
        logger.warning("%s It is replaced (%d of %d).", cause, self._lost, allowed)
        self._restart(slot)

    def _restart(self, slot: WorkerSlot) -> None:
        self.replaced += 1
        slot.handle.close(patient=False)
        slot.earlier_cpu_seconds += slot.handle.cpu_seconds
        slot.handle, slot.stuck = self._start_worker(slot.number), 0
        slot.watch = Watch(slot.handle)
        if self._is_closed:  # meanwhile, by another thread
            slot.handle.close(patient=False)
            raise WorkerError(_CLOSED)
        self._give_weights(slot)

    # Weights and servers.

    def _give_weights(self, slot: WorkerSlot) -> int:
        """Have a worker take the present weights; returns the number of the call."""
        if not self._has_weights:
            return 0
        if self.servers is not None:
            given = self._options.rollout.server
            options = given.model_copy(update={"mode": "attach", "count": 1, "colocated": False})
            places = [self.servers.place_of(number) for number in range(len(self.servers.servers))]
            arguments = (options, given.api_key(), self.servers.tag, self.version, places)
            return self._begin_call(slot, "follow_servers", *arguments, is_stream=True)
        assert self._folder is not None
        try:
            folder = slot.handle.place(self._folder, _WEIGHT_FILES)
        except WorkerDied as error:
            self._events.put(_Event(slot.handle, 0, error, is_over=True))
            return 0
        return self._begin_call(slot, "load_weights", folder, self.version, self._device, is_stream=False)

    def _write(self, source: WeightSource) -> Path:
        """Write weights into a folder, each in the type in which an engine uses it."""
        self._sets += 1
        folder = self._scratch.path / str(self._sets)
        types = {name: str(dtype).removeprefix("torch.") for name, dtype in use_types(self._policy).items()}
        source.cast(types).write(folder, _FILE_BYTES)
        return folder

    def _forget(self, folder: Path) -> None:
        """Remove the copies of a folder of weights, and the folder if it was made here."""
        for slot in self._slots:
            with suppress(WorkerDied):
                slot.handle.clear(folder)
        if folder.is_relative_to(self._scratch.path):
            shutil.rmtree(folder, ignore_errors=True)

    def _bring_back(self, handle: WorkerHandle, lost: LostServer) -> None:
        """Bring back the server that a worker has found lost, and tell the worker."""
        assert self.servers is not None
        try:
            self.servers.bring_back(lost.server, lost.life, lost.reason)
            place = self.servers.place_of(lost.server)
        except Exception as error:  # raised by the rollout, which waits for the worker; it is no loss of a worker
            self._events.put(error)
            return
        with suppress(WorkerDied):  # of the worker, which is replaced
            handle.send("move_server", lost.server, lost.life, place).result()


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

        Call it once before a rollout, to drop the times of validations. Counters cover the time since the call before
        the previous one.
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
