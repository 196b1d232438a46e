"""Reward of a Sokoban episode: the seed's formula, its parts, and the two weights."""

from __future__ import annotations

import pytest

from geo_sokoban_pipeline.rewards import sokoban_reward


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


def test_sum_and_distance_weight():
    parts = sokoban_reward([-0.01] * 5, 1.0, 4, 1, aggregate="sum", distance_weight=0.1)
    assert parts["total_reward"] == pytest.approx(-0.05 + 1.0 + 0.3)
    assert parts["distance_delta"] == 3.0
    with pytest.raises(ValueError, match="aggregate='max'"):
        sokoban_reward([1.0], 0, 0, 0, aggregate="max")  # type: ignore[arg-type]
