"""Workers, pool and grader: time limits, deadlines, ends of processes, one grade for equal texts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest

from geo_sokoban_pipeline.rewards import grade_answer
from geo_sokoban_pipeline.rewards.math_answer import Grade, Grader, GradingPool, GradingWorkerError, prepare_grade
from geo_sokoban_pipeline.rewards.math_answer.pool import TIME_LIMIT, WorkerProcess
from geo_sokoban_pipeline.rewards.math_answer.verdict import Differences, Equivalence
from grading import grade_all

SOURCE = Path(__file__).parents[3] / "src"
ALGEBRA = ("\\boxed{2y + y^2}", "y(y+2)")  # graded by algebra


def bomb(number: int) -> Differences:
    """A question that algebra does not finish in minutes."""
    return Differences((f"((x+y+{number})**99*(x-y)**99*(x+3*y)**99)-(y)",))


@pytest.fixture
def worker():
    process = WorkerProcess()
    yield process
    process.stop()


def wait_until(condition, seconds: float = 300.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def is_gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has not been waited for and is not gone."""
    return not psutil.pid_exists(pid)


@pytest.mark.slow
def test_worker_that_takes_too_long_or_dies_fails_its_question_only(worker):
    worker.start()
    first = worker.pid
    start = time.monotonic()
    assert worker.ask(bomb(1), 1.0) == "timeout"
    assert time.monotonic() - start < 1.5
    assert worker.pid is None and is_gone(first)
    assert worker.ask(Equivalence("x+1", "1+x"), 60) == "yes"
    second = worker.pid
    assert second not in (None, first)
    assert worker.ask(Equivalence("x+1", "x"), 60) == "no"
    assert worker.pid == second
    threading.Timer(0.3, os.kill, (second, signal.SIGKILL)).start()
    assert worker.ask(bomb(1), 60) == "failed"
    assert worker.ask(Equivalence("x+1", "x"), 60) == "no"


def test_worker_that_cannot_start_says_why(worker, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(GradingWorkerError, match="no grading worker: it ended"):
        worker.ask(Equivalence("x", "x"), 1)
    assert worker.pid is None


@pytest.mark.slow
@pytest.mark.parametrize(("method", "power", "label"), [("default", "^{99}", "xy"), ("slime_exact", "**99", "x y")])
def test_batch_of_bombs_ends_by_its_deadline(method, power, label):
    assert TIME_LIMIT < 3
    pairs = [(f"\\boxed{{(x+y+{n}){power}(x-y){power}*(x+3y){power}}}", label) for n in range(512)]
    with GradingPool(time_limit=0.5) as pool:
        grader = Grader(method, pool=pool)
        start = time.monotonic()
        grades = grade_all(grader, pairs, patience=2.5)
        assert time.monotonic() - start < 8  # one after the other they would take minutes
        assert {(grade.correct, grade.rule) for grade in grades} == {(False, "timeout")}
        assert [grade.extracted for grade in grades] == [pair[0][7:-1] for pair in pairs]
        start = time.monotonic()
    assert time.monotonic() - start < 5


def test_a_worker_that_does_not_start_holds_nobody_up(monkeypatch, tmp_path):
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 600\n")
    silent.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(silent))
    with GradingPool(workers=1) as pool:
        start = time.monotonic()
        futures = [pool.submit(bomb(number), start + seconds) for number, seconds in enumerate((0.4, 0.8, -1))]
        assert futures[0].result(timeout=30) == "late"
        assert 0.4 <= time.monotonic() - start < 10
        assert [future.result(timeout=30) for future in futures] == ["late"] * 3
        assert 0.8 <= time.monotonic() - start < 10
        assert len(pool.worker_pids) == 1


@pytest.mark.slow
def test_a_worker_goes_on_starting_for_the_next_question():
    with GradingPool(workers=1, time_limit=60) as pool:
        assert pool.submit(Equivalence("x+1", "1+x"), time.monotonic() + 0.1).result(timeout=30) == "late"
        (pid,) = pool.worker_pids
        assert pool.submit(Equivalence("x+1", "1+x"), time.monotonic() + 300).result() == "yes"
        assert pool.worker_pids == [pid]


