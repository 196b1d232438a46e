"""What a handle promises, of a process of this machine and of one in a Ray cluster, whatever becomes of the process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from geo_sokoban_pipeline.config.ray import RayOptions
from geo_sokoban_pipeline.distributed.process import (
    InProcess,
    LocalProcess,
    Watch,
    WorkerDied,
    WorkerError,
    WorkerFailed,
    WorkerHandle,
    results_of,
)
from geo_sokoban_pipeline.distributed.ray_process import start_ray_processes
from rank_jobs import PATIENCE, Member, build, build_badly, close, die_while_building, run
from ray_cluster import joined
from servers import all_gone

pytestmark = pytest.mark.xdist_group("ranks")

PLACING = RayOptions(cpus=0.5, patience=60)
Start = Callable[[Callable[[], Any]], WorkerHandle]
slow = pytest.mark.slow


@pytest.fixture(params=["local", pytest.param("ray", marks=[slow, pytest.mark.ray])])
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    """Starts a process that builds what it is given; all of them end with the test."""
    started: list[WorkerHandle] = []

    def start_here(builder: Callable[[], Any]) -> WorkerHandle:
        started.append(LocalProcess("one", builder))
        return started[-1]

    def start_there(builder: Callable[[], Any]) -> WorkerHandle:
        started.append(start_ray_processes(["one"], "one with", PLACING)[0].build(builder))
        return started[-1]

    if request.param == "local":
        yield start_here
        close(started, patient=False)
    else:
        with joined(request.getfixturevalue("ray_cluster"), PLACING):
            yield start_there
            close(started, patient=False)


def died(handle: WorkerHandle, method: str, *arguments: Any) -> str:
    """Message of a call whose process ends."""
    with pytest.raises(WorkerDied) as caught:
        handle.call(method, *arguments).result(60)
    return str(caught.value)


def test_calls_come_in_order_and_others_beside_them(start: Start) -> None:
    handle = start(build)
    assert [handle.call("echo", number).result(60) for number in range(3)] == [0, 1, 2]
    items: list[int] = []
    counting, later = handle.stream("count", 1000, each=items.append), handle.call("echo", "later")
    assert handle.send("echo", "beside").result(60) == "beside"
    assert not counting.done() and not later.done()
    assert handle.send("release").result(60) == "released"
    assert (counting.result(60), later.result(60)) == ("freed", "later")
    assert items == list(range(1000)), "all of them, before the result"
    before = handle.cpu_seconds
    handle.call("work", 0.2).result(60)
    assert before < handle.cpu_seconds < before + 10


def test_asides_are_in_order_and_streams_do_not_mix(start: Start) -> None:
    handle = start(build)
    noted = [handle.send("note", number) for number in range(50)]
    assert noted[-1].result(60) == list(range(50))
    with pytest.raises(WorkerFailed, match="cannot pickle|not serializable|Could not serialize"):
        handle.stream("emit_lock", each=print).result(60)
    handle.send("release").result(60)
    items: list[list[int]] = [[], []]
    streams = [
        handle.stream("count", number, each=found.append) for number, found in zip((300, 200), items, strict=True)
    ]
    assert [stream.result(60) for stream in streams] == ["freed", "freed"]
    assert items == [list(range(300)), list(range(200))]


def test_a_failure_is_raised_with_its_traceback_and_the_process_goes_on(start: Start) -> None:
    handle = start(build)
    with pytest.raises(
        WorkerFailed, match=r"(?s)^one \(pid \d+[^)]*\) failed:.*Traceback.*ValueError: out of luck"
    ) as caught:
        handle.call("fail_then_sum", "raise").result(60)
    assert isinstance(caught.value.error, ValueError) and not caught.value.lost
    with pytest.raises(WorkerFailed, match="no attribute 'sing'"):
        handle.call("sing").result(60)
    with pytest.raises(WorkerFailed, match="no attribute 'sing'"):
        handle.send("sing").result(60)
    with pytest.raises(WorkerFailed, match="cannot pickle|not serializable|Could not serialize"):
        handle.call("echo_lock").result(60)
    assert handle.call("echo", 1).result(60) == 1


@pytest.mark.parametrize("builder", [build_badly, die_while_building])
def test_a_process_that_does_not_come_up_fails_all_its_calls(start: Start, builder: Callable[[], Any]) -> None:
    handle = start(builder)
    said = "no place to build on" if builder is build_badly else "ended"
    for call in (handle.ready, handle.call("echo", 1), handle.send("echo", 2), handle.stream("count", 1, each=print)):
        with pytest.raises(WorkerError, match=said):
            call.result(60)


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_the_end_of_a_process_fails_all_that_waits_for_it(start: Start, how: str) -> None:
    handle = start(build)
    handle.ready.result(60)
    items: list[int] = []
    streaming = handle.stream("count", 10, each=items.append)
    queued = handle.call("echo", 1)
    while len(items) < 10:
        time.sleep(0.01)
    os.kill(handle.pid, signal.SIGKILL) if how == "kill" else handle.send("fail_then_wait", "exit")
    for future in (streaming, queued, handle.ended):
        assert isinstance(future.exception(90), WorkerDied)
    assert re.match(
        r"one \(pid \d+[^)]*\) (ended with exit code (-9 \(SIGKILL\)|3)|has ended: )", died(handle, "echo", 2)
    )
    assert items == list(range(10))


def test_it_may_be_closed_from_another_thread_and_again(start: Start) -> None:
    handle = start(build)
    handle.ready.result(60)
    process = psutil.Process(handle.pid)
    working = handle.call("sleep", 600.0)
    closing_it = threading.Thread(target=handle.close, kwargs={"patient": False})
    closing_it.start()
    assert isinstance(working.exception(60), WorkerDied)
    closing_it.join(60)
    handle.close()
    assert "is closed" in died(handle, "echo", 1)
    assert all_gone([process], 60)


def test_one_that_hangs_or_is_silent_is_told_from_one_that_waits(start: Start) -> None:
    handle = start(build)
    handle.ready.result(60)
    watch = Watch(handle)

    def most(seconds: float) -> float:
        """The longest standstill in so many seconds, looked at every tenth of one."""
        until, found = time.monotonic() + seconds, 0.0
        while time.monotonic() < until:
            found = max(found, watch.standstill())
            time.sleep(0.1)
        return found

    assert most(0.8) < 0.5, "it has nothing to do"
    waits = handle.call("work", 0.8, True)
    assert most(0.7) < 0.5, "it waits for something that has a limit of its own"
    waits.result(60)
    works = handle.call("work", 0.8)
    assert most(0.7) < 0.5
    works.result(60)
    hangs = handle.call("sleep", 1.0)
    assert most(0.9) > 0.5 and watch.silence < 0.5
    assert hangs.result(60) == "awake"
    os.kill(handle.pid, signal.SIGSTOP)
    try:
        assert most(1.0) > 0.7 and watch.silence > 0.7
    finally:
        os.kill(handle.pid, signal.SIGCONT)


def test_it_is_flooded_and_floods(start: Start) -> None:
    """Neither side waits for the other, so that no two full buffers wait for each other."""
    handle = start(build)
    items: list[int] = []
    large = b"." * (1 << 20)
    counting = handle.stream("count", 5000, each=items.append)
    beside = [handle.send("echo", large) for _ in range(40)]
    later = [handle.call("echo", large) for _ in range(20)]
    assert all(one.result(120) == large for one in beside)
    handle.send("release").result(60)
    assert counting.result(120) == "freed" and len(items) == 5000
    assert all(one.result(120) == large for one in later)


# Of this machine alone.


def test_a_stopped_process_blocks_nobody() -> None:
    handle = LocalProcess("one", build)
    handle.ready.result(60)
    os.kill(handle.pid, signal.SIGSTOP)
    began = time.monotonic()
    calls = [handle.call("echo", b"." * (4 << 20)) for _ in range(8)]
    handle.close(patient=False)
    assert time.monotonic() - began < 30
    assert all(isinstance(call.exception(10), WorkerDied) for call in calls)


def test_a_process_with_a_gpu_is_no_fork() -> None:
    """A fork of a process whose libraries know a GPU cannot use it; the others are forks of a server."""
    with closing(LocalProcess("own", build, on_gpu=True)) as own, closing(LocalProcess("fork", build)) as fork:
        assert own.call("parent").result(60) == os.getpid()
        assert fork.call("parent").result(60) != os.getpid()


def test_a_process_has_the_surroundings_of_its_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also those that have changed since the first one was started; Ctrl-C is left to the driver."""
    with closing(LocalProcess("first", build)) as first:
        first.ready.result(60)
    monkeypatch.setenv("GEO_SOKOBAN_OF_A_TEST", "here")
    monkeypatch.chdir(tmp_path)
    with closing(LocalProcess("second", build)) as second:
        found = second.call("environment", "GEO_SOKOBAN_OF_A_TEST").result(60)
    assert found == ("here", str(tmp_path), [True, True])


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_the_end_of_a_process_ends_the_wait_in_a_collective_that_never_returns(how: str) -> None:
    handles: list[WorkerHandle] = [InProcess("process 1 of 3", Member())]
    handles += [LocalProcess(f"process {number} of 3", build) for number in (2, 3)]
    try:
        with pytest.raises(WorkerError, match="process 3 of 3"):
            run(handles, "fail_then_wait", [("",), ("",), (how,)])
    finally:
        for handle in reversed(handles[1:]):
            handle.close(patient=False)


