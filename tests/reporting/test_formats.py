"""Numbers as people read them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from geo_sokoban_pipeline.formats import (
    count,
    describe_policy,
    duration,
    find_stale,
    joined,
    number,
    percent,
    percent_range,
    signed,
    size,
    type_name,
)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (percent(0.6625), "66.2 %"),
        (percent(264 / 640), "41.2 %"),  # a tie goes to the even digit, as in the browser
        (percent(1), "100.0 %"),
        (percent(None), "–"),
        (percent(math.nan), "–"),
        (percent_range(0.625, 0.698), "62.5–69.8 %"),
        (percent_range(None, 1.0), "–"),
        (number(-0.5), "−0.50"),
        (number(math.inf), "–"),
        (count(51200), "51 200"),
        (signed(0.1234), "+0.12"),
        (signed(-0.01), "−0.01"),
        (signed(0.0), "0.00"),
        (signed(None), "–"),
        (duration(0.0123), "12 ms"),
        (duration(3.21), "3.2 s"),
        (duration(250.0), "4 min 10 s"),
        (duration(3900), "1 h 5 min"),
        (duration(None), "–"),
        (size(0), "0 B"),
        (size(999), "999 B"),
        (size(1500), "1.5 kB"),
        (size(2.5e9), "2.5 GB"),
        (joined(["a"]), "a"),
        (joined(["a", "b", "c"]), "a, b and c"),
        (joined([]), ""),
    ],
)
def test_number_as_text(written, expected):
    assert written.replace("\u202f", " ") == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "None"),
        (1, "an int"),
        (True, "a bool"),
        (1.0, "a float"),
        ([], "a list"),
        ({}, "a dict"),
        (ValueError(), "a ValueError"),
        (AttributeError(), "an AttributeError"),
        (np.uint8(1), "a uint8"),
        (np.int64(1), "an int64"),
        (np.zeros(1), "a ndarray"),
    ],
)
def test_type_with_its_article(value, expected):
    assert type_name(value) == expected


def of_checkpoint(iteration):
    """A summary whose final policy is the checkpoint of an iteration."""
    start = {"iteration": None, "policy_version": 0, "hash": "b" * 32}
    final = {"iteration": iteration, "policy_version": (iteration or 0) + 1, "hash": "0123456789ab" + "c" * 20}
    return {"policies": ["warm_start", "final"], "checkpoints": {"warm_start": start, "final": final}}


@pytest.mark.parametrize(
    ("summary", "stored", "stale"),
    [
        (of_checkpoint(0), 4, "the checkpoint after 1 of 4 iterations"),
        (of_checkpoint(3), 4, None),
        (of_checkpoint(6), 4, "a checkpoint (after 7 iterations) that is no longer stored"),
        (of_checkpoint(4), 4, "a checkpoint (after 5 iterations) that is no longer stored"),
        (of_checkpoint(-1), 4, "the policy that GRPO started from, after 0 of 4 iterations"),
        (of_checkpoint(None), 4, "an unknown checkpoint"),
        ({"policies": ["final"]}, 4, "an unknown checkpoint"),  # stored before summaries named it
        ({"policies": ["final"]}, 0, None),  # a run without checkpoints
        ({}, 4, None),
    ],
)
def test_an_evaluation_of_another_checkpoint_is_called_one(summary, stored, stale):
    assert find_stale(summary, stored) == stale


def test_an_evaluated_policy_has_a_name():
    assert describe_policy(of_checkpoint(2), "final") == "after 3 iterations, content 0123456789ab"
    assert describe_policy(of_checkpoint(2), "warm_start") == "content bbbbbbbbbbbb"
    assert describe_policy({}, "final") == "–"
