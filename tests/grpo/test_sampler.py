"""Prompt sampler: slime's shuffle, moving solve rates, and a state that resumes exactly."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_sokoban_pipeline.config.grpo import PromptOptions
from geo_sokoban_pipeline.grpo.sampler import PromptSampler


def sampler_of(buckets, order="shuffle", seed=42):
    return PromptSampler(buckets, PromptOptions(order=order), seed)


@pytest.mark.parametrize(
    ("buckets", "order", "seed", "draws"),
    [
        ([None], "shuffle", 42, [[3, 4, 6, 7, 2, 5, 0, 1], [6, 7, 4, 3, 1, 5, 2, 0]]),  # slime's shuffle
        # One bucket: its order of the first epoch, then that of the second.
        ([3], "solve_rate", 0, [[6, 2, 0, 7, 1, 5, 3, 4], [4, 1, 5, 3, 7, 0, 6, 2]]),
        ([3], "solve_rate", 7, [[4, 3, 1, 2, 0, 5, 7, 6], [7, 2, 5, 0, 1, 6, 4, 3]]),
        ([3], "prompt_solve_rate", 42, [[3, 0, 6, 4, 1, 5, 2, 7], [3, 6, 5]]),
    ],
)
def test_draws_of_a_seed_stay_as_they_are(buckets, order, seed, draws):
    """Stored runs are continued, and studies repeated, by later versions: these orders never change."""
    sampler = sampler_of(buckets * 8, order=order, seed=seed)
    assert [sampler.draw(iteration, len(drawn)) for iteration, drawn in enumerate(draws)] == draws


def test_draws_from_several_buckets_stay_as_they_are():
    sampler = sampler_of([1] * 6 + ["long"] * 4 + [None] * 3, order="solve_rate", seed=42)
    assert sampler.draw(0, 14) == [3, 10, 6, 4, 11, 12, 2, 7, 11, 8, 5, 0, 9, 6]
    assert sampler.draw(0, 3, attempt=1) == [8, 1, 12]
    assert sampler.draw(1, 8) == [10, 12, 9, 4, 10, 11, 0, 10]


def test_rest_of_an_epoch_comes_before_the_next():
    sampler = sampler_of([None] * 8)
    assert sampler.draw(0, 5) + sampler.draw(1, 5) == [3, 4, 6, 7, 2, 5, 0, 1, 6, 7]
    assert sampler.draw(2, 0) == []
    assert sampler.positions == {"all": 10}


KINDS = st.sampled_from(["shuffle", "solve_rate", "prompt_solve_rate"])
BUCKETS = st.lists(st.sampled_from([1, 2, 3, None]), min_size=1, max_size=12)
ROUNDS = st.lists(st.tuples(st.integers(0, 9), st.floats(0, 1)), min_size=1, max_size=6)


def play(sampler, rounds, start=0):
    drawn = []
    for iteration, (count, rate) in enumerate(rounds, start):
        indices = sampler.draw(iteration, count) + sampler.draw(iteration, 1, attempt=1)
        sampler.update(indices, [rate] * len(indices))
        drawn.append(indices)
    return drawn


@settings(max_examples=60)
@given(KINDS, BUCKETS, ROUNDS, st.integers(0, 5))
def test_resumed_equals_uninterrupted(order, buckets, rounds, cut):
    given = buckets, PromptOptions(order=order), 7
    whole = PromptSampler(*given)
    expected = play(whole, rounds)
    first = PromptSampler(*given)
    drawn = play(first, rounds[:cut])
    state = json.loads(json.dumps(first.state()))
    second = PromptSampler.from_state(state, *given)
    drawn += play(second, rounds[cut:], start=len(rounds[:cut]))
    assert drawn == expected
    assert second.state() == whole.state()


@settings(max_examples=60)
@given(KINDS, BUCKETS, st.integers(0, 40))
def test_draws_are_prompts_in_the_number_asked(order, buckets, count):
    drawn = sampler_of(buckets, order=order).draw(0, count)
    assert len(drawn) == count and set(drawn) <= set(range(len(buckets)))
    if order != "solve_rate" and count <= len(buckets):
        assert len(set(drawn)) == count
    if order == "solve_rate":  # a prompt returns only after all others of its bucket
        counts = Counter(drawn)
        for label in set(buckets):
            own = [counts[index] for index, bucket in enumerate(buckets) if bucket == label]
            assert max(own) - min(own) <= 1


def test_state_is_untouched_by_later_draws():
    sampler = sampler_of([1, 2, 2], order="solve_rate")
    state = sampler.state()
    sampler.draw(0, 5)
    sampler.update([0], [1.0])
    assert state["positions"] == {} and state["bucket_rates"] == {}


def test_buckets_are_drawn_by_their_weight():
    """Weights p (1 - p) + 0.03 of the rates 0, 0.5 and 1: 0.03, 0.28, 0.03, whatever the sizes of the buckets."""
    sampler = sampler_of([1] * 90 + [2] * 5 + [3] * 5, order="solve_rate")
    sampler.update([0, 90, 95] * 200, [0.0, 0.5, 1.0] * 200)
    drawn = [index for iteration in range(100) for index in sampler.draw(iteration, 34)]
    shares = Counter("low" if index < 90 else "mid" if index < 95 else "high" for index in drawn)
    assert shares["mid"] / 3400 == pytest.approx(0.28 / 0.34, abs=0.03)
    assert shares["low"] / 3400 == pytest.approx(0.03 / 0.34, abs=0.02)


def test_prompts_are_drawn_by_their_weight():
    sampler = sampler_of([1] * 20, order="prompt_solve_rate")
    sampler.update([*range(20)] * 200, ([0.5] * 10 + [1.0] * 10) * 200)
    drawn = [index for iteration in range(400) for index in sampler.draw(iteration, 1)]
    assert sum(index < 10 for index in drawn) / 400 == pytest.approx(0.28 / 0.31, abs=0.05)


def test_moving_rates():
    sampler = sampler_of([1, 1, 2], order="prompt_solve_rate")
    sampler.update([0, 1], [1.0, 0.0])
    # Two observations with mean 0.5 leave the bucket's 0.5 where it was; each prompt moves a tenth of the way.
    assert sampler.bucket_rates == {"1": pytest.approx(0.5)}
    assert sampler.prompt_rates == {0: pytest.approx(0.55), 1: pytest.approx(0.45)}
    sampler.update([2, 2], [1.0, 1.0])
    assert sampler.bucket_rates["2"] == pytest.approx(1 - 0.9**2 * 0.5)


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1)), min_size=1, max_size=10), st.randoms())
def test_rates_stay_in_range_and_ignore_the_order_of_observations(observed, random):
    shuffled = random.sample(observed, len(observed))
    samplers = [sampler_of([1, 1, 2, 2, 3, None], order="solve_rate") for _ in range(2)]
    for sampler, pairs in zip(samplers, [observed, shuffled], strict=True):
        sampler.update([index for index, _ in pairs], [rate for _, rate in pairs])
    assert samplers[0].bucket_rates == samplers[1].bucket_rates
    assert all(0.0 <= rate <= 1.0 for rate in samplers[0].bucket_rates.values())


@pytest.mark.parametrize(
    ("buckets", "order", "seed", "message"),
    [
        ([1, 2, 3], "shuffle", 2, "seed=1, this run has 2"),
        ([1, 2], "shuffle", 1, "size=3, this run has 2"),
        ([1, 2, 4], "shuffle", 1, "buckets_hash"),
        ([1, 2, 3], "solve_rate", 1, "kind='shuffle'"),
    ],
)
def test_state_of_another_run_is_refused(buckets, order, seed, message):
    state = sampler_of([1, 2, 3], seed=1).state()
    with pytest.raises(ValueError, match=message):
        PromptSampler.from_state(state, buckets, PromptOptions(order=order), seed)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sampler_of([]), "buckets is empty"),
        (lambda: sampler_of([1]).draw(0, -1), "count=-1"),
        (lambda: sampler_of([1]).update([0], [1.5]), "solve rate 1.5 of prompt 0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
