"""Paired tests: policies on the same prompts."""

from __future__ import annotations

import math

import pytest

from geo_sokoban_pipeline.evaluation.metrics import mcnemar, paired_test


def outcomes(*values: str) -> dict[str, list[bool]]:
    return {f"p{at}": [letter == "1" for letter in value] for at, value in enumerate(values)}


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
def test_mcnemar(gained, lost, p):
    assert mcnemar(gained, lost) == pytest.approx(p, abs=5e-4)
    assert mcnemar(lost, gained) == mcnemar(gained, lost)


def test_the_same_prompts_decide_what_two_intervals_leave_open():
    # 60 of 100 against 70 of 100: the Wilson intervals overlap, but ten prompts were gained and none lost.
    first = outcomes(*["1"] * 60, *["0"] * 40)
    second = outcomes(*["1"] * 70, *["0"] * 30)
    found = paired_test(first, second)
    assert (found.prompts, found.gained, found.lost) == (100, 10, 0)
    assert found.difference == pytest.approx(0.1)
    assert found.is_change and found.p_value < 0.01
    # About 1.96 standard errors of a share of 0.1 in 100 prompts.
    assert found.low == pytest.approx(0.1 - 1.96 * math.sqrt(0.09 / 100), abs=0.02)
    assert found.high == pytest.approx(0.1 + 1.96 * math.sqrt(0.09 / 100), abs=0.02)
    back = paired_test(second, first)
    assert (back.gained, back.lost, back.difference) == (0, 10, -found.difference)
    assert paired_test(first, second) == found  # no chance in it


def test_as_many_gained_as_lost_is_no_change():
    found = paired_test(outcomes(*"1100"), outcomes(*"0110"))
    assert (found.difference, found.p_value, found.is_change) == (0.0, 1.0, False)


def test_several_episodes_a_prompt_are_compared_by_their_means():
    found = paired_test(outcomes(*["10"] * 30), outcomes(*["11"] * 30))
    assert (found.p_value, found.gained, found.difference) == (None, None, 0.5)
    assert (found.low, found.high, found.is_change) == (0.5, 0.5, True)


def test_prompts_that_only_one_has_played_are_left_out():
    first, second = {"a": [True], "b": [False], "e": []}, {"b": [True], "c": [True], "e": [True]}
    assert paired_test(first, second).prompts == 1
    assert paired_test({"a": [True]}, {"b": [True]}) is None
