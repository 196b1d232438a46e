"""Numbers as people read them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from geo_sokoban_pipeline.formats import count, duration, joined, number, percent, percent_range, signed, type_name


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