@pytest.mark.slow
def test_bombs_do_not_keep_the_others_from_their_grades():
    with GradingPool(workers=1, time_limit=30) as pool:
        grader = Grader(pool=pool)
        pairs = [("\\boxed{9**9**9**9}", "13"), ALGEBRA, ("\\boxed{(x+1)^{200}}", "13"), ("\\boxed{13}", "13")] * 128
        grades = grade_all(grader, pairs, patience=600)
        assert [grade.correct for grade in grades] == [False, True, False, True] * 128


@pytest.mark.slow
def test_equal_texts_are_graded_once(monkeypatch):
    asked = []
    ask = WorkerProcess.ask
    monkeypatch.setattr(WorkerProcess, "ask", lambda self, *words: asked.append(words) or ask(self, *words))
    with GradingPool(workers=2, time_limit=60) as pool:
        grader = Grader(pool=pool)
        assert all(grade.correct for grade in grade_all(grader, [ALGEBRA] * 100, patience=600))
        assert grader.grade(f"so {ALGEBRA[0]}", ALGEBRA[1]).correct
        assert len(asked) == 1
        assert not grader.grade(ALGEBRA[0], "y(y+3)").correct
        assert len(asked) == 2


@pytest.mark.slow
def test_threads_and_event_loops_share_a_grader():
    with GradingPool(time_limit=60) as pool:
        grader = Grader(pool=pool)
        pairs = [(f"\\boxed{{{n} + y}}", f"y + {n % 2}") for n in range(4)] * 8

        async def grade_in_loop() -> list[Grade]:
            futures = [grader.submit(*pair, patience=600) for pair in pairs]
            return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))

        with ThreadPoolExecutor(8) as threads:
            from_threads = list(threads.map(lambda pair: grader.grade(*pair, patience=600), pairs))
        assert from_threads == asyncio.run(grade_in_loop()) == grade_all(grader, pairs, patience=600)
        assert [grade.correct for grade in from_threads[:4]] == [True, True, False, False]


def test_a_failed_grade_is_final():
    """Environment and reward grade the same answer one after the other; the machine may have recovered in between."""
    bomb_and_label = ("\\boxed{(x+y+3)^{99}(x-y)^{99}*(x+3y)^{99}}", "xy")
    with GradingPool(workers=1, time_limit=60) as pool:
        grader = Grader(pool=pool)
        assert grader.grade(*ALGEBRA, patience=600).correct  # a worker is up
        first = grader.submit(*bomb_and_label, patience=600)
        (pid,) = pool.worker_pids
        os.kill(pid, signal.SIGKILL)
        assert first.result(timeout=60).rule == "failed"
        assert grader.submit(*bomb_and_label) is first


def test_handing_in_does_not_block_and_late_answers_are_remembered_for_as_long_again():
    with GradingPool(time_limit=60) as pool:  # a worker takes longer to start
        grader = Grader(pool=pool)
        start = time.monotonic()
        first = grader.submit(*ALGEBRA, patience=0.5)
        assert time.monotonic() - start < 0.4
        assert first.result(timeout=30) == Grade(False, "timeout", "2y + y^2")
        assert grader.submit(*ALGEBRA) is first
        assert wait_until(lambda: grader.submit(*ALGEBRA) is not first, 30)
        assert wait_until(lambda: grader.grade(*ALGEBRA).correct)


@pytest.mark.slow
def test_close_ends_workers_and_cancels_what_waits():
    pool = GradingPool(workers=1, time_limit=60)
    futures = [pool.submit(bomb(n), time.monotonic() + 60) for n in range(3)]
    assert wait_until(lambda: pool.worker_pids != [])
    (pid,) = pool.worker_pids
    start = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - start < 10
    assert is_gone(pid)
    assert futures[-1].cancelled()
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(bomb(1), time.monotonic())


def test_nothing_starts_before_it_is_needed():
    with GradingPool() as pool:
        grader = Grader(pool=pool)
        assert grader.grade("\\boxed{13}", "13").correct
        assert not grader.grade("\\boxed{1000000!}", "13").correct
        assert pool.worker_pids == []


