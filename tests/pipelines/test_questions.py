"""The ten questions of docs/browser.md: pages of the browser and cells of the notebook give the same answers."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import nbformat
import pandas as pd
import polars as pl
import pytest

from chromium import Page, open_page
from geo_sokoban_pipeline.runs.storage import read_json, write_json
from runs import ROOT, Project

pytestmark = pytest.mark.xdist_group("stored")

NOTEBOOK = ROOT / "notebooks" / "06_ten_questions.ipynb"
AFTER = {"notebook": ("> 40", "> 0"), "address": ("after=41", "after=1")}  # the runs here are short
HEADING = re.compile(r"## (\d+)\. (.*\?)\n\n`(.*)`")


def read_questions() -> list[tuple[str, str, str]]:
    """Question, address and lines of each, from the notebook."""
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    headings = [(HEADING.fullmatch(cell.source), at) for at, cell in enumerate(cells)]
    return [(found[2], found[3], cells[at + 1].source) for found, at in headings if found]


QUESTIONS = read_questions()


def test_the_docs_have_the_questions_of_the_notebook() -> None:
    text = (ROOT / "docs" / "browser.md").read_text(encoding="utf-8")
    shown = re.findall(r"\*\*(\d+)\. (.*?\?)\*\* `(.*?)`\n\n```python\n(.*?)\n```", text, flags=re.DOTALL)
    assert [found[1:] for found in shown] == QUESTIONS
    assert [int(found[0]) for found in shown] == list(range(1, 11))


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Two short runs on levels, the first one scored, and a site of both."""
    train = {
        "warm_start": {"steps": 72},
        "rollout": {"max_turns": 6},
        "grpo": {"old_log_probs": "recompute"},
    }
    project = Project(tmp_path_factory.mktemp("questions") / "data")
    for run_id, seed in (("default", 0), ("seed2", 2)):
        params = {"run_id": run_id, "seed": seed, "sokoban": {"max_solution": 5}, "train_sokoban": train}
        project.run(params=params)
    return score_and_browse(project, "sokoban")


