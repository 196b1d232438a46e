"""Texts of a policy in a headless Chromium: on the report, the comparison and the gallery they show as text.

Pages of the browser of episodes are in test_site_pages.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from builders import CONTEXT
from chromium import Page, open_page
from geo_sokoban_pipeline.reporting.comparison import build_comparison
from geo_sokoban_pipeline.reporting.previews import preview_episodes, preview_prompts
from geo_sokoban_pipeline.reporting.report import build_report
from geo_sokoban_pipeline.trajectories.types import Trajectory, trajectories_to_table
from legible import illegible, read_contrast
from reporting.material import lazily, make_inputs, make_levels, play
from reporting.run_numbers import make_summary
from reporting.sites import HOSTILE, make_hostile
from reporting.test_comparison import make_run

pytestmark = pytest.mark.slow
RAN = "broken"  # what the title is after a script of a text has run


def hostile_episodes(name: str = "train_sokoban/final/sampled") -> list[Trajectory]:
    found = [make_hostile(play(make_levels(48)[3 + group], 1.0, name, group)) for group in range(3)]
    for episode in found:
        episode.advantage, episode.trained, episode.status = 1.0, True, HOSTILE
    return found


def write_report() -> str:
    """With players, a gallery, and the tokens of the best and the worst episodes."""
    part = {"iter=00000/part-000": lazily(hostile_episodes())}
    texts: Callable[[Any], list[str]] = lambda ids: [HOSTILE for _ in ids]  # noqa: E731
    summary = make_summary()
    summary["rows"][0]["policy"] = HOSTILE
    check = {"check": HOSTILE, "subject": f"a.{HOSTILE}", "checked": 1, "findings": [HOSTILE], "notes": []}
    audit = {"checks": [{**check, "episodes": [HOSTILE]}], "findings": 1, "iterations": 0}
    given = {"held_out": part, "trained": part, "token_texts": texts, "summary": summary, "site": "site"}
    return build_report(make_inputs(**given, audit=audit, whole_audit=audit))


def write_evaluation() -> str:
    """Of the policy in a folder with a long path, which has no blank to break at."""
    name, summary = f"/{'a_long_name_of_a_folder/' * 6}final_policy", make_summary()
    rows = [row | {"policy": row["policy"].replace("final", name)} for row in summary["rows"]]
    summary |= {"rows": rows, "policies": [name], "checkpoints": {name: summary["checkpoints"]["final"]}}
    played = {"iter=00000/part-000": lazily([play(make_levels(48)[3], 1.0, "x/sampled", 0)])}
    return build_report(make_inputs(metrics=[], warm_start=[], trained={}, summary=summary, held_out=played))


def write_comparison() -> str:
    part = {"iter=00001/part-000": lazily(hostile_episodes())}
    settings = {"instruction": HOSTILE}
    runs = [make_run("a", held_out=part, settings=settings), make_run(HOSTILE, held_out=part, settings={HOSTILE: 1})]
    return build_comparison(runs)


def write_gallery() -> str:
    rows = [{"id": HOSTILE, "prompt": HOSTILE, "answer": HOSTILE, "images": []}]
    episodes = trajectories_to_table(hostile_episodes(), CONTEXT)
    return (
        f"<!doctype html><meta charset=utf-8><title>gallery</title>{preview_episodes(episodes)}{preview_prompts(rows)}"
    )


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with open_page() as found:
        found.look(1300)
        yield found


@pytest.mark.parametrize("write", [write_report, write_comparison, write_gallery])
def test_hostile_text_is_text(page: Page, tmp_path: Path, write: Callable[[], str]) -> None:
    path = tmp_path / "page.html"
    path.write_text(write(), encoding="utf-8")
    page.open(path.as_uri())
    page.wait("document.readyState === 'complete' && document.body.innerText.length > 100")
    # Everything that is folded, and every step of every player.
    page.run("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    page.run("document.querySelectorAll('button').forEach(one => one.click())")
    page.run("document.querySelectorAll('[data-do=next]').forEach(one => { one.click(); one.click(); })")
    page.run("new Promise(done => setTimeout(done, 300))")  # for scripts and images that a text might have begun
    text = page.text()
    assert "document.title" in text and "onerror" in text
    assert page.run("document.title") != RAN
    sources = "[...document.images].map(one => one.getAttribute('src')).filter(one => one && !one.startsWith('data:'))"
    assert page.run(sources) == []
    assert not page.run("[...document.scripts].some(one => one.textContent.startsWith('document.title'))")
    assert page.run("document.querySelectorAll('[onerror], [onclick], [onload]').length") == 0
    assert page.errors == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1300])
@pytest.mark.parametrize("write", [write_report, write_evaluation, write_comparison])
def test_pages_fit_the_window_and_can_be_read(
    page: Page, tmp_path: Path, write: Callable[[], str], width: int, dark: bool
) -> None:
    """In every colour scheme each text has the contrast of WCAG."""
    path = tmp_path / "page.html"
    path.write_text(write(), encoding="utf-8")
    page.look(width, dark=dark)
    page.open(path.as_uri())
    page.wait("document.readyState === 'complete' && document.body.innerText.length > 100")
    page.run("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    assert page.run("document.documentElement.scrollWidth") <= width
    outside = "[...document.querySelectorAll('.tile *, .card *')].filter(one => one.scrollWidth > one.clientWidth + 1)"
    assert page.run(f"{outside}.filter(one => !one.matches('pre, pre *, img, span')).map(one => one.outerHTML)") == []
    assert (read_contrast(page)["page"] < 0.2) == dark
    assert illegible(page) == []
    page.look(1300)


PALE = [
    ("<p style='color:#999'>pale", ["P. pale"]),
    ("<p style='color:#999;font-size:30px'>pale and large", ["P. pale and large"]),
    ("<p style='color:#777;font-size:30px'>large", []),
    ("<div style='background:#333'><p>dark on dark", ["P. dark on dark"]),
    ("<div style='background:rgb(0 0 0 / .9)'><p style='color:white'>light on dark", []),
    ("<div style='opacity:.4'><p>faint", ["P. faint"]),
    ("<p style='display:none;color:#999'>unseen</p><p>seen", []),
]


@pytest.mark.parametrize(("markup", "found"), PALE)
def test_the_measure_of_contrast(page: Page, tmp_path: Path, markup: str, found: list[str]) -> None:
    path = tmp_path / "page.html"
    path.write_text(f"<!doctype html><title>page</title>{markup}", encoding="utf-8")
    page.open(path.as_uri())
    page.wait("document.body?.innerText.length > 2")
    assert [place for _, place in illegible(page)] == found


def test_the_check_sees_a_script_that_runs(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(f"<!doctype html><title>page</title>{HOSTILE}", encoding="utf-8")
    page.open(path.as_uri())
    page.wait(f"document.title === {RAN!r}")
    page.errors.clear()  # of the image that there is not
