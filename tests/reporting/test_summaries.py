"""Headline, tables and curves from the numbers of a run."""

from __future__ import annotations

import html
import math
import re
from functools import partial

import pytest

from geo_sokoban_pipeline.envs.sokoban.task import SOKOBAN
from geo_sokoban_pipeline.evaluation.metrics import PairedTest
from geo_sokoban_pipeline.reporting import curves
from geo_sokoban_pipeline.reporting import notebook as show
from geo_sokoban_pipeline.reporting.facts import write_headline
from geo_sokoban_pipeline.reporting.report_tables import (
    data_table,
    difficulty_chart,
    evaluation_rows,
    kind_tables,
    read_evaluation,
    timings,
)
from reporting.run_numbers import make_data_report, make_metrics, make_summary


def _row(policy, low, rate, high, mode="sampled"):
    return {"policy": policy, "mode": mode, "solve_rate": rate, "low": low, "high": high, "episodes": 9, "solved": 3}


SAME = "GRPO made no significant change to the solve rate"


@pytest.mark.parametrize(
    ("first", "last", "change", "main", "verdict"),
    [
        # The verdict of the intervals.
        ((0.3, 0.4, 0.45), (0.6, 0.7, 0.8), None, "GRPO raised the solve rate from 40.0 %", "do not overlap"),
        ((0.6, 0.7, 0.8), (0.3, 0.4, 0.45), None, "GRPO lowered the solve rate from 70.0 %", "do not overlap"),
        ((0.3, 0.4, 0.5), (0.4, 0.45, 0.6), None, f"{SAME}: 40.0 %", "overlap, so"),
        ((0.2, 0.28, 0.4), (0.2, 0.23, 0.3), None, f"{SAME}: 28.0 %", "overlap, so"),
        ((0, 0, 0.1), (0, 0, 0.1), None, f"{SAME}: 0.0 %", "overlap, so"),
        # Intervals that overlap leave open what the same prompts decide, and the other way round.
        (
            (0.3, 0.4, 0.5),
            (0.35, 0.45, 0.55),
            PairedTest(640, 0.05, 0.02, 0.08, 50, 18, 0.0001, 640),
            "raised",
            "+5.0 points [2.0 to 8.0]: 50 gained, 18 lost",
        ),
        ((0, 0.4, 0.5), (0, 0.4, 0.5), PairedTest(640, 0.05, -0.01, 0.1, 50, 40, 0.3, 640), SAME, "p = 0.300"),
        (
            (0.3, 0.4, 0.5),
            (0.35, 0.45, 0.55),
            PairedTest(640, 0.05, 0.02, 0.08, 50, 18, 0.02, 57),
            "raised",
            "Over the same 640 levels of 57 wall layouts,",
        ),
        ((0, 0.4, 1), (0, 0.5, 1), PairedTest(1, 0.05, -0.2, 0.3, 1, 0, 0.5, 1), SAME, "Over the same 1 level, the"),
    ],
)
def test_headline_says_what_intervals_or_the_same_prompts_say(first, last, change, main, verdict):
    rows = [_row("a", *first), _row("b", *last)]
    summary = {"task": "sokoban", "policies": ["a", "b"], "prompts": change.prompts if change else 640, "rows": rows}
    headline = write_headline(summary, change)
    assert main in headline.main.replace("\u202f", " ")
    assert verdict in headline.further[0].replace("\u202f", " ")
    assert [tile["label"] for tile in headline.tiles] == ["a, sampled", "b, sampled"]


@pytest.mark.parametrize(
    ("summary", "text"),
    [
        ({"prompts": 1, "task": "sokoban", "layouts": 1}, "On 1 held-out level of 1 wall layout GRPO"),
        ({"prompts": 2, "task": "sokoban", "layouts": 2}, "On 2 held-out levels of 2 wall layouts GRPO"),
        ({"prompts": 1, "task": "geo3k", "families": 1, "answers": 1}, "On 1 held-out problem (1 family, 1 distinct"),
        ({"prompts": 283, "clusters": 24, "task": "geo3k"}, "On 283 held-out problems, 24 distinct, GRPO"),
        ({"prompts": 3, "clusters": 3, "task": "no longer registered"}, "On 3 held-out prompts GRPO"),
        ({"prompts": 41, "task": "geo3k", "answers": 8}, "On 41 held-out problems (8 distinct answers) GRPO"),
    ],
)
def test_one_is_no_plural(summary, text):
    rows = [_row("warm_start", 0.1, 0.2, 0.3), _row("final", 0.4, 0.5, 0.6)]
    headline = write_headline({"policies": ["warm_start", "final"], "rows": rows, **summary})
    assert text in headline.main
    assert "after the warm start" in headline.main


