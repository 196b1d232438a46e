"""The loop in this process: variants of GRPO, refills, stop without signal, and what a chunk holds."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import numpy as np
import pytest
import torch

from geo_sokoban_pipeline.grpo.scoring import is_solved
from geo_sokoban_pipeline.pipelines.train.nodes import train_grpo
from geo_sokoban_pipeline.policies.policy import Policy, load_policy
from geo_sokoban_pipeline.policies.preparing import policy_writer
from geo_sokoban_pipeline.runs.policy_folder import PolicyFolder, write_policy
from geo_sokoban_pipeline.runs.storage import Complete, Rewind
from geo_sokoban_pipeline.training.backends.torch import TorchBackend
from geo_sokoban_pipeline.training.grpo_loop import RunInputs, run_grpo, update_policy
from geo_sokoban_pipeline.training.sft import run_sft
from geo_sokoban_pipeline.trajectories.types import Trajectory, table_to_trajectories
from task_options import TrainOptions
from training.setup import by_iteration

NOTHING_STORED = {"iteration": -1, "dir": None, "manifest": None, "complete": None, "stored": []}
SMALL = {
    "warm_start": {"steps": 12, "episodes_per_step": 8, "validation_episodes": 4, "learning_rate": 0.003},
    "rollout": {"max_turns": 3},
    "grpo": {"groups": 4, "group_size": 4, "groups_per_step": 2},
    "optimizer": {"warmup_iterations": 0, "schedule_iterations": 2},
    "loop": {"iterations": 1, "eval_interval": 0},
}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for name, value in changes.items():
        both = isinstance(value, dict) and isinstance(result.get(name), dict) and name != "rewards"
        result[name] = merged(result[name], value) if both else value
    return result


@pytest.fixture(scope="module")
def rows(sokoban_rows: Any) -> list[dict[str, Any]]:
    return sokoban_rows(48, max_solution=3)


@pytest.fixture(scope="module")
def start(
    tiny_policy: Policy,
    rows: list[dict[str, Any]],
    train_options: TrainOptions,
    tmp_path_factory: pytest.TempPathFactory,
) -> PolicyFolder:
    """A policy that knows the form of a response."""
    import copy

    policy = copy.deepcopy(tiny_policy)
    run_sft(policy, rows, rows, TrainOptions.model_validate(merged(train_options.model_dump(), SMALL)), seed=0)
    return write_policy(tmp_path_factory.mktemp("start") / "policy", policy_writer(policy, {}))


def run(
    start: PolicyFolder, rows: list[dict[str, Any]], base: TrainOptions, **changes: Any
) -> list[tuple[dict[str, Any], ...]]:
    options = TrainOptions.model_validate(merged(merged(base.model_dump(), SMALL), changes))
    inputs = RunInputs("train_sokoban", 0, options, {}, start, rows, rows[:8])
    return list(by_iteration(run_grpo(inputs, NOTHING_STORED)))


def episodes(chunks: list[tuple[dict[str, Any], ...]]) -> list[Trajectory]:
    return [e for chunk in chunks[1:] for table in chunk[0].values() for e in table_to_trajectories(table)]


def test_the_node_streams() -> None:
    assert inspect.isgeneratorfunction(train_grpo)


def test_chunks_hold_an_iteration_each(start: PolicyFolder, rows: Any, train_options: TrainOptions) -> None:
    chunks = run(start, rows, train_options, loop={"iterations": 2, "eval_interval": 1, "eval_prompts": 4})
    rewind, first, second, done = chunks
    assert rewind == (Rewind(-1),) * 4
    assert [set(part) for part in first[:3]] == [
        {"iter=00000/part-000"},
        {"iter=00000/part-000", "iter=00001/part-000"},
        {"iter=00000"},
    ]
    assert set(second[1]) == {"iter=00002/part-000"}
    row = first[2]["iter=00000"]
    assert {"eval/start/sampled_solve_rate", "eval/validation/sampled_solve_rate"} <= set(row)
    assert not any(name.startswith("eval/start/") for name in second[2]["iter=00001"])
    assert set(first[3]) == {"iter=00000"}
    assert done == ({}, {}, {}, Complete(2))
    played = episodes(chunks)
    assert {episode.policy_version for episode in played} == {0, 1}
    assert len({episode.trajectory_id for episode in played}) == len(played) == 2 * 4 * 4


def test_episodes_come_before_metrics_and_checkpoint(
    start: PolicyFolder, rows: Any, train_options: TrainOptions
) -> None:
    options = TrainOptions.model_validate(merged(train_options.model_dump(), SMALL))
    chunks = list(run_grpo(RunInputs("train_sokoban", 0, options, {}, start, rows, rows[:8]), NOTHING_STORED))
    filled = [["" if part == {} else type(part).__name__ for part in chunk] for chunk in chunks]
    assert filled == [["Rewind"] * 4, ["dict", "", "", ""], ["", "", "dict", "dict"], ["", "", "", "Complete"]]


def test_first_step_is_on_policy(start: PolicyFolder, rows: Any, train_options: TrainOptions) -> None:
    grpo = {"old_log_probs": "recompute", "importance_cap": 2.0, "groups_per_step": None, "filter": "none"}
    grpo |= {"credit": "episode", "normalize": "std", "reduction": "sample_mean", "entropy_coefficient": 0.0}
    chunks = run(start, rows, train_options, grpo=grpo)
    row = chunks[1][2]["iter=00000"]
    assert row["train/ppo_kl"] < 1e-8
    assert row["train/pg_clipfrac"] == 0.0
    assert abs(row["train/loss"]) < 1e-5
    assert row["train/train_rollout_logprob_abs_diff"] < 1e-4
    assert all(episode.old_log_probs is not None for episode in episodes(chunks) if episode.trained)


def test_kl_uses_the_warm_start_policy(start: PolicyFolder, rows: Any, train_options: TrainOptions) -> None:
    grpo = {"kl_coefficient": 0.1, "filter": "none", "passes": 2}
    chunks = run(start, rows, train_options, grpo=grpo, optimizer={"learning_rate": 0.01})
    trained = [episode for episode in episodes(chunks) if episode.trained]
    assert trained
    for episode in trained:
        mask = episode.loss_mask == 1
        # Nothing had been trained when they were played, so the reference is the policy itself.
        np.testing.assert_allclose(episode.ref_log_probs[mask], episode.rollout_log_probs[mask], atol=1e-4)
    assert chunks[1][2]["iter=00000"]["train/kl_loss"] > 0


def test_order_of_later_passes_is_of_the_run_seed(start: PolicyFolder, rows: Any, train_options: TrainOptions) -> None:
    played = [e for e in episodes(run(start, rows, train_options, grpo={"filter": "none"})) if e.trained]
    grpo = train_options.grpo.model_copy(update={"passes": 3, "groups_per_step": 1})

    def train(seed: int) -> dict[str, Any]:
        policy = load_policy(start.path)
        backend = TorchBackend(policy, train_options.optimizer)
        update_policy(played, policy, backend, grpo, train_options.optimizer, 0, seed)
        return dict(backend.iter_weights())

    first, again, other = train(0), train(0), train(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_filter_refills_within_its_bound(start: PolicyFolder, rows: Any, train_options: TrainOptions) -> None:
    chunks = run(start, rows, train_options, grpo={"filter": "mixed_success", "min_groups": 0, "max_refill": 3.0})
    played = episodes(chunks)
    groups = sorted({episode.group_index for episode in played})
    assert groups == list(range(len(groups)))
    assert 4 < len(groups) <= 12
    for group in groups:
        members = [episode for episode in played if episode.group_index == group]
        mixed = len({is_solved(episode) for episode in members}) == 2
        assert all(episode.trained == mixed for episode in members)


def test_no_signal_commits_without_an_update(
    start: PolicyFolder, rows: Any, train_options: TrainOptions, caplog: pytest.LogCaptureFixture
) -> None:
    # A limit of one token ends every episode at its first one: nothing is solved, so no group is mixed.
    with caplog.at_level(logging.WARNING):
        chunks = run(start, rows, train_options, grpo={"min_groups": 0}, rollout={"max_tokens_per_turn": 1})
    row = chunks[1][2]["iter=00000"]
    assert row["train/steps"] == 0.0
    assert "iter=00000" in chunks[1][3]
    assert caplog.text.count("no group to train on") == 1
    assert "iterations trained nothing" in caplog.text
    assert {episode.drop_reason for episode in episodes(chunks)} == {"none_solved"}
