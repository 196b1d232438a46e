"""Intervals: published values, the properties that the report relies on, coverage over clusters."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_sokoban_pipeline.envs.metrics import cluster_interval, count_solved, wilson_interval


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


# Clusters.


CLUSTERS = st.lists(
    st.integers(1, 12).flatmap(lambda size: st.tuples(st.integers(0, size), st.just(size))), min_size=1, max_size=70
)


@given(CLUSTERS)
def test_an_interval_over_clusters_holds_the_share_and_has_a_width(clusters):
    successes, sizes = map(list, zip(*clusters, strict=True))
    low, high = cluster_interval(successes, sizes)
    share = sum(successes) / sum(sizes)
    assert 0.0 <= low <= share <= high <= 1.0 and high - low > 1e-4
    failed = [size - won for won, size in clusters]
    assert cluster_interval(failed, sizes) == pytest.approx((1 - high, 1 - low), abs=1e-9)


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.integers(1, 9))
def test_copies_add_no_evidence(counts, copies):
    """Distinct prompts have the Wilson interval; copies that end alike leave it as it is."""
    solved, n = counts
    successes = [at < solved for at in range(n)] * copies
    row = count_solved(successes, [str(at) for at in range(n)] * copies)
    assert (row["episodes"], row["clusters"], row["solved"]) == (n * copies, n, solved * copies)
    assert (row["low"], row["high"]) == pytest.approx(wilson_interval(solved, n))


def test_unequal_copies_and_none():
    # 283 rows of 24 problems, 104 of them solved: the interval is about that of 24 trials, not of 283.
    clusters = [str(at % 24) for at in range(276)] + ["0"] * 7
    solved = [at in ("0", "2", "4", "5", "7", "12", "15", "20", "22") for at in clusters]
    row = count_solved(solved, clusters)
    low, high = wilson_interval(row["solve_rate"] * 24, 24)
    assert (row["low"], row["high"]) == pytest.approx((low, high), abs=0.06)
    assert count_solved([], [])["clusters"] == 0 and cluster_interval([], []) == (0.0, 1.0)


def test_resamples_without_spread_are_in_the_middle():
    """One in eight resamples holds halves alone: its share is the true one, and its error none."""
    low, high = cluster_interval([*[2] * 22, 0, 4], [4] * 24)
    assert low + high == pytest.approx(1.0, abs=1e-3) and 0.4 < low < 0.5


@pytest.mark.parametrize(
    ("successes", "sizes"), [([199, 0], [200, 1]), ([1, 0], [1, 200]), ([0, 1], [400, 1]), ([639, 0, 0], [640, 1, 1])]
)
def test_two_clusters_of_very_unequal_size_say_next_to_nothing(successes, sizes):
    low, high = cluster_interval(successes, sizes)
    assert low <= sum(successes) / sum(sizes) <= high and high - low > 0.9


# Clusters, about how many episodes each, correlation within them, share → least coverage; 95 % are wanted.
SIMULATED = {
    "ten": (10, 11, 0.3, 0.5, 0.92),
    "ten, independent": (10, 11, 0.0, 0.9, 0.92),
    "24": (24, 11, 0.3, 0.3, 0.92),
    "24, much alike": (24, 11, 0.6, 0.5, 0.92),
    "24, one each": (24, 1, 0.0, 0.7, 0.92),
    "57": (57, 11, 0.1, 0.7, 0.92),
    "57, hardly any": (57, 11, 0.6, 0.1, 0.92),
    "200": (200, 11, 0.3, 0.9, 0.92),
    # Few clusters hold a success at all: their spread alone gives 0.88 to 0.9.
    "20, hardly any": (20, 11, 0.3, 0.1, 0.9),
    "24, much alike, hardly any": (24, 11, 0.6, 0.1, 0.92),
    "57, much alike, hardly any": (57, 11, 0.6, 0.05, 0.92),
}


@pytest.mark.parametrize(("clusters", "size", "alike", "share", "least"), SIMULATED.values(), ids=SIMULATED)
def test_coverage(clusters, size, alike, share, least):
    """Beta-binomial clusters of unequal sizes: the interval holds the true share in 92 to 97 % of the samples."""
    generator, times = np.random.default_rng(4), min(400, 30_000 // clusters)
    sizes = generator.integers(1, 2 * size, (times, clusters)) if size > 1 else np.ones((times, clusters), int)
    spread = 1 / alike - 1 if alike else None
    rates = generator.beta(share * spread, (1 - share) * spread, sizes.shape) if spread else share
    successes = generator.binomial(sizes, rates)
    intervals = [cluster_interval(*sample) for sample in zip(successes.tolist(), sizes.tolist(), strict=True)]
    assert least <= np.mean([low <= share <= high for low, high in intervals]) <= 0.97