@pytest.mark.parametrize("task", ["sokoban", "geo3k_multi_turn"])
def test_a_run_without_a_warm_start_does_not_speak_of_one(task):
    rows = [_row("start", 0.0, 0.0, 0.1), _row("final", 0.0, 0.0, 0.1)]
    rows = [row | {"first_attempt": row} for row in rows]
    summary = {"task": task, "turn_limit": 3, "policies": ["start", "final"], "prompts": 9, "rows": rows}
    headline = write_headline(summary)
    assert ("0.0 %" in " ".join(headline.further).replace("\u202f", " ")) == (task != "sokoban")
    assert "0.0 % [0.0–10.0 %] before GRPO, 0.0 %" in headline.main.replace("\u202f", " ")
    assert "warm start" not in " ".join([headline.main, *headline.further, *(tile["label"] for tile in headline.tiles)])


def test_headlines_of_a_whole_run_and_of_one_policy():
    headline = write_headline(make_summary())
    text = " ".join([headline.main, *headline.further]).replace("\u202f", " ")
    assert "On 640 held-out levels of 57 wall layouts GRPO raised the solve rate from 41.2 % [37.5–45.1 %]" in text
    assert "With blank images it drops to 12.2 %, so it does use the image." in text and len(headline.tiles) == 4
    summary = {"task": "sokoban", "policies": ["seed2@best"], "prompts": 5, "rows": [_row("seed2@best", 0.1, 0.2, 0.3)]}
    assert write_headline(summary).main.startswith("On 5 held-out levels seed2@best solves 20.0")


@pytest.mark.parametrize("summary", [{}, {"rows": []}, {"policies": ["final"], "rows": []}, {"policies": None}])
def test_headline_without_an_evaluation(summary):
    assert write_headline(summary).main == "No evaluation is stored for this run."
    assert evaluation_rows(summary) == []
    assert kind_tables(summary) == [] and difficulty_chart(summary) is None


def test_evaluation_table():
    tables = read_evaluation(make_summary())
    assert tables.powers == ["1", "2"]
    labels = {row["label"]: row for row in tables.rows}
    assert labels["after GRPO, sampled"]["is_policy"] and not labels["solver (optimal)"]["is_policy"]
    low, rate, high = labels["after GRPO, sampled"]["bar"]
    assert low < rate < high
    lines = re.findall("<tr.*?</tr>", show.show_evaluation(make_summary()).data, re.DOTALL)
    (line,) = (line for line in lines if "warm start, sampled" in line)
    assert re.findall("<td>(.*?)</td>", line)[-2:] == ["–", "–"], "pass@k"
    bare = show.show_evaluation({"rows": [{"policy": "final"}]}).data.split("<tbody>")[1].partition("</tbody>")[0]
    assert re.sub("<.*?>", " ", bare).split() == ["after", "GRPO", *["–"] * 4] and 'class="range ' not in bare


def test_timings_add_up():
    rows = timings(make_metrics(50))
    assert [row.name for row in rows][-2:] == ["Other", "Iteration"]
    assert sum(row.share for row in rows if not row.is_part) == pytest.approx(2)
    assert "Validation (3 of 50 iterations)" in [row.name for row in rows]
    place = next(place for place, row in enumerate(rows) if row.name.startswith("Saving"))
    saving, episodes = rows[place : place + 2]
    assert (saving.mean, saving.total) == (pytest.approx(0.05), pytest.approx(2.5))
    assert (episodes.mean, episodes.is_part) == (pytest.approx(0.02), True)


@pytest.mark.parametrize("rows", [[], [{"iteration": 0}], [{"perf/step_time": None}], [{"perf/step_time": math.nan}]])
def test_run_that_was_not_timed(rows):
    assert timings(rows) == []


