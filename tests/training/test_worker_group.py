"""Worker groups: two processes compute what one does; failures of workers are named; none outlives the driver."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from operator import attrgetter, methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import heap
from geo_sokoban_pipeline.config.grpo import GrpoOptions, OptimizerOptions
from geo_sokoban_pipeline.grpo.loss import GrpoObjective
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.rollout.rollout import TooManyFailuresError, rollout
from geo_sokoban_pipeline.runs.storage import read_json
from geo_sokoban_pipeline.training.backends.torch import TorchBackend
from geo_sokoban_pipeline.training.batch import TrainSample, build_sample
from geo_sokoban_pipeline.training.checkpoint import compare_workers
from geo_sokoban_pipeline.training.sft import run_sft
from geo_sokoban_pipeline.training.worker_group import WorkerGroup, WorkerGroupError, open_worker_group
from geo_sokoban_pipeline.trajectories.types import Trajectory
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


def samples_of(episodes: list[Trajectory], policy: Policy) -> list[TrainSample]:
    rng = np.random.default_rng(0)
    made = [build_sample(episode, policy) for episode in episodes]
    return [TrainSample(**{**vars(s), "advantages": rng.normal(size=len(s.targets)).astype(np.float32)}) for s in made]


class Idle:
    """In place of the optimizers: a step leaves its gradients where they are."""

    def step(self, learning_rate: float) -> None: ...

    def clear_gradients(self) -> None: ...


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in policy.model.named_parameters()}


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


def test_gradients_of_two_processes_are_those_of_one(
    workers: WorkerGroup, shared_policy: Policy, tiny_policy: Policy, options: TrainOptions, rows: Rows
) -> None:
    alone, together = copy.deepcopy(tiny_policy), shared_policy
    episodes = rollout(build_engine(alone, options.rollout), alone, tasks(rows, 3), settings(options))
    samples = samples_of(episodes, alone)
    before = {name: weight.clone() for name, weight in together.model.named_parameters()}
    results = []
    for policy, helpers in ((alone, None), (together, workers)):
        backend = TorchBackend(policy, OptimizerOptions(), workers=helpers)
        optimizers, backend.optimizers = backend.optimizers, Idle()
        metrics = backend.step(samples, GrpoObjective(GrpoOptions()), 1e-2)
        results.append((metrics, gradients(policy), backend.log_probs(samples)))
        backend.optimizers = optimizers
        policy.model.zero_grad()
        for _ in range(2):
            backend.step(samples, GrpoObjective(GrpoOptions()), 1e-2)
        results[-1] += (backend.log_probs(samples),)
    with torch.no_grad():
        for name, weight in together.model.named_parameters():
            weight.copy_(before[name])
    (metrics, grads, scores, later), (metrics_2, grads_2, scores_2, later_2) = results
    assert metrics == pytest.approx(metrics_2, rel=TOLERANCE, abs=1e-7)
    whole = torch.cat([gradient.flatten() for gradient in grads.values()]).norm()
    for name, gradient in grads.items():
        assert (gradient - grads_2[name]).norm() <= TOLERANCE * whole, name
    np.testing.assert_allclose(np.concatenate(scores), np.concatenate(scores_2), atol=TOLERANCE)
    # The child has seen the optimizer's steps, or its scores would be the old ones.
    assert np.abs(np.concatenate(later) - np.concatenate(scores)).max() > 0.01
    np.testing.assert_allclose(np.concatenate(later), np.concatenate(later_2), atol=1e-3)


def test_the_childrens_time_is_counted(
    workers: WorkerGroup, shared_policy: Policy, options: TrainOptions, rows: Rows
) -> None:
    began, own = workers.cpu_clock(), time.process_time()
    engine = build_engine(shared_policy, options.rollout)
    workers.rollout(engine, shared_policy, tasks(rows, 4), settings(options))
    assert workers.cpu_clock() - began > 1.2 * (time.process_time() - own)


@pytest.mark.slow
def test_a_warm_start_of_two_processes_is_that_of_one(tiny_policy: Policy, options: TrainOptions, rows: Rows) -> None:
    # An odd number, so that the parts differ; fewer steps than would let rounding grow.
    warm = {"steps": 3, "episodes_per_step": 7, "validation_episodes": 4, "validate_every": 1, "play_every": 3}
    histories, weights = [], []
    for processes in (1, 2):
        policy = copy.deepcopy(tiny_policy)
        changes = {"warm_start": {**options.warm_start.model_dump(), **warm}, "processes": processes}
        changed = TrainOptions.model_validate({**options.model_dump(), **changes})
        histories.append(run_sft(policy, rows, rows[:4], changed, seed=0)[0])
        weights.append(dict(policy.model.named_parameters()))
    timing = {"seconds", "cpu_seconds"}
    one, two = ([{k: v for k, v in row.items() if k not in timing} for row in rows] for rows in histories)
    assert [pytest.approx(row, rel=1e-4) for row in one] == two
    assert len(one) == 3
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.skipif(not heap.GLIBC, reason="only glibc's heap is set, and old ones do not count what they map")
def test_a_child_is_prepared_as_its_parent_is(shared_policy: Policy, options: TrainOptions) -> None:
    workers = WorkerGroup(copy.deepcopy(shared_policy), options)
    try:
        mapped, threads = (workers.run(lambda: None, [job])[1] for job in (heap.map_large_block, heap.count_threads))
    finally:
        workers.close()
    assert mapped >= heap.BLOCK
    assert threads == torch.get_num_threads()


def test_an_exception_of_a_child_is_raised_here_with_its_traceback(
    shared_policy: Policy, options: TrainOptions
) -> None:
    workers = WorkerGroup(copy.deepcopy(shared_policy), options)
    with pytest.raises(WorkerGroupError, match=r"(?s)process 2 of 2.*Traceback.*no attribute 'sing'"):
        workers.broadcast(methodcaller("sing"))
    with pytest.raises(WorkerGroupError, match="closed"):
        workers.update_weights(1)


@pytest.mark.slow
def test_a_child_that_was_killed_is_named(shared_policy: Policy, options: TrainOptions) -> None:
    workers = WorkerGroup(copy.deepcopy(shared_policy), options)
    workers.update_weights(1)
    (child,) = workers._handles
    os.kill(child.process.pid, signal.SIGKILL)
    with pytest.raises(WorkerGroupError, match=r"process 2 of 2 \(pid \d+\) ended with exit code -9 \(SIGKILL\)"):
        workers.run(lambda: None, [attrgetter("expert")])


PARENT = """
import sys, time
from task_options import TinyPolicyOptions
from task_options import TrainOptions
from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
from geo_sokoban_pipeline.training.checkpoint import compare_workers
from geo_sokoban_pipeline.training.worker_group import WorkerGroup

