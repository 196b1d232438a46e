"""Worker groups: a warm start of two is that of one; failures are named; no worker outlives the driver."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from operator import attrgetter, methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch

import heap
from geo_sokoban_pipeline.distributed import process
from geo_sokoban_pipeline.distributed.process import WorkerError
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.progress import note_progress
from geo_sokoban_pipeline.training.sft import run_sft
from geo_sokoban_pipeline.training.worker import Worker
from geo_sokoban_pipeline.training.worker_group import open_worker_group
from open_workers import apply, open_group
from task_options import TrainOptions

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def options(train_options: TrainOptions) -> TrainOptions:
    small = {"max_turns": 4, "max_failed_share": 0.5}
    values = train_options.model_dump()
    return TrainOptions.model_validate({**values, "processes": 2, "rollout": {**values["rollout"], **small}})


@pytest.fixture(scope="module")
def rows(sokoban_rows: Callable[..., Rows]) -> Rows:
    return sokoban_rows(24, max_solution=3)


@pytest.mark.slow
def test_a_warm_start_of_two_processes_is_that_of_one(tiny_policy: Policy, options: TrainOptions, rows: Rows) -> None:
    # An odd number, so that the parts differ; fewer steps than would let rounding grow.
    warm = {"steps": 3, "episodes_per_step": 7, "validation_episodes": 4, "validate_every": 1, "play_every": 3}
    histories, weights = [], []
    for processes in (1, 2):
        policy = copy.deepcopy(tiny_policy)
        changes = {"warm_start": {**options.warm_start.model_dump(), **warm}, "processes": processes}
        changed = TrainOptions.model_validate({**options.model_dump(), **changes})
        with open_worker_group(policy, changed) as workers:
            histories.append(run_sft(policy, rows, rows[:4], changed, seed=0, workers=workers)[0])
        weights.append(dict(policy.model.named_parameters()))
    timing = {"seconds", "cpu_seconds"}
    one, two = ([{k: v for k, v in row.items() if k not in timing} for row in rows] for rows in histories)
    assert [pytest.approx(row, rel=1e-4) for row in one] == two
    assert len(one) == 3
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.skipif(not heap.GLIBC, reason="only glibc's heap is set, and old ones do not count what they map")
def test_a_child_is_prepared_as_its_parent_is(tiny_policy: Policy, options: TrainOptions) -> None:
    workers = open_group(copy.deepcopy(tiny_policy), options)
    try:
        jobs = (heap.map_large_block, heap.count_threads)
        mapped, threads = (apply(workers, heap.count_threads, job)[1] for job in jobs)
    finally:
        workers.close()
    assert mapped >= heap.BLOCK
    assert threads == torch.get_num_threads()


@pytest.mark.parametrize(
    ("is_killed", "message"),
    [
        (False, r"(?s)process 2 of 2.*Traceback.*no attribute 'sing'"),
        (True, r"process 2 of 2 \(pid \d+\) ended with exit code -9 \(SIGKILL\)"),
    ],
)
def test_a_child_that_fails_or_was_killed_is_named(
    tiny_policy: Policy, options: TrainOptions, is_killed: bool, message: str
) -> None:
    workers = open_group(copy.deepcopy(tiny_policy), options)
    workers.update_weights(1)
    if is_killed:
        os.kill(workers.process_ids[0], signal.SIGKILL)
    with pytest.raises(WorkerError, match=message):
        apply(workers, attrgetter("options"), methodcaller("sing"))
    with pytest.raises(WorkerError, match="closed"):
        workers.update_weights(2)


awake = threading.Event()  # so that the thread of this process ends


def rest(worker: Worker) -> None:
    """Do nothing for longer than a rank may stand still."""
    awake.wait(60)


def rest_shortly(worker: Worker) -> None:
    """Do nothing for longer than a rank may stand still alone."""
    time.sleep(3.5)


def work(worker: Worker) -> str:
    """Be busy for longer than a rank may stand still."""
    for _ in range(40):
        time.sleep(0.1)
        note_progress()
    return "done"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "named"),
    [
        (rest, r"process 1 of 2, process 2 of 2 .*"),
        (attrgetter("options"), r"^process 2 of 2 \(pid \d+\): "),  # a rank that has nothing to do hides no other
    ],
    ids=["both", "one"],
)
def test_ranks_that_do_not_get_on_count_as_lost(
    tiny_policy: Policy, options: TrainOptions, monkeypatch: pytest.MonkeyPatch, own: Any, named: str
) -> None:
    """But not one that waits for another one, which works."""
    monkeypatch.setattr(process, "ASKING", 0.5)
    workers = open_group(copy.deepcopy(tiny_policy), options.model_copy(update={"rank_timeout": 2.0}))
    if own is rest:
        assert apply(workers, rest_shortly, work) == [None, "done"]
    began = time.monotonic()
    with pytest.raises(WorkerError, match=named + r"apply has not got on for 2 s \(rank_timeout"):
        apply(workers, own, rest)
    assert time.monotonic() - began < 30
    assert not workers.is_open and workers.own is not None
    awake.set()
    workers.own.leave()


PARENT = """
import signal, sys, time
from task_options import TinyPolicyOptions, TrainOptions
from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
from geo_sokoban_pipeline.training.worker_group import WorkerGroup

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    workers = WorkerGroup(build_tiny_policy(TinyPolicyOptions(), seed=0), TrainOptions(processes=2, threads=1))
    workers.update_weights(1)
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_no_child_outlives_its_parent(tmp_path: Path) -> None:
    """Ctrl-C goes to all of them, and the driver alone shows it."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT, encoding="utf-8")
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    os.killpg(parent.pid, signal.SIGINT)
    # The pipe of its output closes when the last process that holds it has ended.
    _, errors = parent.communicate(timeout=60)
    assert errors.count("KeyboardInterrupt") == 1, errors
