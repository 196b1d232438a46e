"""The page: parses, stands alone, trusts nobody's text, and survives runs that stored little."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from geo_sokoban_pipeline.reporting.report import ReportInputs, build_report
from reporting.material import lazily, make_inputs, make_levels, make_played, play
from reporting.run_numbers import make_metrics, make_summary

HOSTILE = "</script><script>alert(1)</script><img src=https://evil.example/x onerror=alert(2)>\"'&{{ 7*7 }}"
VOID = {"meta", "img", "input", "br", "link", "hr"}
SVG_VOID = {"line", "circle", "polyline", "polygon"}


class Page(HTMLParser):
    """Tags in order, their attributes, the texts of scripts; complains about tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert tag in SVG_VOID
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if self.stack and self.stack[-1] == "script":
            self.scripts.append((self.tags[-1][1], data))
        else:
            self.text += data

    def attributes(self, *names: str) -> list[str]:
        return [value or "" for _, values in self.tags for name, value in values.items() if name in names]

    @property
    def ids(self) -> set[str]:
        return set(self.attributes("id"))


@pytest.fixture(scope="module")
def page_text() -> str:
    return build_report(make_inputs())


@pytest.fixture(scope="module")
def page(page_text) -> Page:
    return Page(page_text)


def players_of(page: Page) -> dict:
    return next(json.loads(text) for attributes, text in page.scripts if attributes.get("id") == "players")


def test_page_has_every_section(page):
    assert {"training", "evaluation", "played", "extremes", "time", "data", "settings"} <= page.ids
    for words in ("GRPO raised the solve rate", "Solve rate by optimal length", "Worst", "learning_rate", "2.13.0"):
        assert words in page.text


def test_page_fetches_nothing(page, page_text):
    links = page.attributes("src", "href", "srcset", "action", "data", "poster", "xlink:href")
    assert links and all(link.startswith("#") for link in links)
    assert {tag for tag, _ in page.tags}.isdisjoint({"link", "iframe", "object", "embed", "base", "form"})
    assert not re.search(r"url\(|@import", page_text)


def test_page_allows_no_script_but_its_own(page):
    policy = next(values["content"] for tag, values in page.tags if tag == "meta" and "http-equiv" in values)
    running = [text for attributes, text in page.scripts if attributes.get("type") != "application/json"]
    assert len(running) == 1
    digest = base64.b64encode(hashlib.sha256(running[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert not [name for _, values in page.tags for name in values if name.startswith("on")]


def test_links_lead_to_sections(page):
    assert {link[1:] for link in page.attributes("href")} <= page.ids


def test_pictures_are_stored_once(page):
    data = players_of(page)
    pictures = list(data["pictures"].values())
    assert len(set(pictures)) == len(pictures)
    assert all(picture.startswith("data:image/png;base64,") for picture in pictures)
    used = {frame["picture"] for episode in data["episodes"] for frame in episode["frames"]}
    assert used == set(data["pictures"])
    shown = [int(value) for value in page.attributes("data-episode", "data-take")]
    assert set(shown) == set(range(len(data["episodes"])))


def test_page_is_small(page_text):
    assert len(page_text) < 1_000_000


def test_same_inputs_give_the_same_page(page_text):
    assert build_report(make_inputs()) == page_text


def test_texts_are_never_markup():
    episode = play(make_levels(48)[3], 1.0, "train_sokoban/final/sampled", 0)
    for turn in episode.turns:
        turn.text = HOSTILE
        turn.action = HOSTILE
    episode.error, episode.status, episode.drop_reason, episode.trajectory_id = (HOSTILE,) * 4
    summary = make_summary()
    summary["policies"] = [HOSTILE]
    summary["rows"][0]["policy"] = HOSTILE
    part = {"iter=00000/part-000": lazily([episode])}
    text = build_report(
        make_inputs(
            task=HOSTILE,
            run=HOSTILE,
            run_id=HOSTILE,
            summary=summary,
            played=part,
            trained=part,
            parameters={HOSTILE: {HOSTILE: HOSTILE}},
            versions={HOSTILE: HOSTILE},
            data_report={"splits": {HOSTILE: {}}, "split_note": HOSTILE, "source": HOSTILE, "rows_read": 1},
            token_texts=lambda ids: [HOSTILE for _ in ids],
        )
    )
    hostile = Page(text)
    assert "<script>alert" not in text and "<img src=https" not in text
    assert not [link for link in hostile.attributes("src", "href") if "evil" in link]
    assert not [name for _, values in hostile.tags for name in values if name.startswith("on")]
    assert len([1 for attributes, _ in hostile.scripts if attributes.get("type") != "application/json"]) == 1
    assert players_of(hostile)["episodes"][0]["frames"][0]["reply"] == HOSTILE
    assert "{{ 7*7 }}" in hostile.text


@pytest.mark.parametrize(
    "changes",
    [
        {"metrics": [], "summary": {}, "warm_start": [], "played": {}, "trained": {}, "data_report": None},
        {"metrics": [{"iteration": 0}], "parameters": {}, "versions": {}},
        {"metrics": [{}], "warm_start": [{}]},
        {"metrics": [{**row, "train/entropy_loss": None} for row in make_metrics(3)]},
        {"summary": {"policies": ["warm_start", "final"], "rows": [{"policy": "final", "mode": "sampled"}]}},
        {"summary": {"policies": ["final"]}, "token_texts": None},
        {"played": {"iter=00000/part-000": lazily([])}, "trained": {"iter=00000/part-000": lazily([])}},
        {"data_report": {"splits": {"train": {"levels": 3}}}},
    ],
    ids=[
        "nothing",
        "bare metrics",
        "empty rows",
        "null metrics",
        "bare rows",
        "no tokenizer",
        "empty parts",
        "bare data",
    ],
)
def test_what_is_missing_leaves_the_page_whole(changes):
    page = Page(build_report(make_inputs(**{"metrics": make_metrics(5), "played": make_played(4)} | changes)))
    assert {"training", "evaluation", "played", "extremes", "time", "data", "settings"} <= page.ids
    assert not re.search(r"\bnan\b|\bNone\b|\bundefined\b", page.text)


def test_empty_run_says_so():
    empty = ReportInputs("sokoban", "train_sokoban", "default", [], {}, [], {}, {}, None, {}, {})
    text = Page(build_report(empty)).text
    for words in ("No iteration is stored", "No evaluation is stored", "No held-out episode", "No training episode"):
        assert words in text
