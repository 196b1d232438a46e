"""Worker groups: two processes compute what one does; one that is lost or stands still is named."""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.peer.setting import describe_heap

from geo_sokoban_pipeline.config.grpo import OptimizerOptions
from geo_sokoban_pipeline.distributed import process
from geo_sokoban_pipeline.distributed.process import WorkerDied, WorkerError
from geo_sokoban_pipeline.events import Event
from geo_sokoban_pipeline.policies.policy import Policy, save_policy
from geo_sokoban_pipeline.progress import note_progress
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.rollout.engines.transformers import SlotKvCache
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.rollout.rollout import TooManyFailuresError, rollout
from geo_sokoban_pipeline.runs.storage import read_json
from geo_sokoban_pipeline.training.backend import build_backend
from geo_sokoban_pipeline.training.grpo_loop import trainers_turn
from geo_sokoban_pipeline.training.runtime import Stopwatch
from geo_sokoban_pipeline.training.sft import run_sft
from geo_sokoban_pipeline.training.worker import Worker
from geo_sokoban_pipeline.training.worker_group import WorkerGroup, load_driver_policy, open_worker_group
from kill_hook import kill_at
from open_workers import apply, apply_on_all, open_group
from runs import assert_same_run, finish, kedro_command, read_run
from task_options import TrainOptions

# Sums of a few hundred float32 terms in another order.
TOLERANCE = 1e-5
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def options(train_options: TrainOptions) -> TrainOptions:
    small = {"max_turns": 4, "max_failed_share": 0.5}
    values = train_options.model_dump()
    return TrainOptions.model_validate({**values, "processes": 2, "rollout": {**values["rollout"], **small}})


@pytest.fixture(scope="module")
def rows(sokoban_rows: Callable[..., Rows]) -> Rows:
    return sokoban_rows(24, max_solution=3)


# First those with a group of their own: a process is in one at a time.


def describe(worker: Worker) -> tuple[str, int]:
    """Where this process's large blocks lie, and its threads of torch."""
    return describe_heap(), torch.get_num_threads()


def cached_rows(worker: Worker) -> int:
    """Rows of keys and values that this process's engines hold."""
    gc.collect()
    return sum(one.allocated_rows for one in gc.get_objects() if type(one) is SlotKvCache)


def test_a_child_is_prepared_as_its_parent_is_frees_its_caches_and_is_named_when_it_is_killed(
    tiny_policy: Policy, options: TrainOptions, rows: Rows
) -> None:
    policy = copy.deepcopy(tiny_policy)
    group = open_group(policy, options)
    assert apply_on_all(group, describe)[1] == ("blocks of 8 MiB outside the heap", torch.get_num_threads())
    engine = build_engine(policy, options.rollout)
    group.rollout(engine, policy, tasks(rows, 2), settings(options, version=0))
    assert min(apply_on_all(group, cached_rows)) > 0
    with trainers_turn(engine, build_backend(policy, options.optimizer), options, Stopwatch(), group):
        assert apply_on_all(group, cached_rows) == [0, 0]
    os.kill(group.process_ids[0], signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"process 2 of 2 \(pid \d+\) ended with exit code -9 \(SIGKILL\)"):
        apply_on_all(group, describe)
    with pytest.raises(WorkerError, match="closed"):
        group.update_weights(2)


def test_a_rank_that_dies_in_a_turn_is_not_hidden_by_its_closed_group() -> None:
    """Else it would not be built anew."""

    class Closed:
        def onload(self) -> None:
            pass

        def offload(self) -> None:
            raise WorkerError("this worker group is closed.")

    given: dict[str, Any] = {"engine": "sglang", "server": {"colocated": True}}
    options = TrainOptions.model_validate({"rollout": given, "threads": 1})
    engine, backend = SimpleNamespace(offload=lambda: None), Closed()
    with pytest.raises(WorkerDied), trainers_turn(engine, backend, options, Stopwatch(), None):  # type: ignore[arg-type]
        raise WorkerDied("process 2 of 2 ended")


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


# Those that share one.


@pytest.fixture(scope="module")
def shared_policy(tiny_policy: Policy) -> Policy:
    """The policy whose weights the worker group shares."""
    return copy.deepcopy(tiny_policy)


@pytest.fixture(scope="module")
def workers(shared_policy: Policy, options: TrainOptions) -> Iterator[WorkerGroup]:
    with open_worker_group(shared_policy, options) as opened:
        assert opened is not None
        yield opened


def tasks(rows: Rows, groups: int) -> list[EpisodeRequest]:
    return [
        EpisodeRequest(f"g{group}/s{sample}", rows[group], group, sample, seed=100 * group + sample)
        for group in range(groups)
        for sample in range(4)
    ]


def settings(options: TrainOptions, version: int = 3) -> RolloutSettings:
    return RolloutSettings(
        options.env, options.reward, options.rollout, options.rollout.sampling, 0, "sokoban", version=version
    )


