"""Numbers as people read them."""

from __future__ import annotations

import math

import pytest

from geo_sokoban_pipeline.formats import count, duration, joined, number, percent, percent_range, signed


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
