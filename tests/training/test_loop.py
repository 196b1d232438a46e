"""The loop in this process: what a chunk holds and when, and a stop without signal."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from geo_sokoban_pipeline.runs.storage import Complete, Rewind
from geo_sokoban_pipeline.trajectories.types import Trajectory, table_to_trajectories
from training.setup import Setup, run_loop, settings


def episodes(*tables: Any) -> list[Trajectory]:
    return [episode for parts in tables for table in parts.values() for episode in table_to_trajectories(table)]


def test_chunks_hold_an_iteration_each(setup: Setup) -> None:
    """Its episodes come before its metrics and its checkpoint."""
    changes = {"loop.iterations": 2, "loop.eval_interval": 1, "loop.eval_prompts": 4}
    rewind, *chunks, done = run_loop(setup, settings(setup.options, changes))
    assert (rewind, done) == ((Rewind(-1),) * 4, ({}, {}, {}, Complete(2)))
    names = [[list(part) for part in chunk] for chunk in chunks]
    assert names == [
        [["iter=00000/part-000"], ["iter=00000/part-000", "iter=00001/part-000"], [], []],
        [[], [], ["iter=00000"], ["iter=00000"]],
        [["iter=00001/part-000"], ["iter=00002/part-000"], [], []],
        [[], [], ["iter=00001"], ["iter=00001"]],
    ]
    row = chunks[1][2]["iter=00000"]
    assert {"eval/start/sampled_solve_rate", "eval/validation/sampled_solve_rate"} <= set(row)
    assert not any(name.startswith("eval/start/") for name in chunks[3][2]["iter=00001"])
    played = episodes(chunks[0][0], chunks[2][0])
    assert {episode.policy_version for episode in played} == {0, 1}
    assert len({episode.trajectory_id for episode in played}) == len(played) == 2 * 4 * 3


def test_no_signal_commits_without_an_update(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    # A limit of one token ends every episode at its first one: nothing is solved, so no group is mixed.
    hopeless = {"grpo.filter": "mixed_success", "grpo.min_groups": 0, "rollout.max_tokens_per_turn": 1}
    with caplog.at_level(logging.WARNING):
        _, first, second, _ = run_loop(setup, settings(setup.options, hopeless))
    assert second[2]["iter=00000"]["train/steps"] == 0.0 and "iter=00000" in second[3]
    assert caplog.text.count("no group to train on") == 1
    assert "iterations trained nothing" in caplog.text
    assert {episode.drop_reason for episode in episodes(first[0])} == {"none_solved"}
