"""Batching plans: worked example of slime, permutations, budgets and balance."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_sokoban_pipeline.grpo.batching import (
    first_fit,
    partition_balanced,
    plan_micro_batches,
    schedule_ranks,
    split_steps,
)

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


def padded_tokens(lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> int:
    """Tokens that a plan computes, padding included."""
    return sum(len(batch) * max(lengths[index] for index in batch) for batch in batches)


def flat(parts):
    return sorted(index for part in parts for index in part)


def test_two_ranks_of_the_seed():
    schedule = schedule_ranks([5, 4, 3, 6, 2, 9, 12, 1], ranks=2, max_tokens=10, global_batch=4)
    assert schedule.partitions == [[0, 1, 4, 6], [2, 3, 5, 7]]
    assert schedule.micro_batch_counts == [1, 2]
    assert schedule.micro_batches[0] == [[[0, 1]], [[4], [6]]]


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
    waste = padded_tokens(lengths, batches) - sum(lengths)
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
    ("lengths", "max_tokens", "expected"),
    [([5, 4, 3, 6], 10, [[0, 1], [2, 3]]), ([2, 9, 12, 1], 10, [[0, 3], [1], [2]]), ([], 5, [])],
)
def test_first_fit(lengths, max_tokens, expected):
    assert first_fit(lengths, max_tokens) == expected


@given(LENGTHS, st.integers(1, 100))
def test_first_fit_leaves_no_two_packs_that_fit_together(lengths, max_tokens):
    packs = first_fit(lengths, max_tokens)
    assert flat(packs) == list(range(len(lengths)))
    totals = [sum(lengths[index] for index in pack) for pack in packs]
    assert all(total <= max_tokens or len(pack) == 1 for total, pack in zip(totals, packs, strict=True))
    assert all(a + b > max_tokens for place, a in enumerate(totals) for b in totals[place + 1 :])


@pytest.mark.parametrize(
    ("lengths", "parts", "equal_size", "expected"),
    [
        ([8, 7, 6, 5, 4], 2, False, [[0, 2], [1, 3, 4]]),  # the classic: 14 against 16, though 15 each is possible
        ([5, 4, 3, 6], 2, False, [[0, 1], [2, 3]]),
        ([1, 1, 1, 9], 2, True, [[0, 2], [1, 3]]),
        ([4], 3, False, [[], [], [0]]),
        ([], 2, False, [[], []]),
    ],
)
def test_partition_balanced(lengths, parts, equal_size, expected):
    assert partition_balanced(lengths, parts, equal_size=equal_size) == expected


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 5))
def test_partition_differs_by_at_most_the_longest(lengths, parts):
    cells = partition_balanced(lengths, parts)
    assert len(cells) == parts and flat(cells) == list(range(len(lengths)))
    sums = [sum(lengths[index] for index in cell) for cell in cells]
    assert max(sums) - min(sums) <= max(lengths, default=0)
    even = lengths[: len(lengths) // parts * parts]
    assert {len(cell) for cell in partition_balanced(even, parts, equal_size=True)} == {len(even) // parts}


@given(LENGTHS, st.integers(1, 4), st.integers(1, 3), st.integers(1, 80))
def test_ranks_meet_in_every_step(lengths, ranks, per_rank, max_tokens):
    batch = ranks * per_rank
    schedule = schedule_ranks(lengths, ranks=ranks, max_tokens=max_tokens, global_batch=batch)
    whole = len(lengths) // batch * batch
    assert flat(schedule.partitions) == list(range(whole))
    assert all([len(step) for step in rank] == schedule.micro_batch_counts for rank in schedule.micro_batches)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan_micro_batches([1], 0), "max_tokens=0"),
        (lambda: plan_micro_batches([1, 0], 5), r"lengths\[1\]=0"),
        (lambda: plan_micro_batches([1], 5, "random"), "order='random'"),
        (lambda: split_steps([1], steps=1, groups_per_step=1), "give one of them"),
        (lambda: split_steps([1], steps=0), "steps=0"),
        (lambda: split_steps([1], groups_per_step=0), "groups_per_step=0"),
        (lambda: partition_balanced([1], 0), "parts=0"),
        (lambda: partition_balanced([1], 2, equal_size=True), "equal size"),
        (lambda: schedule_ranks([1], ranks=2, max_tokens=5, global_batch=3), "global_batch=3"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
