"""Rows of the evaluation summary: counts, what stays None, and the response metrics of the seed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_sokoban_pipeline.envs.metrics import cluster_interval
from geo_sokoban_pipeline.envs.sokoban.evaluation import LevelRecord
from geo_sokoban_pipeline.envs.sokoban.task import SOKOBAN
from geo_sokoban_pipeline.evaluation.rollouts import response_metrics, summary_row


def summarise_episodes(records, policy="final", mode="sampled"):
    return summary_row(SOKOBAN, records, policy=policy, mode=mode)


def level_record(prompt_id, success, ret, steps, optimal_steps, turns, invalid_turns):
    return LevelRecord(prompt_id, success, ret, turns, invalid_turns, steps, optimal_steps)


RECORDS = [
    level_record("a", True, 7.0, 3, 3, 3, 0),
    level_record("a", False, -0.5, 10, 3, 10, 4),
    level_record("b", True, 6.0, 6, 4, 6, 0),
    level_record("b", True, None, 4, 4, 1, 0),
    level_record("c", True, 5.5, 9, None, 9, 1),  # the solver hit its limit
    level_record("c", False, None, None, None, 0, 0),  # failed before its first turn
]


def test_row():
    row = summarise_episodes(RECORDS, policy="final", mode="sampled")
    low, high = cluster_interval([1, 2, 1], [2, 2, 2])  # by prompt: two samples of one are no two pieces of evidence
    half, both = cluster_interval([1], [2]), cluster_interval([2], [2])
    cell = {"episodes": 2, "clusters": 1}
    assert row == {
        "policy": "final",
        "mode": "sampled",
        "episodes": 6,
        "clusters": 3,
        "solved": 4,
        "solve_rate": pytest.approx(4 / 6),
        "low": low,
        "high": high,
        "mean_return": pytest.approx((7.0 - 0.5 + 6.0 + 5.5) / 4),
        "steps_over_optimal": pytest.approx((1 + 1.5 + 1) / 3),
        "invalid_share": pytest.approx(5 / 29),
        "by_length": [
            cell | {"length": 3, "solved": 1, "solve_rate": 0.5, "low": half[0], "high": half[1]},
            cell | {"length": 4, "solved": 2, "solve_rate": 1.0, "low": both[0], "high": both[1]},
        ],
        "pass_at_k": pytest.approx({"1": 4 / 6, "2": 1.0}),
    }
    json.dumps(row, allow_nan=False)


def test_nothing_played_is_none_not_zero():
    row = summarise_episodes([], policy="random", mode="-")
    assert (row["episodes"], row["solved"], row["low"], row["high"]) == (0, 0, 0.0, 1.0)
    assert [row[name] for name in ("solve_rate", "mean_return", "steps_over_optimal", "invalid_share")] == [None] * 4
    assert row["by_length"] == [] and row["pass_at_k"] is None


def test_one_episode_per_prompt_has_no_pass_at_k():
    assert summarise_episodes(RECORDS[1:3])["pass_at_k"] is None


EPISODES = st.builds(
    LevelRecord,
    prompt_id=st.sampled_from("abcd"),
    success=st.booleans(),
    ret=st.none() | st.floats(-5, 10),
    steps=st.none() | st.integers(1, 30),
    optimal_steps=st.none() | st.integers(0, 8),
    turns=st.integers(1, 10),
    invalid_turns=st.integers(0, 1),
)


@given(st.lists(EPISODES, max_size=20))
def test_lengths_add_up_and_every_number_is_json(records):
    row = summarise_episodes(records)
    known = [record for record in records if record.optimal_steps is not None]
    assert sum(part["episodes"] for part in row["by_length"]) == len(known)
    assert sum(part["solved"] for part in row["by_length"]) == sum(record.success for record in known)
    assert [part["length"] for part in row["by_length"]] == sorted({record.optimal_steps for record in known})
    assert row["invalid_share"] is None or 0.0 <= row["invalid_share"] <= 1.0
    json.dumps(row, allow_nan=False)


def test_response_metrics():
    metrics = response_metrics([4, 8, 6, 2], [True, False, False, False], ["a" * 10_001, "b", "c", "d"])
    assert metrics == {
        "response_len/mean": 5.0,
        "response_len/median": 5.0,
        "response_len/max": 8.0,
        "response_len/min": 2.0,
        "truncated_ratio": 0.25,
        "repetition_frac": 0.25,
    }
    assert set(response_metrics([], [], []).values()) == {None}