def test_data_table():
    table = data_table(
        make_data_report() | {"rows_rejected": 3, "rejected_reasons": {"no player": 2, "ragged": 1}}, SOKOBAN
    )
    assert table.columns[:4] == ["levels", "distinct", "layouts", "1"]
    assert [name for name, _ in table.lines] == ["train", "validation", "eval"]
    notes = " ".join(table.notes).replace("\u202f", " ")
    assert "0 layouts and 0 levels occur in more than one split" in notes
    assert "3 of 7 040 rows were rejected: no player (2) and ragged (1)." in notes


@pytest.mark.parametrize("report", [None, {}, {"splits": {}}])
def test_no_account_of_the_data(report):
    assert data_table(report, SOKOBAN) is None


def test_curves_of_a_run():
    rows, validation = make_metrics(), partial(curves.validation_series, mode="sampled", name="", colour="")
    names = ["training", "training (mean of 9)", "validation, greedy", "validation, sampled"]
    assert [line.name for line in curves.success_chart(rows, SOKOBAN.words).series] == names
    assert [x for x, _ in validation(rows).points][:3] == [0, 25, 50]
    titles = [chart.title for chart in curves.health_charts(rows)]
    assert "Entropy" in titles and "Truncated episodes" not in titles  # always 0
    # Validation after every iteration counts from one; before the first one, from zero.
    rows = [{"iteration": at, "eval/validation/sampled_solve_rate": 0.1} for at in range(3)]
    assert [x for x, _ in validation(rows).points] == [1, 2, 3]
    rows[0]["eval/start/sampled_solve_rate"] = 0.05
    assert validation(rows).points == [(0, 0.05), (1, 0.1), (2, 0.1), (3, 0.1)]


@pytest.mark.parametrize(
    ("order", "words"),
    [("shuffle", ""), ("solve_rate", "by the solve rate of their kind"), ("prompt_solve_rate", "by their solve rates")],
)
def test_how_training_draws_is_said_where_it_matters(order, words):
    note = curves.success_chart(make_metrics(), SOKOBAN.words, order=order).note
    assert words in note and bool(words) == bool(note)


def test_curves_of_training_episodes():
    kinds = {str(at): [{"iteration": 0, "success": 0.1}, {"iteration": 1, "success": 0.2}] for at in range(1, 11)}
    chart = curves.kind_chart(kinds, SOKOBAN.words, "optimal length")
    assert [line.name for line in chart.series] == ["1", "3", "5", "6", "8", "10"]
    assert curves.kind_chart({"1": kinds["1"]}, SOKOBAN.words, "optimal length") is None
    rows = [{"iteration": at, "part/final_bonus": 0.5, "part/format": 0.0} for at in range(3)]
    assert [line.name for line in curves.parts_chart(rows, ["final_bonus", "format"]).series] == ["final bonus"]


def test_unusable_metrics_are_left_out_and_single_and_constant_points_are_drawn():
    for value in (None, math.nan, "high", True):
        rows = [{"iteration": 0, "rollout/success_rate": value}, {"iteration": 1}]
        assert curves.success_chart(rows, SOKOBAN.words) is None
    for value in (0.0, 1e-9, -5.0, 1e12):
        for count in (1, 3):
            svg = curves.reward_chart([{"iteration": at, "rollout/raw_reward": value} for at in range(count)]).svg
            assert "nan" not in svg and "inf" not in svg


def test_pointed_values_are_those_of_every_line_at_one_x():
    chart = curves.success_chart(make_metrics(7), SOKOBAN.words)
    assert "var(--final)" in chart.svg and not re.search(r"#[0-9a-f]{6}|url\(|<style|<script", chart.svg)
    places = [html.unescape(text).split("\n") for text in re.findall(r'data-at="([^"]*)"', chart.svg)]
    assert [place[0] for place in places] == [f"iterations trained: {at}" for at in range(7)]
    rows = [row.replace("\u202f", " ").split("\t") for row in places[0][1:]]
    names = [["training", "training"], ["greedy", "validation, greedy"], ["final", "validation, sampled"]]
    assert [row[:2] for row in rows] == names
    assert re.fullmatch(r"[\d.]+ % \[[\d.]+ % – [\d.]+ %\]", rows[2][2])
    assert len(re.findall("data-at", curves.reward_chart(make_metrics(1000)).svg)) <= 240
