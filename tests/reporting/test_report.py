"""The page: parses, stands alone, trusts nobody's text, and survives runs that stored little."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import sys
from html.parser import HTMLParser

import pyarrow as pa
import pytest

from geo_sokoban_pipeline.envs.sokoban import Board
from geo_sokoban_pipeline.formats import signed
from geo_sokoban_pipeline.reporting.curves import run_facts, tags_chart
from geo_sokoban_pipeline.reporting.episodes import describe_end
from geo_sokoban_pipeline.reporting.report import ReportInputs, build_report
from geo_sokoban_pipeline.reporting.report_tables import kind_tables
from geo_sokoban_pipeline.reporting.training_episodes import (
    choose_extremes,
    follow_prompts,
    summarise_training,
    tag_shares,
)
from geo_sokoban_pipeline.runs.provenance import summarise_commands
from geo_sokoban_pipeline.tasks import task_of
from geo_sokoban_pipeline.trajectories.index import INDEX_SCHEMA
from geo_sokoban_pipeline.trajectories.types import table_to_trajectories
from reporting.material import (
    lazily,
    make_inputs,
    make_levels,
    make_played,
    make_trained,
    play,
    play_moves_of,
)
from reporting.run_numbers import make_metrics, make_summary

HOSTILE = "</script><script>alert(1)</script><img src=https://evil.example/x onerror=alert(2)>\"'&{{ 7*7 }}"
VOID = {"meta", "img", "input", "br", "link", "hr"}
SVG_VOID = {"g", "path", "use"}


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
        """Of sections; the marks of charts have names too."""
        return {values["id"] or "" for tag, values in self.tags if "id" in values and tag not in SVG_VOID}


@pytest.fixture(scope="module")
def page_text() -> str:
    return build_report(make_inputs())


@pytest.fixture(scope="module")
def page(page_text) -> Page:
    return Page(page_text)


def agents_of(page: Page) -> dict:
    return next(json.loads(text) for attributes, text in page.scripts if attributes.get("id") == "players")


def test_page_has_every_section(page):
    assert {"training", "evaluation", "episodes", "extremes", "time", "data", "settings"} <= page.ids
    for words in ("GRPO raised the solve rate", "Solve rate by optimal length", "Worst", "learning_rate", "2.13.0"):
        assert words in page.text
    assert {link[1:] for link in page.attributes("href")} <= page.ids


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


def test_images_are_stored_once(page):
    data = agents_of(page)
    images = list(data["images"].values())
    assert len(set(images)) == len(images)
    assert all(image.startswith("data:image/png;base64,") for image in images)
    used = {frame["image"] for episode in data["episodes"] for frame in episode["frames"]}
    assert used == set(data["images"])
    shown = [int(value) for value in page.attributes("data-episode", "data-take")]
    assert set(shown) == set(range(len(data["episodes"])))


def test_page_is_small_and_the_same_for_the_same_inputs(page_text):
    assert len(page_text) < 1_000_000
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
            held_out=part,
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
    assert agents_of(hostile)["episodes"][0]["frames"][0]["response"] == HOSTILE
    assert "{{ 7*7 }}" in hostile.text


@pytest.mark.parametrize(
    "changes",
    [
        {"metrics": [], "summary": {}, "warm_start": [], "held_out": {}, "trained": {}, "data_report": None},
        {"metrics": [{"iteration": 0}], "parameters": {}, "versions": {}},
        {"metrics": [{}], "warm_start": [{}]},
        {"metrics": [{**row, "train/entropy_loss": None} for row in make_metrics(3)]},
        {"summary": {"policies": ["warm_start", "final"], "rows": [{"policy": "final", "mode": "sampled"}]}},
        {"summary": {"policies": ["final"]}, "token_texts": None},
        {"held_out": {"iter=00000/part-000": lazily([])}, "trained": {"iter=00000/part-000": lazily([])}},
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
    page = Page(build_report(make_inputs(**{"metrics": make_metrics(5), "held_out": make_played(4)} | changes)))
    assert {link[1:] for link in page.attributes("href")} == page.ids - {"players"}  # the menu is the sections
    assert not re.search(r"\bnan\b|\bNone\b|\bundefined\b", page.text)


def test_an_empty_run_has_no_empty_sections():
    nothing = {"metrics": [], "summary": {}, "held_out": {}, "parameters": {}, "versions": {}}
    empty = ReportInputs(task="sokoban", run="train_sokoban", run_id="default", **nothing)
    page = Page(build_report(empty))
    assert page.ids == {"evaluation", "settings", "players"}
    assert "No evaluation is stored" in page.text


def test_page_of_an_evaluation_has_no_sections_of_training():
    changes = {"metrics": [], "warm_start": [], "trained": {}, "data_report": None, "run": "evaluate_sokoban"}
    page = Page(build_report(make_inputs(**changes)))
    assert page.ids == {"evaluation", "episodes", "settings", "players"}


def test_page_says_when_how_and_where_it_was_made():
    entry = {"started": "2026-03-01T10:20:00+01:00", "seconds": 376.0, "outcome": "finished", "cores": 2}
    entry |= {"command": "kedro run --pipelines=train_sokoban", "commit": "abc123+", "processor": "A CPU"}
    time = summarise_commands([{**entry, "seconds": 4.0}, entry])
    given = {"time": time, "summary": {**make_summary(), "data_id": "6x6-1box-0af3"}}
    text = Page(build_report(make_inputs(**given))).text.replace("\u202f", " ")
    told = ("2026-03-01 10:20", "6 min 20 s in 2 commands", "abc123+", "A CPU, 2 cores", entry["command"])
    for words in (*told, "6x6-1box-0af3"):
        assert words in text
    assert "whole run took 6 min 20 s" in text and "time in iterations" not in text


def test_lengths_that_one_policy_lacks_are_dashes():
    summary = make_summary()
    del summary["rows"][0]["by_length"][2]
    table = kind_tables(summary)[0]
    assert table.names == ["warm start", "after GRPO", "random legal moves"]
    assert table.lines[2][1][0] is None and table.lines[2][1][1] is not None
    dash = '<td title="">– <span class="quiet"></span></td>'
    assert build_report(make_inputs(summary=summary)).count(dash) == 1


def test_parameters_are_flattened():
    page = build_report(make_inputs(parameters={"train": {"grpo": {"size": 8, "clip": None}, "empty": {}}, "seed": 1}))
    tables = page.partition('<section id="settings">')[2].partition("</section>")[0].split("<summary>")[1:]
    assert [re.findall("<code>(.*?)</code>", table) for table in tables] == [
        ["run", "seed", "1"],
        ["train", "grpo.size", "8", "grpo.clip", "null", "empty", "{}"],
    ]


OWN = {"env": {"factory": "tasks/cells.py:build_env"}}


@pytest.mark.parametrize(
    ("task", "options", "title"),
    [
        ("sokoban", {}, "sokoban · "),
        ("geo3k", task_of("geo3k").train_config.model_validate({}).model_dump(), "geo3k · "),
        ("geo3k", OWN, "own task cells.py · "),
    ],
)
def test_title_names_the_task_of_ones_own(task, options, title):
    page = Page(build_report(make_inputs(task=task, parameters={f"train_{task}": options})))
    assert page.text.strip().startswith(title)


def test_own_tasks_have_no_columns_of_the_geometry():
    summary = make_summary() | {"task": "geo3k"}
    for row in summary["rows"]:
        row["plausible_share"] = None
        row["breakdowns"] = {"family": [{"label": "unknown", "solve_rate": 0.5, "solved": 1, "episodes": 2}]}
    text = Page(build_report(make_inputs(task="geo3k", summary=summary))).text
    assert "lausible" not in text and "unknown" not in text


def test_a_run_without_a_warm_start_names_its_first_policy():
    text = json.dumps(make_summary()).replace('"warm_start', '"start')
    page = Page(build_report(make_inputs(warm_start=[], summary=json.loads(text))))
    assert "warm start" not in page.text.replace("warm_start", "") and "before GRPO, sampled" in page.text


def test_turns_show_the_reward_that_they_were_trained_on():
    part = make_trained()["iter=00199/part-000"]
    episodes = table_to_trajectories(part())
    for episode in episodes:
        turns = [turn for turn in episode.turns if turn.role == "assistant"]
        for turn in turns:
            turn.credit = episode.reward / len(turns)
    page = Page(build_report(make_inputs(trained={"iter=00199/part-000": lazily(episodes)})))
    best = choose_extremes({"iter=00199/part-000": lazily(episodes)}).best[0]
    share = signed(best.turns[1].credit)
    assert "reward trained on" in page.text and share in page.text and share != signed(best.turns[1].reward)
    # The episode's own advantage trained nothing where the turns have theirs.
    assert " · advantage " not in page.text.split("Best and worst training")[-1]


def test_played_turns_have_their_share_of_the_reward_with_credit_per_turn():
    options = {"grpo": {"credit": "turn"}, "reward": {"args": {"aggregate": "sum", "distance_weight": 0.1}}}
    plain = agents_of(Page(build_report(make_inputs())))["episodes"][0]["frames"]
    shared = agents_of(Page(build_report(make_inputs(parameters={"train_sokoban": options}))))["episodes"][0]["frames"]
    assert plain[0]["note"].endswith("reward \u22120.01") and shared[0]["note"].endswith("reward +1.09")


def test_lost_levels_are_named_with_their_turn():
    board = Board.from_text("######\n#    #\n# $  #\n# @  #\n#.   #\n######")
    level = dataclasses.replace(make_levels(48)[0], board=board)
    for end_when_lost, wanted in ((True, "not solved after 3 turns"), (False, "not solved after 5 turns")):
        episode = play_moves_of(level, ["left", "right", "up", "left", "right"], end_when_lost)
        assert describe_end(episode) == f"Deadlocked at turn 3: {wanted}."


def test_a_page_beside_a_site_links_into_it():
    """Players of the best and worst episodes and their tokens are then those of the site."""
    plain, linked = (build_report(make_inputs(site=site)) for site in (None, "../../browse_sokoban/default/site"))
    addresses = [one for one in Page(linked).attributes("href") if one.startswith("../../browse_sokoban")]
    start = "../../browse_sokoban/default/site/index.html"
    pages = [one.removeprefix(f"{start}#/").partition("?")[0] for one in addresses]
    extremes = choose_extremes(make_trained())
    shown = [*extremes.best, *extremes.worst]
    assert addresses[0] == start and pages.count("group") == len(shown)
    assert f"{start}#/episode?run=train_sokoban/default&id={shown[0].trajectory_id}" in addresses
    assert 'class="tokens"' in plain and 'class="tokens"' not in linked
    assert len(linked) < len(plain) and "browse_sokoban" not in plain


def test_validations_follow_the_same_prompts():
    parts = {}
    for version, skill in ((0, 0.2), (5, 0.5), (10, 1.0)):
        episodes = [
            play(level, skill, f"x/e{version}/{mode}", at, iteration=version)
            for mode in ("sampled", "greedy")
            for at, level in enumerate(make_levels(16))
        ]
        for episode in episodes:
            episode.difficulty = str(int(episode.metrics["optimal_steps"]))
        parts[f"iter={version:05d}/part-000"] = lazily(episodes)
    found = follow_prompts(parts)
    assert (found.versions, found.mode) == ([0, 5, 10], "greedy")
    names = ["optimal: 1 move", *(f"optimal: {number} moves" for number in (2, 4, 5, 7, 8))]
    assert [name for _, name, _ in found.prompts] == names
    last = [answers[-1] for _, _, answers in found.prompts]
    assert all(answer.solved for answer in last)
    assert [len(answer.text) for answer in last] == [1, 2, 4, 5, 7, 8]
    assert set(last[-1].text) <= set("↑↓←→")
    page = Page(build_report(make_inputs(validations=parts)))
    assert "validations" in page.ids and "after 10 iterations" in page.text
    assert follow_prompts({}) is None


def test_curves_come_from_the_training_episodes():
    episodes = table_to_trajectories(make_trained()["iter=00199/part-000"]())
    for episode in episodes:
        episode.difficulty = str(int(episode.metrics["optimal_steps"]))
    for episode in episodes[:4]:
        episode.reward, episode.advantage = 1.0, 0.0
    found = summarise_training({"iter=00199/part-000": lazily(episodes)})
    (row,) = found.rows
    assert row["iteration"] == 199
    equal = sum(len({one.reward for one in episodes[at : at + 4]}) == 1 for at in range(0, 24, 4))
    assert row["episodes/equal_groups"] == pytest.approx(equal / 6)
    assert row["part/final_bonus"] == pytest.approx(sum(e.reward_parts["final_bonus"] for e in episodes) / 24)
    assert row["episodes/lost"] == pytest.approx(sum(e.metrics["lost"] for e in episodes) / 24)
    assert task_of("sokoban").report.reward_parts(found.parts, {}) == ["distance_delta", "final_bonus"]
    assert list(found.kinds) == sorted(found.kinds, key=int)
    length = next(iter(found.kinds))
    wanted = [e.metrics["success"] for e in episodes if e.difficulty == length]
    assert found.kinds[length] == [{"iteration": 199, "success": pytest.approx(sum(wanted) / len(wanted))}]


def make_index(tags):
    """Rows of an index that matter here, of (split, iteration, tags)."""
    splits, iterations, names = zip(*tags, strict=True) if tags else ((), (), ())
    fields = [INDEX_SCHEMA.field(name) for name in ("split", "iteration", "tags")]
    return pa.table([splits, iterations, names], schema=pa.schema(fields))


def test_tags_are_shares_of_the_training_episodes():
    rows = [("train", 3, ["deadlock"]), ("train", 3, []), ("train", 4, ["deadlock", "no_move"]), ("train", 4, [])]
    index = make_index([*rows, ("train", 4, []), ("train", 4, ["no_move"]), ("validation", 4, ["hedge"])])
    assert tag_shares(index) == [
        {"iteration": 3, "tag/deadlock": 0.5, "tag/no_move": 0.0},
        {"iteration": 4, "tag/deadlock": 0.25, "tag/no_move": 0.5},
    ]
    page = Page(build_report(make_inputs(index=index)))
    assert "What goes wrong" in page.text and "no move" in page.text and "hedge" not in page.text


@pytest.mark.parametrize("tags", [[], [("train", 0, []), ("train", 1, [])], [("validation", 0, ["hedge"])]])
def test_without_tags_there_is_no_chart(tags):
    assert tags_chart(tag_shares(make_index(tags))) is None


def test_the_most_frequent_tags_are_drawn():
    names = [f"tag_{number}" for number in range(9)]
    index = make_index([("train", step, names[number:]) for step in range(2) for number in range(9)])
    chart = tags_chart(tag_shares(index))
    assert chart.note.startswith("The 6 most frequent of 9.")
    assert [f"tag {number}" in chart.svg for number in range(9)] == [number > 2 for number in range(9)]


def test_the_audit_has_a_row_for_each_check_and_its_findings_as_text():
    def check(name, entry, findings=(), notes=()):
        subject = f"train_sokoban.{entry}" if entry else "sokoban"
        return {"check": name, "subject": subject, "checked": 5, "findings": findings, "notes": notes, "episodes": ()}

    checks = [
        check("replay", "trajectories", ["iter=00001/part-000: a/b: <script>reward"], ["hidden by the finding"]),
        check("replay", "eval_trajectories"),
        check("groups", "trajectories", (), ["1 of 12 groups without a signal"]),
        check("splits", "", (), ["prompts: 2 of 5 rows repeat another one"]),
    ]
    found = build_report(make_inputs(audit={"checks": checks, "findings": 1}))
    section = found.split('<section id="audit">')[1].split("</section>")[0]
    assert "<strong>1 finding.</strong>" in section
    assert "trajectories: iter=00001/part-000: a/b: &lt;script&gt;reward" in section
    assert "hidden by the finding" not in section
    assert "<td>10</td>" in section, "both entries together"
    assert "trajectories: 1 of 12 groups without a signal" in section
    assert "<div>prompts: 2 of 5 rows repeat another one</div>" in section
    assert '<section id="audit">' not in build_report(make_inputs())


def audit_with(episodes, iterations=None):
    """An audit with one finding about these episodes."""
    finding = {"check": "replay", "subject": "train_sokoban.trajectories", "checked": 5, "findings": ["<b>x</b>"] * 8}
    checks = [{**finding, "notes": (), "episodes": episodes}]
    return {"checks": checks, "findings": 8} | ({} if iterations is None else {"iterations": iterations})


def test_a_whole_audit_takes_the_place_of_the_sample_and_links_to_its_episodes():
    names = [f"train_sokoban/i00001/g{number:03d}/s00" for number in range(21)] + ['<script>&"']
    inputs = make_inputs(audit=audit_with(names[:1]), site="../../browse_sokoban/default/site")
    whole = audit_with(names[::-1], len(inputs.metrics))
    section = (
        build_report(dataclasses.replace(inputs, whole_audit=whole))
        .split('<section id="audit">')[1]
        .split("</section>")[0]
    )
    assert section.count("<table") == 1 and "Looked at all episodes" in section and "has gone on" not in section
    assert section.count("&lt;b&gt;x&lt;/b&gt;") == 6 and "and 2 more" in section
    assert section.count("<a href=") == 20 and "22 episodes" in section
    address = "../../browse_sokoban/default/site/index.html#/episode?run=train_sokoban/default&amp;id="
    assert f'<a href="{address}{names[20]}">{names[20]}</a>' in section
    assert f'<a href="{address}%3Cscript%3E%26%22">&lt;script&gt;&amp;&#34;</a>' in section
    plain = build_report(dataclasses.replace(inputs, whole_audit=whole, site=None)).split('<section id="audit">')[1]
    assert f"<div>{names[20]}</div>" in plain and "<a href=" not in plain.split("</section>")[0]


def test_an_audit_of_fewer_iterations_is_shown_beside_the_sample(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["kedro", "run", "--env=test"])
    monkeypatch.setenv("GEO_SOKOBAN_DATA_ROOT", "/big/runs")
    inputs = make_inputs(audit=audit_with([]), run_id="seed2")
    found = build_report(dataclasses.replace(inputs, whole_audit=audit_with([], len(inputs.metrics) - 1)))
    section = found.split('<section id="audit">')[1].split("</section>")[0]
    assert section.count("<table") == 2 and "the run has gone on since" in section
    command = "kedro run --pipelines=audit_sokoban --env=test --params run_id=seed2"
    assert section.count(f"<code>GEO_SOKOBAN_DATA_ROOT=/big/runs {command}</code>") == 2


def test_what_an_episode_costs():
    def row(episodes, cpu, seen, sampled, seconds):
        time = {"perf/rollout_time": seconds, "perf/update_time": seconds, "perf/tokens_per_second": seen / seconds}
        return {"rollout/episodes": episodes, "perf/cpu_time": cpu, "rollout/response_len/mean": sampled, **time}

    rows = [row(10.0, 2.0, 900.0, 20.0, 3.0), row(30.0, 4.0, 3100.0, 40.0, 5.0)]
    costs = dict(run_facts(rows, []))
    assert costs["an episode, rollout and update"] == "0.15 CPU-seconds"
    assert costs["its tokens"] == "100.0, of them 35.0 sampled"
    assert dict(run_facts([row(2.0, 2468.0, 9.0, 1.0, 1.0)], []))["an episode, rollout and update"] == (
        "1\u202f234 CPU-seconds"
    )
    # Rows of an older version have wall time alone; without tokens there is no word about them.
    older = [{k: v for k, v in one.items() if k not in ("perf/cpu_time", "perf/tokens_per_second")} for one in rows]
    costs = dict(run_facts(older, []))
    assert costs["an episode, rollout and update"] == "0.4 seconds" and "its tokens" not in costs
