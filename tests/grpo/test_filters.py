"""The dynamic filter: which groups are dropped, why, and how the drops are counted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_sokoban_pipeline.grpo.scoring import GroupSignal, drop_counts, keep_groups, zero_std_counts

EQUAL = GroupSignal([0.9] * 8, [False] * 8)
SOLVED = GroupSignal([6.8, 7.0], [True, True])
FAILED = GroupSignal([0.1, 0.4], [False, False])
MIXED = GroupSignal([0.1, 7.0], [False, True])
EMPTY = GroupSignal([], [])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("none", [None, None, None, None, "empty"]),
        ("zero_variance", ["zero_std", None, None, None, "empty"]),
        ("mixed_success", ["none_solved", "all_solved", "none_solved", None, "empty"]),
    ],
)
def test_reasons(kind, expected):
    assert keep_groups([EQUAL, SOLVED, FAILED, MIXED, EMPTY], kind) == expected


@pytest.mark.parametrize(("min_groups", "dropped"), [(0, 3), (1, 3), (2, 1), (4, 1)])
def test_all_with_any_signal_are_kept_where_too_few_would_remain(min_groups, dropped):
    reasons = keep_groups([EQUAL, SOLVED, FAILED, MIXED], "mixed_success", min_groups)
    assert sum(reason is not None for reason in reasons) == dropped


def test_empty_groups_stay_dropped():
    assert keep_groups([EMPTY, EQUAL], "zero_variance", min_groups=4) == ["empty", "zero_std"]


@pytest.mark.parametrize(
    ("advantages", "expected"),
    [(None, "zero_std"), ([0.0, 0.0], "zero_std"), ([0.0, 0.3], None), ([], "zero_std")],
)
def test_advantages_say_more_than_rewards(advantages, expected):
    """Equal episode rewards may still hide a turn that went better than another."""
    assert keep_groups([GroupSignal([1.0, 1.0], advantages=advantages)], "zero_variance") == [expected]


def test_counts_carry_the_reward_with_one_decimal():
    groups = [EQUAL, EQUAL, GroupSignal([-0.04, -0.04]), GroupSignal([1, 1]), MIXED]
    reasons = keep_groups(groups, "zero_variance")
    assert drop_counts(groups, reasons) == {
        "rollout/dynamic_filter/drop_zero_std_0.0": 1,
        "rollout/dynamic_filter/drop_zero_std_0.9": 2,
        "rollout/dynamic_filter/drop_zero_std_1.0": 1,
    }
    assert zero_std_counts(groups) == {
        "rollout/zero_std/count_0.0": 1,
        "rollout/zero_std/count_0.9": 2,
        "rollout/zero_std/count_1.0": 1,
    }
    solved = [SOLVED, FAILED]
    assert drop_counts(solved, keep_groups(solved, "mixed_success")) == {
        "rollout/dynamic_filter/drop_all_solved": 1,
        "rollout/dynamic_filter/drop_none_solved": 1,
    }


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: keep_groups([MIXED], "half"), "kind='half'"),
        (lambda: keep_groups([MIXED], "none", -1), "min_groups=-1"),
        (lambda: keep_groups([GroupSignal([1.0])], "mixed_success"), r"groups\[0\].successes"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


GROUPS = st.lists(st.lists(st.booleans(), min_size=1, max_size=5), max_size=8)


@given(GROUPS, st.integers(0, 8), st.sampled_from(["zero_variance", "mixed_success"]))
def test_a_group_without_signal_is_never_kept(outcomes, min_groups, kind):
    """Groups of length 4 or more earn a little more in their first episode, whether it is solved or not."""
    rewards = [[float(flag) + 0.1 * (n == 0 and len(flags) > 3) for n, flag in enumerate(flags)] for flags in outcomes]
    groups = [GroupSignal(values, flags) for values, flags in zip(rewards, outcomes, strict=True)]
    kept = [reason is None for reason in keep_groups(groups, kind, min_groups)]
    signal = [group.has_signal for group in groups]
    mixed = [len(set(flags)) == 2 for flags in outcomes]
    strict = signal if kind == "zero_variance" else mixed
    assert kept == (strict if sum(strict) >= min_groups else signal)
