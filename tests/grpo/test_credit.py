"""Credit per turn: the values add up to the episode's reward, baselines compare like with like."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_sokoban_pipeline.grpo.scoring import returns, scale_by_rms, turn_advantages

NUMBERS = st.floats(-10, 10, allow_nan=False)


@pytest.mark.parametrize(
    ("values", "gamma", "expected"),
    [
        ([1, 2, 4], 1.0, [7, 6, 4]),
        ([1, 2, 4], 0.5, [3, 4, 4]),
        ([1, 1, 1], 0.5, [1.75, 1.5, 1]),
        ([1, 2, 4], 0.0, [1, 2, 4]),
        ([], 0.9, []),
    ],
)
def test_returns(values, gamma, expected):
    np.testing.assert_allclose(returns(values, gamma), expected)


def test_returns_leave_their_argument_alone():
    values = np.array([1.0, 2.0])
    returns(values, 1.0)
    assert values.tolist() == [1.0, 2.0]


def test_baseline_is_the_mean_of_the_episodes_alive_at_the_turn():
    values = [[1.0, 3.0], [5.0], [0.0, 5.0], [9.0]]
    advantages = turn_advantages(values, [0, 0, 0, 1], gamma=1.0)
    # Group 0: returns at turn 0 are 4, 5, 5 with mean 14/3; at turn 1, where two are alive, 3 and 5.
    np.testing.assert_allclose(advantages[0], [4 - 14 / 3, -1])
    np.testing.assert_allclose(advantages[1], [5 - 14 / 3])
    np.testing.assert_allclose(advantages[2], [5 - 14 / 3, 1])
    assert advantages[3].tolist() == [0.0]  # alone in its group


def test_baseline_of_the_same_board():
    values, keys = [[1.0, 3.0], [5.0, 2.0]], [["a", "b"], ["a", "a"]]
    advantages = turn_advantages(values, [0, 0], gamma=1.0, baseline="board", observation_keys=keys)
    np.testing.assert_allclose(advantages[0], [4 - 13 / 3, 0])  # board "b" was seen once
    np.testing.assert_allclose(advantages[1], [7 - 13 / 3, 2 - 13 / 3])
    other_group = turn_advantages(values, [0, 1], gamma=1.0, baseline="board", observation_keys=keys)
    assert other_group[0].tolist() == [0.0, 0.0]


EPISODES = st.lists(st.tuples(st.integers(0, 2), st.lists(NUMBERS, min_size=1, max_size=6)), min_size=1, max_size=10)


@given(EPISODES, st.floats(0, 1))
def test_advantages_of_a_cell_are_centred(episodes, gamma):
    groups, values = [g for g, _ in episodes], [v for _, v in episodes]
    advantages = turn_advantages(values, groups, gamma)
    for group in set(groups):
        own = [a for a, g in zip(advantages, groups, strict=True) if g == group]
        for turn in range(max(map(len, own))):
            assert sum(a[turn] for a in own if len(a) > turn) == pytest.approx(0, abs=1e-9)


@given(st.lists(NUMBERS, min_size=1, max_size=6), st.integers(1, 8), st.booleans())
def test_equal_episodes_give_exactly_zero(values, count, per_group):
    advantages = turn_advantages([values] * count, [0] * count, 0.95, per_group=per_group)
    for found in (*advantages, *scale_by_rms(advantages, [True] * count)):
        assert not found.any()


@given(EPISODES)
def test_rms_is_one_and_std_is_one_per_group(episodes):
    groups, values = [g for g, _ in episodes], [v for _, v in episodes]
    plain = turn_advantages(values, groups, 0.95)
    scaled = np.concatenate(scale_by_rms(plain, [True] * len(plain), clip=None))
    if np.concatenate(plain).any():
        assert np.sqrt(np.mean(scaled**2)) == pytest.approx(1.0)
    by_group = turn_advantages(values, groups, 0.95, per_group=True)
    for group in set(groups):
        own = np.concatenate([a for a, g in zip(by_group, groups, strict=True) if g == group])
        if own.any():
            assert own.std(ddof=1) <= 1.0 + 1e-9


def test_scale_by_rms_measures_only_kept_episodes():
    advantages = [[3.0, -4.0], [100.0], [0.0]]
    scaled = scale_by_rms(advantages, [True, False, True], clip=4.0)
    scale = np.sqrt(25 / 3)
    np.testing.assert_allclose(scaled[0], [3 / scale, -4 / scale])
    assert scaled[1].tolist() == [4.0]  # dropped, on the same scale, clipped
    unclipped = scale_by_rms(advantages, [True, False, True], clip=None)
    np.testing.assert_allclose(unclipped[1], [100 / scale])


@pytest.mark.parametrize("kept", [[False, False], [True, False]])
def test_scale_by_rms_without_signal_changes_nothing(kept):
    assert [a.tolist() for a in scale_by_rms([[0.0], [2.0]], kept)] == [[0.0], [2.0]]


def test_clip_is_symmetric_and_last():
    advantages = scale_by_rms([[-10.0], [10.0], [0.0]], [False, False, True], clip=4.0)
    assert [a.tolist() for a in advantages] == [[-4.0], [4.0], [0.0]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: returns([1.0, float("nan")], 1.0), r"values\[1\]=nan"),
        (lambda: returns([1.0], 1.5), "gamma=1.5"),
        (lambda: turn_advantages([[1.0]], [0, 1], 1.0), "1 episodes"),
        (lambda: turn_advantages([[1.0]], [0], 1.0, baseline="state"), "baseline='state'"),
        (lambda: turn_advantages([[1.0]], [0], 1.0, baseline="board"), r"observation_keys\[0\]"),
        (lambda: scale_by_rms([[1.0]], [True, False]), "one entry per episode"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