@pytest.fixture(scope="module")
def problem_runs(stored_run: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The same on problems, which have families. The final policy of the first run solves more of each next family: a
    policy of so few steps solves none.
    """
    project: Project = replace(stored_run("geo3k"), root=tmp_path_factory.mktemp("problems") / "data")
    shutil.copytree(stored_run("geo3k").root, project.root, ignore=shutil.ignore_patterns("*.lock"))
    run = "train_geo3k"
    project.run(run, {"run_id": "seed2", "seed": 2, run: {"loop": {"iterations": 1}}})
    path = project.folder("08_reporting", run) / "eval_summary.json"
    summary = read_json(path)
    (row,) = [row for row in summary["rows"] if (row["policy"], row["mode"]) == ("final", "sampled")]
    for number, family in enumerate(row["breakdowns"]["family"]):
        family["solved"] = min(number, family["episodes"])
        family["solve_rate"] = family["solved"] / family["episodes"]
    write_json(path, summary)
    return score_and_browse(project, "geo3k")


def score_and_browse(project: Project, task: str) -> Project:
    source = {"run": f"train_{task}", "run_id": "default"}
    scored = {"source": {**source, "checkpoint": "latest"}, "limit": 24}
    project.run(f"score_{task}", params={f"score_{task}": scored})
    project.run(f"browse_{task}", params={f"browse_{task}": {"source": source, "runs": ["seed2"]}})
    return project


@pytest.fixture(scope="module")
def cells(two_runs: Project) -> dict[str, Any]:
    """What the notebook's cell of each question gives."""
    return run_cells(two_runs, range(len(QUESTIONS)))


def run_cells(project: Project, asked: Collection[int], task: str = "sokoban") -> dict[str, Any]:
    """What the notebook's cells of some questions give on two runs of a task."""
    from IPython.core.interactiveshell import InteractiveShell

    environment = {"GEO_SOKOBAN_ENV": "test", "GEO_SOKOBAN_DATA_ROOT": str(project.root)}
    shell, before = InteractiveShell(user_ns={}), Path.cwd()
    found: dict[str, Any] = {}
    unasked = {lines for number, (_, _, lines) in enumerate(QUESTIONS) if number not in asked}
    with mock.patch.dict(os.environ, environment):
        os.chdir(NOTEBOOK.parent)
        try:
            for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
                if cell.cell_type == "code" and cell.source not in unasked:
                    lines = cell.source.replace(*AFTER["notebook"]).replace(
                        'TASK, RUN_IDS = "sokoban"', f'TASK, RUN_IDS = "{task}"'
                    )
                    done = shell.run_cell(lines)
                    done.raise_error()
                    found[cell.source] = done.result
        finally:
            os.chdir(before)
    return found


@pytest.fixture(scope="module")
def page(two_runs: Project) -> Iterator[Page]:
    with open_site(two_runs, "sokoban") as found:
        yield found


@contextmanager
def open_site(project: Project, task: str) -> Iterator[Page]:
    with open_page() as found:
        found.look(1300)
        found.open(project.load(f"browse_{task}.site").as_uri(), until="document.documentElement.dataset.ready")
        yield found
        assert found.errors == []


def table(page: Page, selector: str) -> list[list[str]]:
    """Cells of the rows of a table, as a reader sees them."""
    page.wait(f"document.querySelector({json.dumps(selector + ' tbody tr')}) !== null")
    rows = f"[...document.querySelectorAll({json.dumps(selector + ' tbody tr')})]"
    found: list[list[str]] = page.run(f"{rows}.map(row => [...row.children].map(cell => cell.innerText.trim()))")
    return found


def as_number(text: str) -> float:
    """A number as the pages write it."""
    powers = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
    mantissa, _, power = text.replace("−", "-").replace(",", "").partition("·10")
    return float(mantissa) * 10.0 ** int(power.translate(powers) or 0)


def as_kind(text: str) -> str:
    """A length, or the name of a family, from what the pages write."""
    return text.replace(" ", "_")


def first_of(rows: list[list[str]], column: int) -> list[list[str]]:
    """The rows that share the first place."""
    return [row for row in rows if row[column] == rows[0][column]]


# One function a question, in their order: what the page says, and what the cell gives, in one form.


def first_solved(page: Page, cell: pd.Series) -> tuple[Any, Any]:
    shown = {row[0].rstrip("…"): int(row[4]) for row in table(page, ".tasks")}
    return shown, {task[:7]: version for task, version in cell.items()}


def longest_oscillation(page: Page, cell: pd.Series) -> tuple[Any, Any]:
    page.wait("document.querySelectorAll('#rows .row').length > 0")
    rows = page.run(
        "[...document.querySelectorAll('#rows .row')]"
        ".map(row => [new URLSearchParams(row.hash.split('?')[1]).get('id'), row.lastElementChild.innerText])"
    )
    return {name: int(count) for name, count in first_of(rows, 1)}, dict(cell)


def widest_gap(page: Page, cell: pl.DataFrame) -> tuple[Any, Any]:
    shown = table(page, ".tokens")[0]
    gap = cell["old_log_probs"][0] - cell["rollout_log_probs"][0]
    page.click(".tokens tbody a", until="document.querySelector('.detail') !== null")
    detail = dict(zip(page.texts(".detail dt"), page.texts(".detail dd"), strict=True))
    assert f"id {shown[1]}" in page.text(".detail") and detail["trainer − engine"] == f"{shown[5]} nats"
    return abs(as_number(shown[5])), pytest.approx(abs(gap), rel=0.06)  # two digits are shown


def most_flips(page: Page, cell: pd.Series) -> tuple[Any, Any]:
    rows = first_of([[row[0], row[5].split()[0]] for row in table(page, ".pairs")], 1)
    return {row[0].rstrip("…"): int(row[1]) for row in rows}, {task[:7]: count for task, count in cell.items()}


def largest_loss(page: Page, cell: pd.Series) -> tuple[Any, Any]:
    rows = first_of(table(page, ".images section:first-of-type"), 4)
    shown = {as_kind(row[0]): -as_number(row[4].split()[0]) for row in rows}
    return shown, {str(kind): pytest.approx(100 * loss, abs=0.06) for kind, loss in cell.items()}


def most_frequent_tag(page: Page, cell: pd.Series) -> tuple[Any, Any]:
    return {row[0]: int(row[1]) for row in first_of(table(page, ".breakdown"), 1)}, dict(cell)


def parting_tokens(page: Page, cell: list[str]) -> tuple[Any, Any]:
    page.wait("document.querySelector('.tree .parts') !== null")
    first = ".tree > .node > .node > .strip > .parts"
    return sorted(page.run(f"[...document.querySelectorAll('{first}')].map(one => one.firstChild.data)")), cell


def most_reliant_token(page: Page, cell: pd.Series) -> tuple[Any, Any]:
    shown = table(page, ".tokens")[0]
    return (json.loads(shown[0]), as_number(shown[-1])), (cell.index[0], pytest.approx(cell.iloc[0], rel=0.06))


def largest_gain(page: Page, cell: pd.Series) -> tuple[Any, Any]:
    rows = [(as_kind(row[0]), as_number(row[4].split()[0])) for row in table(page, ".kinds")]
    largest = max(gain for _, gain in rows)
    wanted = {str(kind): pytest.approx(100 * gain, abs=0.06) for kind, gain in cell.items()}
    return {kind: gain for kind, gain in rows if gain == largest}, wanted


def different_settings(page: Page, cell: list[str]) -> tuple[Any, Any]:
    page.wait("document.querySelector('.kinds') !== null")
    return [row[0] for row in table(page, "main > .grid:last-of-type")], cell


READERS: list[Callable[[Page, Any], tuple[Any, Any]]] = [
    first_solved,
    longest_oscillation,
    widest_gap,
    most_flips,
    largest_loss,
    most_frequent_tag,
    parting_tokens,
    most_reliant_token,
    largest_gain,
    different_settings,
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("question", "read"), list(zip(QUESTIONS, READERS, strict=True)), ids=[read.__name__ for read in READERS]
)
def test_page_and_notebook_agree(
    page: Page, cells: dict[str, Any], question: tuple[str, str, str], read: Callable[[Page, Any], tuple[Any, Any]]
) -> None:
    _, address, lines = question
    compare_answers(page, address.replace(*AFTER["address"]), cells[lines], read)


def compare_answers(page: Page, address: str, cell: Any, read: Callable[[Page, Any], tuple[Any, Any]]) -> None:
    page.follow("#/nowhere", until="document.querySelector('main .empty') !== null")
    page.follow(address)
    shown, given = read(page, cell)
    assert shown, "the page has no answer"
    assert shown == given


@pytest.mark.slow
def test_problems_and_their_families(problem_runs: Project) -> None:
    """Questions 4, 5 and 9 on problems: answers in boxes, and families in place of lengths."""
    asked = {READERS.index(read): read for read in (most_flips, largest_loss, largest_gain)}
    found = run_cells(problem_runs, asked, "geo3k")
    families = set(problem_runs.load("train_geo3k.episodes@pandas")["difficulty"])
    with open_site(problem_runs, "geo3k") as page:
        for number, read in asked.items():
            _, address, lines = QUESTIONS[number]
            compare_answers(page, address.replace("train_sokoban", "train_geo3k"), found[lines], read)
            if read is largest_loss:
                shown = {as_kind(row[0]) for row in table(page, ".images section:first-of-type")}
                assert shown <= families and len(shown) > 1
                assert found[lines].iloc[0] > 0, "no family loses anything"