if __name__ == "__main__":
    workers = WorkerGroup(build_tiny_policy(TinyPolicyOptions(), seed=0), TrainOptions(processes=2, threads=1))
    workers.update_weights(1)
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
def test_no_child_outlives_its_parent(tmp_path: Path, sign: signal.Signals) -> None:
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
    if sign is signal.SIGINT:
        os.killpg(parent.pid, sign)  # as a terminal does: to all of them
    else:
        os.kill(parent.pid, sign)
    # The pipe of its output closes when the last process that holds it has ended.
    _, errors = parent.communicate(timeout=60)
    assert errors.count("KeyboardInterrupt") == (1 if sign is signal.SIGINT else 0), errors


def test_processes_need_a_number_of_threads() -> None:
    with pytest.raises(ValueError, match="processes=2 needs threads"):
        TrainOptions(processes=2)


@pytest.mark.slow
def test_runs_of_two_processes_are_equal_and_continue_bit_for_bit(tmp_path: Path) -> None:
    command = (
        "--pipelines=train_sokoban",
        "--params=train_sokoban.processes=2,train_sokoban.loop.iterations=2,train_sokoban.grpo.kl_coefficient=0.01,"
        "train_sokoban.grpo.old_log_probs=recompute,train_sokoban.warm_start.steps=6",
    )
    finish(kedro_command(*command, data_root=tmp_path / "one"))
    killed = {"GEO_SOKOBAN_EXTRA_HOOKS": "kill_hook:KillHook", "GEO_SOKOBAN_KILL_AT": "iteration *: update"}
    process = kedro_command(*command, data_root=tmp_path / "two", **killed, GEO_SOKOBAN_KILL_NTH="2")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL, output[-3000:]
    assert "this run used" not in finish(kedro_command(*command, data_root=tmp_path / "two"))
    assert_same_run(read_run(tmp_path / "one"), read_run(tmp_path / "two"))
    manifests = list((tmp_path / "one" / "06_models").rglob("checkpoints/iter=*/manifest.json"))
    assert [read_json(path)["processes"] for path in manifests] == [2, 2]
    finish(kedro_command("--pipelines=update_sokoban", command[1], data_root=tmp_path / "one"))
    live, replayed = (read_run(tmp_path / "one", run)["weights"] for run in ("train_sokoban", "update_sokoban"))
    assert set(replayed) < set(live)
    assert {name: live[name] for name in replayed} == replayed


@pytest.mark.parametrize(
    ("manifest", "warned"),
    [
        ({}, []),
        ({"threads": 1, "processes": 2}, []),
        ({"threads": 1}, ["this run used 1 processes before and uses 2 now"]),  # of a version without the option
        ({"threads": 4, "processes": 2}, ["this run used 4 threads before and uses 1 now"]),
    ],
)
def test_other_numbers_than_before_are_said(
    manifest: dict[str, int], warned: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    compare_workers(manifest, {"threads": 1, "processes": 2})
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == warned
