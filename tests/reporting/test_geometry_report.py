"""The page of a geometry run: its own words, tables and images, for one response and for the scoring tool."""

from __future__ import annotations

import copy
import json
import re

import pytest

from geo_sokoban_pipeline.reporting import notebook as show
from geo_sokoban_pipeline.reporting.facts import write_headline
from geo_sokoban_pipeline.reporting.report import build_report
from geo_sokoban_pipeline.reporting.report_tables import difficulty_chart, kind_tables, read_evaluation
from geo_sokoban_pipeline.reporting.training_episodes import choose_gallery
from geo_sokoban_pipeline.tasks import task_of
from geo_sokoban_pipeline.trajectories.schema import validate_trajectories
from reporting.problem_material import make_data, make_run
from reporting.test_report import Page, agents_of

TASKS = ["geo3k", "geo3k_multi_turn"]


@pytest.fixture(scope="module", params=TASKS)
def task(request):
    return request.param


@pytest.fixture(scope="module")
def page(task):
    return Page(build_report(make_run(task)))


def test_material_keeps_the_contract(task):
    run = make_run(task)
    for read in (*run.held_out.values(), *run.trained.values()):
        validate_trajectories(read())


def test_page_speaks_of_problems(page):
    assert {"training", "evaluation", "episodes", "extremes", "time", "data", "settings"} <= page.ids
    for words in (
        "GRPO raised the accuracy",
        "40 held-out problems (5 families",
        "most frequent answer",
        "linear pair",
    ):
        assert words in page.text
    for words in ("level", "wall", "moves", "exact solver", "Solve rate", "solve rate", "nan", "None"):
        assert not re.search(rf"\b{words}s?\b", page.text), words
    assert "problems by family" in page.text
    assert re.search(r"train\s*40\s*40\s*40", page.text)
    assert "Counted again for this report: 0 images and 0 problems occur in more than one split." in page.text


def test_first_attempts_stand_apart_where_there_are_several(task, page):
    several = task_of(task).train_config.model_validate({}).rollout.max_turns > 1
    assert ("Of its first attempts, before any feedback of the scoring tool," in page.text) == several
    assert ("validation, sampled, first attempt" in page.text) == several
    assert ("Tool calls" in page.text) == several
    summary = make_run(task).summary
    tables = read_evaluation(summary)
    assert ("first attempt" in tables.columns) == several
    assert ("valid calls" in tables.responses) == several
    assert len(tables.rows) == len(summary["rows"])
    assert all(len(row["responses"]) == len(tables.responses) for row in tables.rows)


@pytest.mark.parametrize(
    ("called", "known", "headline", "note"),
    [
        (True, True, "Of its first attempts, before any feedback of the scoring tool,", "any feedback of the"),
        (False, True, "Of its first responses,", "First attempt: correct with the first response."),
        (False, False, "", ""),
    ],
    ids=["the tool", "an own environment", "an own environment that does not report them"],
)
def test_first_attempts_are_told_as_what_they_are(called, known, headline, note):
    summary = copy.deepcopy(make_run("geo3k_multi_turn").summary)
    for row in summary["rows"]:
        row["tools"] = row["tools"] if called else {"called_share": 0.0, "calls": 0.0, "valid_share": None}
        row["first_attempt"] = row["first_attempt"] if known else None
    further, notes = " ".join(write_headline(summary).further), " ".join(read_evaluation(summary).notes)
    assert (headline in further) and ("Of its first" in further) == known
    assert (note in notes) and ("First attempt" in notes) == known
    assert ("scoring tool" in further + notes) == called


def test_headline_compares_with_blind_play(task):
    text = " ".join(write_headline(make_run(task).summary).further).replace("\u202f", " ")
    assert "The most frequent answer of training is correct for" in text
    assert "the expert of the warm start for" in text
    assert "With blank images it" in text and "With images of other problems it" in text


def test_tables_by_kind(task):
    tables = {table.by: table for table in kind_tables(make_run(task).summary)}  # all problems are tiny
    assert {name for name, _ in tables.pop("form of the answer").lines} == {
        "integer",
        "decimal",
    }
    (families,) = tables.values()
    assert families.by == "family" and families.names == ["warm start", "after GRPO", "expert (plausible)"]
    assert [name for name, _ in families.lines] == sorted(name for name, _ in families.lines)
    assert len(families.lines) == 5
    assert difficulty_chart(make_run(task).summary) is None


def test_gallery_has_every_family_with_its_image_and_responses(task, page):
    pairs = choose_gallery(make_run(task).held_out, 2)
    families = {row["family"] for row in make_data(task)[0]}
    assert {pair.after.difficulty for pair in pairs} == families
    assert all(pair.after.task_id == pair.before.task_id for pair in pairs)
    data = agents_of(page)
    endings = [episode["frames"][-1]["note"] for episode in data["episodes"]]
    assert any(re.match(r"Correct in \d turn", note) for note in endings)
    assert any(re.match(r"Not correct after \d turns?\. The label is \d+", note) for note in endings)
    for episode in data["episodes"]:
        assert len({frame["image"] for frame in episode["frames"]}) == 1
        assert "\\boxed{" in episode["frames"][0]["response"]
        assert not any("no answer" in frame["note"] for frame in episode["frames"])


def test_displays_of_a_notebook(task):
    run = make_run(task)
    episode = show.load_newest(run.held_out)[0]
    shown = [show.show_evaluation(run.summary), show.show_boards(episode), show.show_film(episode, board_px=64)]
    assert "most frequent answer" in shown[0].data and "correct" in shown[0].data
    assert "\\boxed{" in shown[1].data and "data:image/gif" in shown[2].data
    json.dumps(run.summary, allow_nan=False)