@pytest.mark.parametrize("groups", [5, 1, 0])  # with one group the child gets nothing
def test_two_processes_play_as_one(
    workers: WorkerGroup, shared_policy: Policy, tiny_policy: Policy, options: TrainOptions, rows: Rows, groups: int
) -> None:
    alone, together = (build_engine(policy, options.rollout) for policy in (tiny_policy, shared_policy))
    for engine in (alone, together):
        engine.update_weights(None, 3)
    workers.update_weights(3)
    ended: list[int] = []
    expected = rollout(alone, tiny_policy, tasks(rows, groups), settings(options))
    played = workers.rollout(together, shared_policy, tasks(rows, groups), settings(options), ended.append)
    assert sum(ended) == len(expected) == 4 * groups
    for one, other in zip(expected, played, strict=True):
        assert one.trajectory_id == other.trajectory_id
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert (one.reward, one.weight_spans, one.images) == (other.reward, other.weight_spans, other.images)
        np.testing.assert_allclose(one.rollout_log_probs, other.rollout_log_probs, atol=TOLERANCE)


def test_too_many_failures_are_counted_over_all_episodes(
    workers: WorkerGroup, shared_policy: Policy, options: TrainOptions, rows: Rows
) -> None:
    broken = {**rows[0], "prompt": None}
    engine = build_engine(shared_policy, options.rollout)
    # All episodes of the child fail, but half of all are allowed to.
    played = workers.rollout(engine, shared_policy, tasks([rows[0], broken], 2), settings(options))
    assert [episode.status == "failed" for episode in played] == [False] * 4 + [True] * 4
    with pytest.raises(TooManyFailuresError, match="8 of 12 episodes failed"):
        workers.rollout(engine, shared_policy, tasks([rows[0], broken, broken], 3), settings(options))


def test_copies_that_have_come_apart_are_not_saved(shared_policy: Policy, workers: WorkerGroup, tmp_path: Path) -> None:
    backend = build_backend(shared_policy, OptimizerOptions(), workers=workers)
    backend.export(tmp_path / "equal")
    weight = shared_policy.model.lm_head.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] += 1
    try:
        with pytest.raises(WorkerError, match="weights of process 2 differ"):
            backend.export(tmp_path / "apart")
    finally:
        with torch.no_grad():
            weight.copy_(before)
    assert not (tmp_path / "apart").exists()
    backend.export(tmp_path / "again")


def test_the_childrens_time_is_counted(
    workers: WorkerGroup, shared_policy: Policy, options: TrainOptions, rows: Rows
) -> None:
    began, own = workers.cpu_clock(), time.process_time()
    engine = build_engine(shared_policy, options.rollout)
    workers.rollout(engine, shared_policy, tasks(rows, 4), settings(options))
    assert workers.cpu_clock() - began > 1.2 * (time.process_time() - own)


def test_every_process_needs_a_gpu_of_its_own(
    shared_policy: Policy, options: TrainOptions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_policy(shared_policy, tmp_path)
    chosen = options.policy.model_copy(update={"device": "cuda"})
    on_gpus = options.model_copy(update={"policy": chosen, "sharding": "full"})
    empty = load_driver_policy(on_gpus, tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"processes=2 with the policy on cuda: each takes a GPU .* there are 1\."):
        WorkerGroup(empty, on_gpus)


@pytest.mark.slow
def test_runs_of_two_processes_are_equal_and_continue_bit_for_bit(tmp_path: Path) -> None:
    command = (
        "--pipelines=train_sokoban",
        "--params=train_sokoban.processes=2,train_sokoban.loop.iterations=2,train_sokoban.grpo.kl_coefficient=0.01,"
        "train_sokoban.grpo.old_log_probs=recompute,train_sokoban.warm_start.steps=4,"
        # Other estimators than those of the runs of one process.
        "train_sokoban.grpo.advantage=gigpo,train_sokoban.grpo.loss=gmpo,train_sokoban.grpo.importance=masked",
    )
    loop = "--to-nodes=train_sokoban.train_grpo"
    finish(kedro_command(*command, loop, data_root=tmp_path / "one"))
    killed = kill_at(f"{Event.UPDATE}:*", 2)
    finish(kedro_command(*command, loop, data_root=tmp_path / "two", **killed), -signal.SIGKILL)
    assert "another layout" not in finish(kedro_command(*command, loop, data_root=tmp_path / "two"))
    assert_same_run(read_run(tmp_path / "one"), read_run(tmp_path / "two"))
    manifests = list((tmp_path / "one" / "06_models").rglob("checkpoints/iter=*/manifest.json"))
    assert [read_json(path)["layout"]["processes"] for path in manifests] == [2, 2]
    finish(kedro_command("--pipelines=update_sokoban", command[1], data_root=tmp_path / "one"))
    live, replayed = (read_run(tmp_path / "one", run)["weights"] for run in ("train_sokoban", "update_sokoban"))
    assert set(replayed) < set(live)
    assert {name: live[name] for name in replayed} == replayed
