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


def test_page_speaks_of_problems(task, page):
    """First attempts stand apart where there are several; the episodes keep the trajectory contract."""
    assert {"training", "evaluation", "episodes", "extremes", "time", "data", "settings"} <= page.ids
    several, text = "multi" in task, page.text.replace("\u202f", " ")
    for words in (
        "GRPO raised the accuracy",
        "40 held-out problems (5 families",
        "The most frequent answer of training is correct for",
        "the expert of the warm start for",
        "With blank images it",
        "With images of other problems it",
        "linear pair",
        "problems by family",
        "Counted again for this report: 0 images and 0 problems occur in more than one split.",
    ):
        assert words in text, words
    assert not re.findall(r"\b(?:level|wall|moves|exact solver|Solve rate|solve rate|nan|None)s?\b", text)
    assert re.search(r"train\s*40\s*40\s*40", text)
    for words in (
        "Of its first attempts, before any feedback of the scoring tool,",
        "sampled, first attempt",
        "Tool calls",
    ):
        assert (words in text) == several, words
    run = make_run(task)
    tables = read_evaluation(run.summary)
    assert ("first attempt" in tables.columns) == ("valid calls" in tables.responses) == several
    assert len(tables.rows) == len(run.summary["rows"])
    assert all(len(row["responses"]) == len(tables.responses) for row in tables.rows)
    for read in (*run.held_out.values(), *run.trained.values()):
        validate_trajectories(read())


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
    assert {pair.after.difficulty for pair in pairs} == {row["family"] for row in make_data(task)[0]}
    assert all(pair.after.task_id == pair.before.task_id for pair in pairs)
    episodes = [episode["frames"] for episode in agents_of(page)["episodes"]]
    endings = [frames[-1]["note"] for frames in episodes]
    assert any(re.match(r"Correct in \d turn", note) for note in endings)
    assert any(re.match(r"Not correct after \d turns?\. The label is \d+", note) for note in endings)
    for frames in episodes:
        assert len({frame["image"] for frame in frames}) == 1 and "\\boxed{" in frames[0]["response"]
        assert not any("no answer" in frame["note"] for frame in frames)


def test_displays_of_a_notebook(task):
    run = make_run(task)
    episode = show.load_newest(run.held_out)[0]
    shown = [show.show_evaluation(run.summary), show.show_boards(episode), show.show_film(episode, board_px=64)]
    for found, words in zip(shown, ("most frequent answer", "\\boxed{", "data:image/gif"), strict=True):
        assert words in found.data
    json.dumps(run.summary, allow_nan=False)
