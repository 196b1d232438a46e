"""Wilson intervals: published values, and the properties that the report relies on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_sokoban_pipeline.envs.metrics import wilson_interval


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (0, 10, 0.0, 0.277533),
        (10, 10, 0.722467, 1.0),
        (81, 263, 0.255266, 0.366191),  # Newcombe 1998, table I: 0.2553 to 0.3662
        (15, 148, 0.062386, 0.160526),  # 0.0624 to 0.1605
        (1, 29, 0.006113, 0.171755),  # 0.0061 to 0.1718
        (0, 0, 0.0, 1.0),
    ],
)
def test_published_values(successes, n, low, high):
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


COUNTS = st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@given(COUNTS, st.floats(0.1, 5))
def test_interval_holds_the_share_and_lies_in_range(counts, z):
    successes, n = counts
    low, high = wilson_interval(successes, n, z)
    assert 0.0 <= low <= successes / n <= high <= 1.0
    assert high > low


@given(COUNTS)
def test_failures_mirror_successes_and_more_trials_narrow(counts):
    successes, n = counts
    low, high = wilson_interval(successes, n)
    mirrored = wilson_interval(n - successes, n)
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high), abs=1e-12)
    wide = wilson_interval(4 * successes, 4 * n)
    assert wide[1] - wide[0] < high - low


@pytest.mark.parametrize(("successes", "n", "z"), [(3, 2, 1.96), (-1, 2, 1.96), (0, -1, 1.96), (1, 2, 0.0)])
def test_bad_counts_are_refused(successes, n, z):
    with pytest.raises(ValueError, match="="):
        wilson_interval(successes, n, z)
