"""Batching plans: worked examples, permutations, budgets and balance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_sokoban_pipeline.grpo.batching import plan_micro_batches
from geo_sokoban_pipeline.training.batch import split_steps

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


def flat(parts):
    return sorted(index for part in parts for index in part)


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "order", "expected"),
    [
        ([3, 9, 4, 8], 18, "length", [[1, 3], [2, 0]]),
        ([3, 9, 4, 8], 18, "given", [[0, 1], [2, 3]]),
        ([3, 50, 4], 10, "length", [[1], [2, 0]]),  # longer than the budget: alone
        ([5, 5, 5], 10, "length", [[0, 1], [2]]),  # ties keep their order
        ([], 10, "length", []),
    ],
)
def test_plan_micro_batches(lengths, max_tokens, order, expected):
    assert plan_micro_batches(lengths, max_tokens, order) == expected


@given(LENGTHS, st.integers(1, 200), st.sampled_from(["length", "given"]))
def test_plan_is_a_permutation_within_the_budget(lengths, max_tokens, order):
    batches = plan_micro_batches(lengths, max_tokens, order)
    assert flat(batches) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= max_tokens
    if order == "given":
        assert [index for batch in batches for index in batch] == list(range(len(lengths)))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(60, 400))
def test_bucketing_pads_little(lengths, max_tokens):
    """Padding of a bucket is at most its spread of lengths per episode, and the spreads add up to the whole range."""
    batches = plan_micro_batches(lengths, max_tokens)
    widest = max(len(batch) for batch in batches)
    waste = sum(len(batch) * max(lengths[index] for index in batch) for batch in batches) - sum(lengths)
    assert 0 <= waste <= widest * (max(lengths) - min(lengths))


@pytest.mark.parametrize(
    ("count", "options", "sizes"),
    [
        (9, {"groups_per_step": 5}, [5, 4]),
        (18, {"groups_per_step": 5}, [5, 5, 4, 4]),
        (3, {"groups_per_step": 5}, [3]),
        (2, {"groups_per_step": 5}, [2]),  # never no step
        (10, {"steps": 4}, [3, 3, 2, 2]),
        (2, {"steps": 4}, [1, 1]),
        (4, {}, [4]),
        (0, {"steps": 3}, []),
        (0, {}, []),
    ],
)
def test_split_steps(count, options, sizes):
    steps = split_steps(list(range(count)), **options)
    assert [len(step) for step in steps] == sizes
    assert [item for step in steps for item in step] == list(range(count))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan_micro_batches([1], 0), "max_tokens=0"),
        (lambda: plan_micro_batches([1, 0], 5), r"lengths\[1\]=0"),
        (lambda: plan_micro_batches([1], 5, "random"), "order='random'"),
        (lambda: split_steps([1], steps=1, groups_per_step=1), "give one of them"),
        (lambda: split_steps([1], steps=0), "steps=0"),
        (lambda: split_steps([1], groups_per_step=0), "groups_per_step=0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
