"""Advantages: worked numbers, the papers' equations by plain loops, and what each one promises."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_sokoban_pipeline.config.estimators import ESTIMATORS, OverlongOptions
from geo_sokoban_pipeline.grpo.advantages.distillation import token_advantages
from geo_sokoban_pipeline.grpo.groups import Episodes
from geo_sokoban_pipeline.grpo.scoring import overlong_penalty
from grpo.papers import PAPER

DISTILLATION = {"teacher": "folder"}
# Options that reach all code of each advantage.
OPTIONS = {
    "grpo": [{}],
    "dr_grpo": [{}],
    "rloo": [{}],
    "reinforce_pp": [{}],
    "reinforce_pp_baseline": [{}],
    "turn_return": [
        {"gamma": gamma, "baseline": baseline, "leave_one_out": leave_one_out, "scale": scale}
        for gamma in (0.5, 1.0)
        for baseline in ("turn", "state", "state_turn")
        for leave_one_out in (False, True)
        for scale in ("std", "none")
    ],
    "gigpo": [{"gamma": 0.95, "omega": 0.7}, {"gamma": 1.0, "scale": "none"}],
    "vine": [{}],
    "distillation": [DISTILLATION],
}
CASES = [pytest.param(name, st.sampled_from(options), id=name) for name, options in OPTIONS.items()]


def advantage(name):
    """A registered advantage."""
    path, _, function = ESTIMATORS["advantage"][name].function.rpartition(".")
    return getattr(import_module(f"geo_sokoban_pipeline.grpo.{path}"), function)


def estimate(name, episodes, **options):
    """Its numbers, one array per episode: (1,), or (n_e,) of its turns."""
    found = advantage(name)(episodes, ESTIMATORS["advantage"][name].arguments(**options))
    assert len(found) == len(episodes.reward)
    return [np.atleast_1d(row) for row in found]


def table(reward, group=None, lengths=None, **fields):
    """Episodes of one turn and one token each, all trained, unless given otherwise."""
    count = len(reward)
    given_lengths = [[1]] * count if lengths is None else lengths
    return Episodes(
        group=np.zeros(count, np.int64) if group is None else np.array(group, np.int64),
        reward=np.array(reward, np.float64),
        trained=np.array(fields.pop("trained", [True] * count), np.bool_),
        lengths=[np.array(row, np.int64) for row in given_lengths],
        state_values=fields.pop("state_values", [np.full(len(row), np.nan) for row in given_lengths]),
        **fields,
    )


def turns(rewards, group=None, keys=(), **fields):
    """Episodes whose rewards are the sums of their turns."""
    rows = [np.array(row, np.float64) for row in rewards]
    lengths = fields.pop("lengths", [[1] * len(row) for row in rows])
    return table([row.sum() for row in rows], group, lengths, turn_rewards=rows, state_keys=keys, **fields)


def assert_rows(found, expected, **tolerance):
    for row, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(row, wanted, **tolerance)


# Two groups of three episodes.
GROUPS = table([1, 0, 0.25, 2, 2, -1], [0, 0, 0, 1, 1, 1], [[1, 1], [3, 1], [3], [1], [3], [2, 2]])


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("grpo", {}, [1.120895, -0.800639, -0.320256, 0.577350, 0.577350, -1.154700]),
        ("dr_grpo", {}, [0.583333, -0.416667, -0.166667, 1, 1, -2]),
        ("rloo", {}, [0.875, -0.625, -0.25, 1.5, 1.5, -3]),
        ("reinforce_pp_baseline", {}, [0.785057, -0.109645, 0.114031, 1.157849, 1.157849, -1.526255]),
    ],
)
def test_two_groups(name, options, expected):
    assert_rows(estimate(name, GROUPS, **options), np.reshape(expected, (6, 1)), rtol=0, atol=5e-7)


def test_rewards_whitened_over_tokens():
    episodes = table([1, 0.5], [0, 1], [[2, 1], [3]])
    assert_rows(estimate("reinforce_pp", episodes), [[0.912871], [-0.912871]], rtol=0, atol=5e-7)


# Turn rewards of three episodes that end after two, one and three turns.
ENDINGS = [[0.5, 1], [0.2], [0.1, 0, 1]]


@pytest.mark.parametrize(
    ("options", "keys", "expected"),
    [
        ({}, (), [[0.566667, 0], [-0.733333], [0.166667, 0, 0]]),
        # A turn without others has no baseline and is not trained; its own return of 1 would be the alternative.
        ({"leave_one_out": True}, (), [[0.85, 0], [-1.1], [0.25, 0, 0]]),
        # In one state all turns of the other episodes are the baseline.
        (
            {"leave_one_out": True, "baseline": "state"},
            ["ss", "s", "sss"],
            [[0.675, 0.175], [-0.92], [0.2, 0.1, 0.1]],
        ),
        ({"leave_one_out": True, "baseline": "state_turn"}, ["ss", "s", "sss"], [[0.85, 0], [-1.1], [0.25, 0, 0]]),
        ({"baseline": "state"}, ["ab", "b", "acb"], [[0.2, 4 / 15], [-8 / 15], [-0.2, 0, 4 / 15]]),
    ],
)
def test_episodes_of_unequal_length(options, keys, expected):
    found = estimate("turn_return", turns(ENDINGS, keys=keys), gamma=1.0, scale="none", **options)
    assert_rows(found, expected, rtol=0, atol=5e-7)


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({"leave_one_out": True}, 1),
        ({"leave_one_out": True, "baseline": "state"}, 1),
        ({"leave_one_out": True, "baseline": "state_turn"}, 1),
        ({}, 2 / 3),
        ({"baseline": "state_turn"}, 2 / 3),
    ],
)
def test_expected_gradient_of_an_early_end(options, share):
    """The number of baselines does not depend on one's own end, so the expected gradient is the true one, or a share.

    "Stop" pays 0.6; "continue" pays 0.3, and 0.5 in the turn after. All 8 outcomes of three episodes are enumerated.
    """
    p = 1 / (1 + math.exp(-0.3))
    expected = 0.0
    for outcome in itertools.product([True, False], repeat=3):
        rewards = [[0.3, 0.5] if goes_on else [0.6] for goes_on in outcome]
        episodes = turns(rewards, keys=["s" * len(row) for row in rewards])
        found = estimate("turn_return", episodes, gamma=1.0, scale="none", **options)
        scores = [1 - p if goes_on else -p for goes_on in outcome]
        mean = statistics.fmean(row[0] * score for row, score in zip(found, scores, strict=True))
        expected += math.prod(p if goes_on else 1 - p for goes_on in outcome) * mean
    assert expected / (p * (1 - p) * 0.2) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("none", [[1.133333, 1.25], [-0.816667, -0.416667, -0.75], [-0.316667, -0.5]]),
        ("std", [[2.237773, 2.275593], [-1.612915, -0.800639, -1.377988], [-0.624859, -0.897605]]),
    ],
)
def test_groups_in_groups(scale, expected):
    episodes = turns([[0, 1], [0, 0, 0], [0.25, 0]], keys=[(0, 1), (0, 2, 1), (0, 1)])
    assert_rows(estimate("gigpo", episodes, gamma=0.95, scale=scale), expected, rtol=0, atol=5e-7)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # The value of a prompt is the mean reward of the other episodes.
        ([[None, 0.25, 1], [None, 0.75], [None]], [[-0.25, 0.75, 0], [-0.25, -0.75], [0.5]]),
        # Responses up to the next measured state share its gain.
        ([[None, None, 0.75], [None, None], [None]], [[0.25, 0.25, 0.25], [-1, -1], [0.5]]),
    ],
)
def test_values_of_states(values, expected):
    measured = [np.array(row, np.float64) for row in values]
    found = estimate("vine", turns([[0, 0, 1], [0, 0], [1]], state_values=measured))
    assert_rows(found, expected, rtol=0, atol=1e-12)


def test_distillation():
    gaps = token_advantages([-1.0, -0.5], [-2.0, -0.25])
    assert gaps.tolist() == [1.0, -0.25]
    episodes = table([5, 0], teacher_gaps=[gaps, np.zeros(0)])  # the second is not yet scored
    assert estimate("distillation", episodes, **DISTILLATION) == [0.375, 1.0]


def test_overlong_episodes():
    penalty = overlong_penalty([70, 80, 85, 90, 100, 110], OverlongOptions(length=100, buffer=20))
    np.testing.assert_allclose(penalty, [0, 0, -0.25, -0.5, -1, -1], rtol=0, atol=1e-15)
    assert overlong_penalty([0, 3, 4], OverlongOptions(length=4, buffer=4)).tolist() == [0.0, -0.75, -1.0]
    with pytest.raises(ValueError, match="buffer=5 with length=4"):
        OverlongOptions(length=4, buffer=5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: estimate("turn_return", GROUPS), "no turn_rewards"),
        (lambda: estimate("gigpo", turns([[1.0, 2.0]], keys=[("s",)])), r"\[2\] turns and \[1\] keys"),
        (lambda: estimate("turn_return", turns([[1.0]]), baseline="state"), r"\[1\] turns and \[\] keys"),
        (lambda: token_advantages([-1.0], [-1.0, -2.0]), "1 tokens and rollout_log_probs 2"),
        (lambda: token_advantages([-math.inf], [-1.0]), r"teacher_log_probs\[0\]=-inf"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def random_iteration(count, seed):
    """Episodes of up to three groups. Rewards are eighths: equal, or further apart than a rounding error."""
    random = np.random.default_rng(seed)
    rewards = [random.integers(-16, 17, random.integers(1, 5)) / 8 for _ in range(count)]
    lengths = [random.integers(1, 6, len(row)) for row in rewards]
    keys = [tuple(random.choice(list("abc"), len(row))) for row in rewards]
    return turns(
        rewards,
        random.integers(0, 3, count),
        keys,
        lengths=lengths,
        trained=random.random(count) < 0.6,
        state_values=[np.where(random.random(len(row)) < 0.5, random.normal(size=len(row)), np.nan) for row in rewards],
        teacher_gaps=[random.normal(size=row.sum()) for row in lengths],
    )


def ordered(episodes, places):
    """The episodes in another order, with other numbers for their groups."""
    lists = ("lengths", "turn_rewards", "state_keys", "state_values", "teacher_gaps")
    return replace(
        episodes,
        group=7 - 3 * episodes.group[places],
        reward=episodes.reward[places],
        trained=episodes.trained[places],
        **{name: [getattr(episodes, name)[place] for place in places] for name in lists},
    )


ITERATIONS = st.builds(random_iteration, st.integers(1, 10), st.integers(0, 10**6))


def test_every_advantage_is_tested():
    assert set(OPTIONS) == set(PAPER) == set(ESTIMATORS["advantage"])


@pytest.mark.parametrize(("name", "options"), CASES)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), episodes=ITERATIONS)
def test_the_equation_of_the_paper(name, options, data, episodes):
    chosen = data.draw(options)
    assert_rows(estimate(name, episodes, **chosen), PAPER[name](episodes, **chosen), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(("name", "options"), CASES)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), episodes=ITERATIONS, seed=st.integers(0, 10**6))
def test_order_and_names_of_groups_do_not_matter(name, options, data, episodes, seed):
    chosen, places = data.draw(options), np.random.default_rng(seed).permutation(len(episodes.reward))
    before = estimate(name, episodes, **chosen)
    after = estimate(name, ordered(episodes, places), **chosen)
    assert_rows(after, [before[place] for place in places], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", [name for name in OPTIONS if advantage(name).zero_on_equal_groups])
@pytest.mark.parametrize("reward", [0.7, 0.1, -1e-3, 1e6])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_equal_episodes_give_exactly_zero(name, reward, count):
    """Beside a group that carries a signal, which sets the scale of a batch."""
    rewards = [[reward, reward / 3]] * count + [[0.0, 1.0], [2.0, 0.5]]
    episodes = turns(rewards, [0] * count + [1, 1], ["ab"] * len(rewards))
    for options in OPTIONS[name]:
        found = estimate(name, episodes, **options)
        assert not np.concatenate(found[:count]).any()
        assert np.concatenate(found[count:]).any()


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_whitening_measures_only_trained_episodes(name):
    """An episode that is not trained has a number on their scale."""
    rewards, groups, lengths = [1, 0, 4, 100], [0, 0, 1, 2], [[2], [4], [3], [50]]
    among = estimate(name, table(rewards, groups, lengths, trained=[True, True, True, False]))
    alone = estimate(name, table(rewards[:3], groups[:3], lengths[:3]))
    assert_rows(among[:3], alone, rtol=1e-12)
    nothing = estimate(name, table(rewards, groups, lengths, trained=[False] * 4))
    assert not np.concatenate(nothing).any()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-20, 20), min_size=2, max_size=9), st.integers(1, 50), st.integers(-50, 50))
def test_what_a_scale_and_a_shift_of_the_rewards_change(rewards, scale, shift):
    """Nothing where a deviation divides, and nothing but the scale elsewhere; RLOO is Dr. GRPO times n / (n − 1)."""
    plain, changed = table(rewards), table([scale * reward + shift for reward in rewards])
    for name, factor in (
        ("grpo", 1),
        ("reinforce_pp", 1),
        ("reinforce_pp_baseline", 1),
        ("dr_grpo", scale),
        ("rloo", scale),
    ):
        before, after = estimate(name, plain), estimate(name, changed)
        # Beside a deviation of at least 0.3, what is added to it is 1e-5 or less.
        assert_rows(after, [factor * row for row in before], rtol=1e-5, atol=1e-9)
    count = len(rewards)
    wanted = [count / (count - 1) * row for row in estimate("dr_grpo", plain)]
    assert_rows(estimate("rloo", plain), wanted, rtol=1e-9)
