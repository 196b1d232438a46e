"""Reward of a Sokoban episode: slime's formula, its parts, and the two weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_sokoban_pipeline.rewards import sokoban_reward
from geo_sokoban_pipeline.rewards.sokoban import compute_reward, turn_values

NUMBERS = st.floats(-10, 10, allow_nan=False)


@pytest.mark.parametrize(
    ("turns", "bonus", "dist0", "dist1", "total"),
    [
        ([0.01, 0.01, 1.01], 5.0, 2, 0, 7.343333),
        ([1.01], 5.0, 1, 0, 7.01),
        ([1.03], 5.0, 2, 0, 8.03),
        ([], None, None, None, 0.0),
        ([], 5.0, 2, None, 5.0),
        ([-0.05, 0.01], None, 2, 3, -1.02),
        ([0.5], 0.0, None, 4, 0.5),
    ],
)
def test_total(turns, bonus, dist0, dist1, total):
    assert sokoban_reward(turns, bonus, dist0, dist1)["total_reward"] == pytest.approx(total, abs=1e-6)


def test_parts_have_the_seed_names():
    assert sokoban_reward([0.01, 0.03], 5, 3, 1) == {
        "turn_reward_avg": pytest.approx(0.02),
        "turn_reward_total": pytest.approx(0.04),
        "final_bonus": 5.0,
        "dist0": 3,
        "dist1": 1,
        "distance_delta": 2.0,
        "total_reward": pytest.approx(7.02),
    }
    assert sokoban_reward([], None, None, 1)["dist0"] is None


def finished(**env: Any) -> Any:
    """What a reward function sees of a finished episode."""
    return SimpleNamespace(env={"turn_rewards": [0.5, 1.0], "final_bonus": 5.0, "dist0": 3, "dist1": 1} | env)


@pytest.mark.parametrize(
    ("env", "args", "expected"),
    [
        ({}, {}, {"reward": 7.75, "turn_reward_avg": 0.75, "turn_reward_total": 1.5, "final_bonus": 5.0}),
        ({}, {"aggregate": "sum"}, {"reward": 8.5}),
        ({}, {"distance_weight": 0.5}, {"reward": 6.75, "distance_delta": 2.0}),
        ({}, {"aggregate": "sum", "distance_weight": 0.0}, {"reward": 6.5}),
        ({"final_bonus": 0.0}, {}, {"reward": 2.75, "final_bonus": 0.0}),
        ({"dist1": 4}, {}, {"reward": 4.75, "distance_delta": -1.0, "dist0": 3.0, "dist1": 4.0}),
        ({"turn_rewards": [-0.25], "final_bonus": 0.0, "dist1": 3}, {}, {"reward": -0.25}),
        ({"turn_rewards": [], "final_bonus": 0.0, "dist1": 3}, {}, {"reward": 0.0}),
    ],
)
def test_reward_of_a_finished_episode(env: dict[str, Any], args: dict[str, Any], expected: dict[str, float]) -> None:
    given = compute_reward(finished(**env), args)
    assert {name: given[name] for name in expected} == expected
    assert given["reward"] == given["total_reward"]
    assert all(type(value) is float for value in given.values())


def test_unknown_distances_are_no_parts() -> None:
    given = compute_reward(finished(dist0=None), {})
    assert given["reward"] == 5.75 and given["distance_delta"] == 0.0
    assert "dist0" not in given and given["dist1"] == 1.0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"distance_wieght": 0.1}, r"reward\.args.*distance_wieght.*distance_weight"),
        ({"aggregate": "max"}, "aggregate=\"max\": input should be 'mean' or 'sum'"),
        ({"distance_weight": float("nan")}, "distance_weight=NaN: input should be a finite number"),
    ],
)
def test_arguments_of_the_reward_are_checked(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_reward(finished(), args)


# Credit per turn.


@pytest.mark.parametrize(
    ("rewards", "distances", "bonus", "aggregate", "weight", "expected"),
    [
        ([1.01], [1, 0], 5.0, "mean", 1.0, [7.01]),
        # Slime's level L, solved in three turns: 0.343333 + 5 + 2 = 7.343333.
        ([0.01, 0.01, 1.01], [2, 2, 1, 0], 5.0, "mean", 1.0, [0.01 / 3, 0.01 / 3 + 1, 1.01 / 3 + 1 + 5]),
        ([-0.01, 0.99], None, 0.0, "sum", 1.0, [-0.01, 0.99]),
        ([0.0, 0.0], [3, 1, 2], 0.0, "sum", 0.1, [0.2, -0.1]),
        ([1.0, 2.0], [3, 1, 2], 1.0, "mean", 0.0, [0.5, 2.0]),
        ([], [3], 0.0, "mean", 1.0, []),
    ],
)
def test_turn_values(rewards, distances, bonus, aggregate, weight, expected):
    assert turn_values(rewards, distances, bonus, aggregate, weight) == pytest.approx(expected)


@given(st.data(), st.integers(1, 12), NUMBERS, st.sampled_from(["mean", "sum"]), st.floats(0, 2))
def test_turns_add_up_to_the_reward_of_the_episode(data, count, bonus, aggregate, weight):
    rewards = data.draw(st.lists(NUMBERS, min_size=count, max_size=count))
    distances = data.draw(st.lists(st.integers(0, 20), min_size=count + 1, max_size=count + 1))
    reward = sokoban_reward(rewards, bonus, distances[0], distances[-1], aggregate=aggregate, distance_weight=weight)[
        "total_reward"
    ]
    assert sum(turn_values(rewards, distances, bonus, aggregate, weight)) == pytest.approx(reward, abs=1e-9)


def test_every_turn_needs_a_distance():
    with pytest.raises(ValueError, match="1 entries for 1 turns"):
        turn_values([1.0], [1], 0.0)
