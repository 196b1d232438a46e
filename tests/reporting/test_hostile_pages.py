"""Texts of a policy in a headless Chromium: on the report, the comparison and the gallery they show as text.

Pages of the browser of episodes are in test_site_pages.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest

from chromium import Page, open_page
from geo_sokoban_pipeline.reporting.comparison import build_comparison
from geo_sokoban_pipeline.reporting.previews import preview_episodes, preview_prompts
from geo_sokoban_pipeline.reporting.report import build_report
from legible import illegible
from reporting.material import lazily, make_levels, play
from reporting.run_numbers import make_metrics, make_summary
from reporting.sites import HOSTILE
from reporting.test_comparison import make_run
from reporting.test_report import EVERYWHERE, hostile_inputs, lean

pytestmark = pytest.mark.slow


def write_hostile_report(**changes: str) -> str:
    return build_report(hostile_inputs(site="site", **changes))


def write_report_hostile_everywhere() -> str:
    return write_hostile_report(**EVERYWHERE)


def write_hostile_comparison() -> str:
    given = {"held_out": hostile_inputs().held_out, "metrics": make_metrics(20)}
    runs = [
        make_run("a", settings={"instruction": HOSTILE}, **given),
        make_run(HOSTILE, settings={HOSTILE: 1}, **given),
    ]
    return build_comparison(runs)


def write_hostile_gallery() -> str:
    (part,) = hostile_inputs().held_out.values()
    prompts = preview_prompts([{"id": HOSTILE, "prompt": HOSTILE, "answer": HOSTILE, "images": []}])
    return f"<!doctype html><meta charset=utf-8><title>gallery</title>{preview_episodes(part())}{prompts}"


def write_evaluation() -> str:
    """Of the policy in a folder with a long path, which has no blank to break at."""
    name, summary = f"/{'a_long_name_of_a_folder/' * 6}final_policy", make_summary()
    rows = [row | {"policy": row["policy"].replace("final", name)} for row in summary["rows"]]
    summary |= {"rows": rows, "policies": [name], "checkpoints": {name: summary["checkpoints"]["final"]}}
    played = {"iter=00000/part-000": lazily([play(make_levels(48)[3], 1.0, "x/sampled", 0)])}
    return build_report(lean(metrics=[], summary=summary, held_out=played))


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with open_page() as found:
        found.look(1300)
        yield found


@pytest.fixture
def opened(browser: Page, tmp_path: Path) -> Callable[[str], Page]:
    """A function that opens markup as a page."""

    def open_markup(markup: str) -> Page:
        path = tmp_path / "page.html"
        path.write_text(markup, encoding="utf-8")
        browser.open(path.as_uri(), until="document.readyState === 'complete' && document.body?.innerText.length > 2")
        browser.run("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        return browser

    return open_markup


@pytest.mark.parametrize("write", [write_report_hostile_everywhere, write_hostile_comparison, write_hostile_gallery])
def test_hostile_text_is_text(opened: Callable[[str], Page], write: Callable[[], str]) -> None:
    page = opened(write())
    # Every step of every player.
    page.run("document.querySelectorAll('button').forEach(one => one.click())")
    page.run("document.querySelectorAll('[data-do=next]').forEach(one => { one.click(); one.click(); })")
    page.run("new Promise(done => setTimeout(done, 300))")  # for scripts and images that a text might have begun
    text = page.text()
    assert "document.title" in text and "onerror" in text
    assert page.run("document.title") != "broken"
    sources = "[...document.images].map(one => one.getAttribute('src')).filter(one => one && !one.startsWith('data:'))"
    assert page.run(sources) == []
    assert not page.run("[...document.scripts].some(one => one.textContent.startsWith('document.title'))")
    assert page.run("document.querySelectorAll('[onerror], [onclick], [onload]').length") == 0
    assert page.errors == []


def test_the_check_sees_a_script_that_runs(opened: Callable[[str], Page]) -> None:
    page = opened(f"<!doctype html><title>page</title>{HOSTILE}")
    page.wait("document.title === 'broken'")
    page.errors.clear()  # of the image that there is not


@pytest.mark.parametrize("write", [write_hostile_report, write_evaluation, write_hostile_comparison])
def test_pages_fit_the_window_and_can_be_read(opened: Callable[[str], Page], write: Callable[[], str]) -> None:
    """In every colour scheme each text has the contrast of WCAG."""
    page = opened(write())
    outside = "[...document.querySelectorAll('.tile *, .card *')].filter(one => one.scrollWidth > one.clientWidth + 1)"
    for width, dark in product((400, 1300), (True, False)):
        page.look(width, dark=dark)
        assert page.run("document.documentElement.scrollWidth") <= width
        inner = f"{outside}.filter(one => !one.matches('pre, pre *, img, span')).map(one => one.outerHTML)"
        assert page.run(inner) == []
        assert illegible(page, dark=dark) == []


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
def test_the_measure_of_contrast(opened: Callable[[str], Page], markup: str, found: list[str]) -> None:
    page = opened(f"<!doctype html><title>page</title>{markup}")
    assert [place for _, place in illegible(page)] == found
