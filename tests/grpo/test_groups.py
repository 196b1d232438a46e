"""Statistics within groups: worked values, the exact zero of equal rewards, and errors that name what is wrong."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_sokoban_pipeline.grpo import group_advantages, returns, scale_by_rms

REWARDS = st.floats(-100, 100, allow_nan=False, width=32)
ROOT_2 = 2**0.5


@pytest.mark.parametrize(
    ("rewards", "groups", "normalize_std", "expected"),
    [
        ([0, 1], [0, 0], True, [-0.5 / (ROOT_2 / 2 + 1e-6), 0.5 / (ROOT_2 / 2 + 1e-6)]),
        ([7, 0, 9, 4], [1, 0, 1, 0], False, [-1, -2, 1, 2]),  # groups need not be contiguous
        ([3], [0], True, [0]),
        ([3, 1, 2], [0, 1, 1], False, [0, -0.5, 0.5]),  # nor equal in size
        ([], [], True, []),
    ],
)
def test_values(rewards, groups, normalize_std, expected):
    advantages = group_advantages(rewards, np.array(groups, dtype=np.int64), normalize_std=normalize_std)
    assert advantages.dtype == np.float64
    np.testing.assert_allclose(advantages, expected, rtol=1e-12)


@pytest.mark.parametrize(("difference", "equal"), [(0.9e-6, True), (1.1e-6, False), (1e-3, False)])
def test_rewards_are_equal_within_a_millionth(difference, equal):
    advantages = group_advantages([1.0, 1.0 + difference], [0, 0], normalize_std=False)
    np.testing.assert_allclose(advantages, [0.0, 0.0] if equal else [-difference / 2, difference / 2], rtol=1e-6)


@given(st.lists(st.tuples(REWARDS, st.integers(0, 3)), min_size=1, max_size=30), st.booleans())
def test_each_group_is_centred_and_independent_of_the_others(episodes, normalize_std):
    rewards, groups = np.array([r for r, _ in episodes]), np.array([g for _, g in episodes])
    advantages = group_advantages(rewards, groups, normalize_std=normalize_std)
    for group in set(groups):
        members = groups == group
        own = advantages[members]
        assert abs(own.sum()) <= 1e-9 * max(1.0, np.abs(own).max())
        alone = group_advantages(rewards[members], groups[members], normalize_std=normalize_std)
        assert np.array_equal(own, alone)


@given(REWARDS, st.integers(1, 17), st.sampled_from([np.float16, np.float32, np.float64]))
def test_equal_rewards_are_exactly_zero(reward, count, dtype):
    """In float32 the residue of 0.7 less the mean of eight is 5.96e-8, and their deviation 6.37e-8."""
    assert not group_advantages(np.full(count, reward, dtype=dtype), [0] * count).any()


@pytest.mark.parametrize(
    ("values", "gamma", "expected"),
    [
        ([1, 2, 4], 1.0, [7, 6, 4]),
        ([1, 2, 4], 0.5, [3, 4, 4]),
        ([1, 2, 4], 0.0, [1, 2, 4]),
        ([], 0.9, []),
    ],
)
def test_returns_leave_their_argument_alone(values, gamma, expected):
    given_values = np.array(values, dtype=np.float64)
    np.testing.assert_allclose(returns(given_values, gamma), expected)
    assert given_values.tolist() == values


def test_scale_by_rms_measures_only_kept_episodes():
    scaled = scale_by_rms([[3.0, -4.0], [-100.0], [0.0]], [True, False, True])
    scale = np.sqrt(25 / 3)
    np.testing.assert_allclose(scaled[0], [3 / scale, -4 / scale])
    np.testing.assert_allclose(scaled[1], [-100 / scale])  # dropped, on the same scale
    assert scaled[2].tolist() == [0.0]


@pytest.mark.parametrize("kept", [[False, False], [True, False]])
def test_scale_by_rms_without_signal_changes_nothing(kept):
    assert [a.tolist() for a in scale_by_rms([[0.0], [2.0]], kept)] == [[0.0], [2.0]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: group_advantages([1.0, float("nan")], [0, 0]), r"rewards\[1\]=nan"),
        (lambda: group_advantages([float("inf"), 1.0], [0, 0]), r"rewards\[0\]=inf"),
        (lambda: group_advantages([1.0, 2.0], [0]), "one entry per episode"),
        (lambda: group_advantages([[1.0, 2.0]], [[0, 0]]), "one entry per episode"),
        (lambda: group_advantages([1.0, 2.0], [0.0, 1.0]), "integers"),
        (lambda: returns([1.0, float("nan")], 1.0), r"values\[1\]=nan"),
        (lambda: returns([1.0], 1.5), "gamma=1.5"),
        (lambda: scale_by_rms([[1.0]], [True, False]), "one entry per episode"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_package_loads_torch_only_on_use():
    code = (
        "import sys, geo_sokoban_pipeline.grpo as grpo; assert 'torch' not in sys.modules; "
        "grpo.policy_loss; assert 'torch' in sys.modules; assert all(hasattr(grpo, name) for name in grpo.__all__)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)}, timeout=60)