def test_work_that_is_no_longer_wanted_ends_at_its_next_piece() -> None:
    handle = InProcess("own", Member())
    working = handle.call("work", 600.0)
    began = time.monotonic()
    handle.close(patient=False)
    assert time.monotonic() - began < 4
    assert working.exception(1) is not None
    with pytest.raises(WorkerDied, match="own is closed"):
        handle.call("echo", 1).result(1)


def test_who_is_called_with_items_may_fail() -> None:
    def fail(item: int) -> None:
        raise KeyError(item)

    with closing(LocalProcess("one", build)) as handle:
        counting = handle.stream("count", 3, each=fail)
        with pytest.raises(WorkerFailed, match="KeyError"):
            counting.result(60)
        with pytest.raises(WorkerFailed, match="KeyError"):
            handle.ended.result(60)


def test_the_cause_is_named_before_those_that_have_lost_a_rank() -> None:
    from concurrent.futures import Future

    lost, cause, fine = Future[Any](), Future[Any](), Future[Any]()
    lost.set_exception(WorkerFailed("lost", lost=True))
    fine.set_result(1)
    threading.Timer(0.2, cause.set_exception, [WorkerFailed("cause")]).start()
    with pytest.raises(WorkerFailed, match="cause"):
        results_of([fine, lost, cause], PATIENCE)
    never = Future[Any]()
    with pytest.raises(WorkerDied, match="lost"):
        results_of([never, lost], 0.2)
    assert results_of([fine, fine], PATIENCE) == [1, 1]


@slow
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_its_driver(sign: signal.Signals) -> None:
    """Nor does the server of the forks. Ctrl-C goes to all of them, and the driver alone shows it."""
    path = os.pathsep.join(sys.path)
    words = [sys.executable, str(Path(__file__).parents[1] / "rank_jobs.py")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    driver = subprocess.Popen(words, text=True, env={**os.environ, "PYTHONPATH": path}, **pipes)
    assert driver.stdout is not None
    busy = int(driver.stdout.readline())
    below = psutil.Process(driver.pid).children(recursive=True)
    assert busy in {process.pid for process in below}
    if sign == signal.SIGINT:
        os.killpg(driver.pid, sign)
    else:
        driver.send_signal(sign)
    _, errors = driver.communicate(timeout=60)
    assert errors.count("KeyboardInterrupt") == (sign == signal.SIGINT), errors
    _, left = psutil.wait_procs(below, timeout=60)
    assert left == []
