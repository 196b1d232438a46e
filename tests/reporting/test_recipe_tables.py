"""Compared recipes: intervals of pairs, Holm's p values, the sentence; the committed page is that of its results."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from geo_sokoban_pipeline.reporting.recipe_tables import compare_recipes, render_recipes
from geo_sokoban_pipeline.reporting.study_docs import (
    COMPARISONS,
    read_section,
    render_docs,
    render_sections,
    study_marker,
)

ROOT = Path(__file__).parents[2]
OWN = [300, 310, 290, 305, 320]


def recipe(name, solved, clipped=0.01, spent=100.0, weights=None, **changes):
    return {
        "name": name,
        "changes": changes,
        "seeds": [
            {
                "seed": 30 + number,
                "sampled": [value, 640],
                "greedy": [value + 6, 640],
                "cpu_seconds": spent + number,
                "spent": round((spent + number) / (100.0 + number), 3),
                "iterations": 150,
                "clipped": clipped,
                "weights_clipped": weights,
            }
            for number, value in enumerate(solved)
        ],
    }


def planned(recipes):
    return {one["name"]: one["changes"] for one in recipes}


def compare(*recipes):
    return compare_recipes([recipe("", OWN), *recipes], planned(recipes))


def results(*recipes, further=()):
    return {
        "planned": planned([*recipes, *further]),
        "study": "estimators",
        "task": "sokoban",
        "seeds": [{"seed": 30 + number} for number in range(5)],
        "levels": {"distinct": 640},
        "recipes": [recipe("", OWN), *recipes],
    }


def test_differences_are_paired_by_seed():
    gaps = [20, 26, 18, 24, 22]
    _, one = compare(recipe("one", [a + b for a, b in zip(OWN, gaps, strict=True)]))
    shares = np.array(gaps) / 640
    assert one.difference == pytest.approx(shares.mean())
    low, high = stats.t.interval(0.95, 4, loc=shares.mean(), scale=stats.sem(shares))
    assert (one.difference - one.half, one.difference + one.half) == pytest.approx((low, high))
    assert one.p == pytest.approx(stats.ttest_1samp(shares, 0).pvalue)
    assert one.rates["sampled"] == pytest.approx(np.mean(np.add(OWN, gaps)) / 640)
    assert one.rates["greedy"] == pytest.approx(one.rates["sampled"] + 6 / 640)


def test_p_values_and_intervals_of_many_recipes():
    """Holm: the smallest times their number, the next times one less, and never below one before it."""
    random = np.random.default_rng(0)
    many = [
        recipe(f"r{k}", [a + int(v) for a, v in zip(OWN, random.normal(3 * k, 6, 5), strict=True)]) for k in range(6)
    ]
    alone = [compare(one)[1] for one in many]
    found = compare(*many)[1:]
    order = np.argsort([one.p for one in alone])
    wanted = np.minimum(1, np.maximum.accumulate(np.array([alone[k].p for k in order]) * np.arange(6, 0, -1)))
    assert [found[place].p for place in order] == pytest.approx(wanted.tolist())
    ratio = stats.t.ppf(1 - 0.025 / 6, 4) / stats.t.ppf(0.975, 4)
    assert [one.half for one in found] == pytest.approx([ratio * one.half for one in alone])


def test_planned_recipes_count_before_they_have_run():
    """Planned recipes count, and those of another kind do not."""
    one = recipe("one", [a + b for a, b in zip(OWN, [20, 26, 18, 24, 22], strict=True)], grpo={"advantage": "rloo"})
    plan = planned([one]) | {
        "same kind": {"grpo": {"advantage_args": {"gamma": 1.0}}},
        "other kind": {"grpo": {"loss": "gspo", "loss_args": {}}},
        "none": {"loop": {"iterations": 5}},
    }
    (_, alone), (_, among) = compare(one), compare_recipes([recipe("", OWN), one], plan)
    assert among.p == pytest.approx(2 * alone.p)
    assert among.half / alone.half == pytest.approx(stats.t.ppf(0.9875, 4) / stats.t.ppf(0.975, 4))


def test_of_equal_recipes_few_tables_name_a_difference():
    """At most 5 % of tables without any difference; 300 tables of 8 recipes."""
    random = np.random.default_rng(1)
    wrong = 0
    for _ in range(300):
        base = random.binomial(640, 0.7, 5)
        rows = [recipe("", base)] + [recipe(f"r{k}", random.binomial(640, 0.7, 5)) for k in range(8)]
        wrong += any(one.p < 0.05 for one in compare_recipes(rows, planned(rows[1:]))[1:])
    assert wrong <= 27  # 95 % of binomial(300, 0.05) is at most 22, 99.9 % at most 27


def test_a_table_and_what_is_certain():
    text = render_recipes(
        results(
            recipe(
                "better", [a + g for a, g in zip(OWN, [60, 66, 58, 64, 62], strict=True)], grpo={"advantage": "rloo"}
            ),
            recipe("same", [a + g for a, g in zip(OWN, [9, -20, 12, -8, 5], strict=True)], clipped=None, spent=150.0),
            recipe("equal", OWN, loop={"iterations": 9}, weights=0.02),
            further=[recipe("later", OWN)],
        )
    )
    rows = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if line.startswith("| ")}
    assert list(rows)[2:] == ["its own", "better", "same", "equal"]
    assert "`grpo.advantage=rloo`" in rows["better"] and "+9.7 [+" in rows["better"]
    assert rows["same"].split(" | ")[-2:] == ["–", "– |"] and "| 1.49 |" in rows["same"]
    assert "`loop.iterations=9`" in rows["equal"] and "| 1.00 |" in rows["equal"]
    assert "**Better for certain**: better." in text and "No difference is shown for same [" in text
    assert rows["equal"].replace("\u202f", " ").split(" | ")[-2:] == ["1.00 %", "2.00 % |"]
    assert text.endswith("Not finished: later.")
    assert "Nothing differs" in render_recipes(results(recipe("equal", OWN)))
    assert "differs" not in render_recipes(results(further=[recipe("later", OWN)]))


@pytest.mark.parametrize("name", COMPARISONS)
def test_committed_page_is_what_its_results_give(name):
    page, stored = ROOT / "docs" / "estimators.md", ROOT / "docs" / "results" / f"{name}.json"
    written = read_section(page.read_text(encoding="utf-8"), study_marker(name), page)
    if not stored.is_file():
        assert not written, f"the page has a section of {name}, but docs/results no {stored.name}"
        return
    found = json.loads(stored.read_text(encoding="utf-8"))
    assert [written] == [section.strip() for section in render_sections(found)]


def test_only_page_and_results_are_written(tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "estimators.md").write_text("<!-- study:estimators:begin --><!-- study:estimators:end -->")
    written = render_docs(docs, results(recipe("equal", OWN)))
    assert list(written) == ["docs/results/estimators.json", "docs/estimators.md"]
