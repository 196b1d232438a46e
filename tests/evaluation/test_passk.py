"""pass@k: the estimator equals the mean over all subsets of k responses."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_sokoban_pipeline.envs.metrics import mean_pass_at_k, pass_at_k, powers_of_two


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [(4, 0, 2, 0.0), (4, 4, 2, 1.0), (4, 1, 1, 0.25), (4, 1, 2, 0.5), (4, 2, 2, 5 / 6), (5, 3, 4, 1.0), (1, 1, 1, 1.0)],
)
def test_pass_at_k(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected)


@pytest.mark.parametrize(("n", "expected"), [(0, []), (1, [1]), (2, [1, 2]), (7, [1, 2, 4]), (8, [1, 2, 4, 8])])
def test_powers_of_two(n, expected):
    assert powers_of_two(n) == expected


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_it_is_the_mean_over_all_subsets(responses, data):
    k = data.draw(st.integers(1, len(responses)))
    subsets = list(combinations(responses, k))
    exact = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(len(responses), sum(responses), k) == pytest.approx(exact)


def test_large_counts_do_not_overflow():
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5)


def test_mean_over_prompts():
    assert mean_pass_at_k([(4, 1), (4, 4), (5, 0)]) == pytest.approx({"1": 1.25 / 3, "2": 1.5 / 3, "4": 2 / 3})
    assert mean_pass_at_k([]) == {}


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_bad_counts_are_refused(n, c, k):
    with pytest.raises(ValueError, match=f"n={n}, c={c}, k={k}"):
        pass_at_k(n, c, k)
