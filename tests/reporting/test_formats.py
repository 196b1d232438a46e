"""Numbers as people read them."""

from __future__ import annotations

import math

import pytest

from geo_sokoban_pipeline.reporting.charts import Axis, padded_range, round_step, tick_text
from geo_sokoban_pipeline.reporting.formats import count, duration, joined, number, percent, percent_range, signed


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (percent(0.6625), "66.2 %"),
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
        (joined(["a"]), "a"),
        (joined(["a", "b", "c"]), "a, b and c"),
        (joined([]), ""),
    ],
)
def test_number_as_text(written, expected):
    assert written.replace("\u202f", " ") == expected


@pytest.mark.parametrize(
    ("least", "step"), [(0.9, 1), (1.0, 1), (1.1, 2), (2.3, 2.5), (0.03, 0.05), (70, 100), (1e-7, 1e-7)]
)
def test_step_is_round_and_large_enough(least, step):
    assert round_step(least) == pytest.approx(step)


@pytest.mark.parametrize(
    ("low", "high", "whole", "ticks"),
    [(0, 1, False, [0, 0.2, 0.4, 0.6, 0.8, 1]), (0, 2, True, [0, 1, 2]), (-0.3, 0.3, False, [-0.2, 0, 0.2])],
)
def test_ticks(low, high, whole, ticks):
    assert Axis(low, high, 0, 100).ticks(5, whole) == pytest.approx(ticks)


@pytest.mark.parametrize(
    ("value", "step", "text"),
    [(0.2, 0.2, "0.2"), (0.0, 0.2, "0.0"), (25, 25, "25"), (0.25, 0.25, "0.25"), (3e-7, 2e-8, "3e-7")],
)
def test_tick_text(value, step, text):
    assert tick_text(value, step) == text


@pytest.mark.parametrize("values", [[0.0], [1e-9, 1e-9], [-3.0, -3.0], [0.0, 5.0], [2.0, 2.1]])
def test_axis_has_room_for_every_value(values):
    low, high = padded_range(values)
    assert low <= min(values) and max(values) <= high and low < high