PARENT = """
import json, sys, time
from geo_sokoban_pipeline.rewards.math_answer import GradingPool
from geo_sokoban_pipeline.rewards.math_answer.verdict import Differences
pool = GradingPool(workers=2, time_limit=60)
def ask(*texts):
    return [pool.submit(Differences((text,)), time.monotonic() + 60) for text in texts]
if sys.argv[1] == "busy":
    assert [answer.result() for answer in ask("(x+1)-(1+x)", "(x+2)-(2+x)")] == ["yes"] * 2
ask(*(f"((x+y+{number})**99*(x-y)**99*(x+3*y)**99)-(y)" for number in range(2)))
while len(pool.worker_pids) < 2:
    time.sleep(0.05)
print(json.dumps(pool.worker_pids), flush=True)
time.sleep(600 if sys.argv[2] == "killed" else 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "how"), [("starting", "killed"), ("busy", "killed"), ("busy", "ends")])
def test_workers_end_with_their_parent(workers, how):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    words = [sys.executable, "-c", PARENT, workers, how]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        pids = json.loads(parent.stdout.readline())
        assert len(pids) == 2
        if how == "killed":
            parent.send_signal(signal.SIGKILL)
        parent.wait(timeout=60)
    assert wait_until(lambda: all(is_gone(pid) or _is_zombie(pid) for pid in pids))


def _is_zombie(pid: int) -> bool:
    """Orphans are reaped by process 1, which in a container may not do so."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(
    ("make", "words", "message"),
    [
        (
            partial(grade_answer, "", ""),
            {"grader": "strict"},
            "grader='strict': must be one of default, slime_exact, deepscaler, geo3k",
        ),
        (partial(grade_answer, "", ""), {"tolerance": -1.0}, "tolerance=-1.0"),
        (partial(grade_answer, "", ""), {"tolerance": float("nan")}, "tolerance=nan"),
        (
            partial(grade_answer, "", ""),
            {"grader": "slime_exact", "tolerance": 0.05},
            "tolerance=0.05: slime_exact has none",
        ),
        (
            partial(grade_answer, "", ""),
            {"grader": "deepscaler", "tolerance": 0.05},
            "tolerance=0.05: deepscaler has none",
        ),
        (GradingPool, {"workers": 0, "time_limit": 1.0}, "workers=0"),
        (GradingPool, {"workers": 1, "time_limit": 0.0}, "time_limit=0.0"),
    ],
)
def test_arguments_that_cannot_be_used(make, words, message):
    with pytest.raises(ValueError, match=message):
        make(**words)


def test_one_call():
    assert grade_answer("\\boxed{ 5.0 }", "5") == Grade(True, "numeric", "5.0")
    assert grade_answer(None, "5") == Grade(False, "no_box", None)
    assert grade_answer("\\boxed{\\frac{8}{15}}", "0.53", grader="geo3k", tolerance=0.05).extracted == "\\frac{8}{15}"
    prepare_grade("\\boxed{5}", "5")


FORK = """
import os
from geo_sokoban_pipeline.rewards import grade_answer
pair = ("\\\\boxed{2y + y^2}", "y(y+2)")
def correct():
    for _ in range(20):
        if grade_answer(*pair).correct:
            return True
assert correct()
child = os.fork()
if child == 0:
    os._exit(0 if correct() else 1)
assert os.waitpid(child, 0)[1] == 0
assert correct()
"""


@pytest.mark.slow
def test_forked_children_grade_with_workers_of_their_own():
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    subprocess.run([sys.executable, "-c", FORK], check=True, env=environment, timeout=300)


def test_package_imports_no_algebra():
    code = "import sys; import geo_sokoban_pipeline.rewards; print([n for n in sys.argv[1:] if n in sys.modules])"
    words = [sys.executable, "-c", code, "sympy", "math_verify", "torch", "kedro"]
    done = subprocess.run(
        words, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(SOURCE)}
    )
    assert json.loads(done.stdout.replace("'", '"')) == []
