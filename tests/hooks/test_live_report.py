"""How often the page of a run that goes on is written."""

from __future__ import annotations

import pytest

from geo_sokoban_pipeline.hooks.live_report import ReportBudget
from geo_sokoban_pipeline.reporting.facts import write_progress


def test_the_first_page_is_always_written():
    budget = ReportBudget(0.01)
    assert budget.allows(0.0)
    budget.note(2.0)
    assert not budget.allows(100.0)


def test_share_zero_means_at_the_end_alone():
    assert not ReportBudget(0.0).allows(1e9)


@pytest.mark.parametrize("share", [0.01, 0.1, 1.0])
def test_all_pages_after_the_first_stay_within_the_share(share):
    """Iterations of a second and pages that grow slower and slower: what they take is the share at most."""
    budget, elapsed, pages = ReportBudget(share), 0.0, 0
    for iteration in range(20_000):
        elapsed += 1.0
        if budget.allows(elapsed):
            cost = 0.2 + iteration * 1e-5
            budget.note(cost)
            elapsed += cost
            pages += 1
        if budget.spent > 0.21:
            assert budget.spent <= share * elapsed + 0.001
    assert pages > 100


@pytest.mark.parametrize(
    ("done", "total", "sentence"),
    [
        (1, 150, "The training goes on: 1 of 150 iterations is stored."),
        (12, 150, "The training goes on: 12 of 150 iterations are stored."),
        (12, None, "The training goes on: 12 iterations are stored."),
    ],
)
def test_the_headline_says_how_far_it_is(done, total, sentence):
    assert write_progress(done, total).main == sentence
