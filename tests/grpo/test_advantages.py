"""Advantages of episodes: worked values, the exact zero of equal rewards, and invariance of the grouping."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_sokoban_pipeline.grpo import group_advantages

REWARDS = st.floats(-100, 100, allow_nan=False, width=32)
ROOT_2 = 2**0.5


@pytest.mark.parametrize(
    ("rewards", "groups", "normalize_std", "expected"),
    [
        ([0, 1], [0, 0], False, [-0.5, 0.5]),
        ([0, 1], [0, 0], True, [-0.5 / (ROOT_2 / 2 + 1e-6), 0.5 / (ROOT_2 / 2 + 1e-6)]),
        ([1, 2, 3], [5, 5, 5], True, [-1 / (1 + 1e-6), 0, 1 / (1 + 1e-6)]),
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


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_eight_equal_rewards_give_exactly_zero(dtype, normalize_std):
    advantages = group_advantages(np.full(8, 0.9, dtype=dtype), np.zeros(8, dtype=int), normalize_std=normalize_std)
    assert np.array_equal(advantages, np.zeros(8))


def test_float32_arithmetic_would_not_give_zero():
    """The defect that float64 and the equality rule remove: 0.9 minus the mean of eight 0.9 in float32."""
    rewards = np.full(8, 0.9, dtype=np.float32)
    total = np.float32(0)
    for reward in rewards:
        total += reward
    assert abs(float(rewards[0] - total / np.float32(8))) == pytest.approx(5.96e-8, rel=1e-2)


@pytest.mark.parametrize(
    ("rewards", "groups", "message"),
    [
        ([1.0, float("nan")], [0, 0], r"rewards\[1\]=nan"),
        ([float("inf"), 1.0], [0, 0], r"rewards\[0\]=inf"),
        ([1.0, 2.0], [0], "one entry per episode"),
        ([[1.0, 2.0]], [[0, 0]], "one entry per episode"),
        ([1.0, 2.0], [0.0, 1.0], "integers"),
    ],
)
def test_bad_input_is_named(rewards, groups, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards, groups)


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


@given(REWARDS, st.integers(1, 17))
def test_equal_rewards_are_zero(reward, count):
    assert not group_advantages([reward] * count, [0] * count).any()


@given(st.lists(REWARDS, min_size=2, max_size=12), st.randoms(use_true_random=False))
def test_order_within_a_group_does_not_matter(rewards, random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    groups = [0] * len(rewards)
    shuffled = group_advantages([rewards[index] for index in order], groups)
    np.testing.assert_allclose(shuffled, group_advantages(rewards, groups)[order], rtol=1e-6, atol=1e-9)


def test_package_loads_torch_only_on_use():
    code = (
        "import sys, geo_sokoban_pipeline.grpo as grpo; assert 'torch' not in sys.modules; "
        "grpo.policy_loss; assert 'torch' in sys.modules; assert all(hasattr(grpo, name) for name in grpo.__all__)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)}, timeout=60)
