"""Paired tests: policies on the same prompts."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from geo_sokoban_pipeline.evaluation.metrics import mcnemar, paired_test
from geo_sokoban_pipeline.reporting.comparison import ComparedRun, compare_final


def outcomes(*values: str) -> dict[str, list[list[bool]]]:
    """One prompt for each text, with one row for each word of it and an episode for each letter."""
    return {f"p{at}": [[letter == "1" for letter in row] for row in value.split()] for at, value in enumerate(values)}


@pytest.mark.parametrize(
    ("gained", "lost", "p"),
    [
        (0, 0, 1.0),
        (5, 5, 1.0),
        (1, 0, 0.5),  # 2 * (1/2) - 1/2
        (5, 0, 2 / 32 - 1 / 32),
        (17, 7, 0.043),
    ],
)
def test_mcnemar_of_single_pairs(gained, lost, p):
    assert mcnemar([1] * gained + [-1] * lost + [0, 0]) == pytest.approx(p, abs=5e-4)
    assert mcnemar([-1] * gained + [1] * lost) == mcnemar([1] * gained + [-1] * lost)


@pytest.mark.parametrize("gains", [[3, -1, 2, 0, 5], [1, 1, 1, 1, -4], [7], [2, 2, -2], [6, -5, 4, 3, -2, 1, 1]])
def test_clustered_mcnemar_is_exact_over_all_signs(gains):
    sums = [abs(sum(chosen)) for chosen in itertools.product(*[(gain, -gain) for gain in gains])]
    total = abs(sum(gains))
    beyond, equal = (sum(size > total for size in sums), sum(size == total for size in sums))
    assert mcnemar(gains) == pytest.approx((beyond + equal / 2) / len(sums) if total else 1.0)


def test_of_many_clusters_it_is_the_test_of_yang_sun_and_hardin():
    gains = [(7 * at) % 11 - 4 for at in range(60)]
    statistic = sum(gains) ** 2 / sum(gain * gain for gain in gains)
    assert mcnemar(gains) == pytest.approx(math.erfc(math.sqrt(statistic / 2)), abs=0.003)


def test_the_same_prompts_decide_what_two_intervals_leave_open():
    # 60 of 100 against 70 of 100: the intervals overlap, but ten prompts were gained and none lost.
    first = outcomes(*["1"] * 60, *["0"] * 40)
    second = outcomes(*["1"] * 70, *["0"] * 30)
    found = paired_test(first, second)
    assert (found.prompts, found.clusters, found.gained, found.lost) == (100, 100, 10, 0)
    assert found.difference == pytest.approx(0.1)
    assert found.is_change and found.p_value < 0.01
    # About 1.96 standard errors of a share of 0.1 in 100 prompts.
    assert found.low == pytest.approx(0.1 - 1.96 * math.sqrt(0.09 / 100), abs=0.02)
    assert found.high == pytest.approx(0.1 + 1.96 * math.sqrt(0.09 / 100), abs=0.02)
    back = paired_test(second, first)
    assert (back.gained, back.lost, back.difference) == (0, 10, -found.difference)
    assert (back.low, back.high) == pytest.approx((-found.high, -found.low))
    assert paired_test(first, second) == found  # no chance in it


@pytest.mark.parametrize(
    ("prompts", "gained", "lost"), [(100, 0, 0), (64, 4, 0), (263, 2, 0), (640, 4, 0), (300, 1, 0)]
)
def test_what_so_few_changes_cannot_show_is_left_open(prompts, gained, lost):
    found = paired_test(outcomes(*"0" * prompts), outcomes(*"1" * gained, *"0" * (prompts - gained)))
    assert not found.is_change and found.low < 0 <= found.difference < found.high
    none = paired_test(outcomes(*"0" * prompts), outcomes(*"0" * prompts))
    assert none.high - none.low <= found.high - found.low


# Prompts, share gained, share lost.
@pytest.mark.parametrize(
    ("prompts", "up", "down"), [(64, 0.02, 0.02), (300, 0.01, 0.01), (300, 0.02, 0.005), (64, 0.3, 0.05)]
)
def test_coverage_of_a_difference(prompts, up, down):
    """The interval holds the true difference in at least 92 % of the samples, and hardly ever contradicts the test."""
    held = agreed = 0
    drawn = np.random.default_rng(1).multinomial(prompts, [up, down, 1 - up - down], size=300)
    for (gained, lost, _), times in Counter(map(tuple, drawn.tolist())).items():
        found = paired_test(
            outcomes(*"0" * gained, *"1" * lost, *"0" * (prompts - gained - lost)),
            outcomes(*"1" * gained, *"0" * (prompts - gained)),
        )
        held += times * (found.low <= up - down <= found.high)
        agreed += times * (found.is_change == (found.low > 0 or found.high < 0))
    assert held >= 0.92 * 300 and agreed >= 0.97 * 300


@pytest.mark.parametrize("copies", ["1 " * 8, "1" * 8], ids=["rows", "samples"])
def test_copies_and_samples_of_a_prompt_count_once(copies):
    single = paired_test(outcomes(*"000001"), outcomes(*"111110"))
    found = paired_test(
        outcomes(*[copies.replace("1", "0")] * 5, copies), outcomes(*[copies] * 5, copies.replace("1", "0"))
    )
    assert (found.prompts, found.clusters) == (6 * len(copies.split()), 6)
    assert (found.gained, found.lost, found.difference) == (40, 8, single.difference)
    assert (found.p_value, found.low, found.high) == (single.p_value, single.low, single.high)


def test_prompts_of_one_cluster_count_once():
    first, second = outcomes(*"0" * 12), outcomes(*"1" * 12)
    layouts = {f"p{at}": f"walls {at % 3}" for at in range(12)}
    apart, together = paired_test(first, second), paired_test(first, second, layouts)
    assert (together.prompts, together.clusters, together.p_value) == (12, 3, 2 * 0.5**3 - 0.5**3)
    assert apart.is_change and not together.is_change and together.low < apart.low


def test_prompts_that_only_one_has_played_are_left_out():
    first, second = {"a": [[True]], "b": [[False]], "e": []}, {"b": [[True]], "c": [[True]], "e": [[True]]}
    assert paired_test(first, second).prompts == 1
    assert paired_test({"a": [[True]]}, {"b": [[True]]}) is None
    found = paired_test(outcomes(*"1100"), outcomes(*"0110"))  # as many gained as lost
    assert (found.difference, found.p_value, found.is_change) == (0.0, 1.0, False)


class Table:
    """Sampled episodes of the prompts `t0`, `t1`, … as a part of `held_out`."""

    def __init__(self, successes: str) -> None:
        self.rows = [
            {"task_id": f"t{at}", "group_index": at, "sampling": '{"greedy": false}', "success": letter == "1"}
            for at, letter in enumerate(successes)
        ]

    def to_pylist(self) -> list[dict]:
        return self.rows


def test_final_policies_are_compared_whatever_their_number():
    """A run without a warm start has one policy, another has three; the last of each is its final one."""

    def run(*successes: str) -> ComparedRun:
        parts = {f"iter={at:05d}/part-000": lambda columns, one=one: Table(one) for at, one in enumerate(successes)}
        summary = {"policies": [f"policy {at}" for at in range(len(successes))], "cluster_of": {"t0": "a", "t1": "a"}}
        return ComparedRun(run="train_sokoban", run_id="r", metrics=[], summary=summary, held_out=parts, settings={})

    one, three = run("0011"), run("0000", "1111", "0111")
    found, back = compare_final(one, three), compare_final(three, one)
    assert (found.gained, found.lost, found.clusters) == (1, 0, 3)
    assert (back.gained, back.lost, back.clusters) == (0, 1, 3)
