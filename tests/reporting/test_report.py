"""The page: parses, stands alone, trusts nobody's text, and survives runs that stored little."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import sys
from html.parser import HTMLParser
from typing import Any

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
from reporting.sites import HOSTILE, make_hostile

SITE = "../../browse_sokoban/default/site"
BARE = [{"iteration": number} for number in range(3)]
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


def lean(**changes: Any) -> ReportInputs:
    """Inputs of a run without episodes and curves, for a page that is quick to build."""
    return make_inputs(**{"metrics": BARE, "warm_start": [], "held_out": {}, "trained": {}} | changes)


def section(page: str, name: str) -> str:
    """Markup of one section of a page."""
    return page.split(f'<section id="{name}">')[1].partition("</section>")[0]


def agents_of(page: Page) -> dict:
    return next(json.loads(text) for attributes, text in page.scripts if attributes.get("id") == "players")


def test_page_stands_alone_and_says_everything():
    """It fetches nothing, allows no script but its own, stores each image once, and is the same for the same inputs."""
    text = build_report(make_inputs(metrics=make_metrics(200)))
    page = Page(text)
    assert {"training", "evaluation", "episodes", "extremes", "time", "data", "settings"} <= page.ids
    for words in ("GRPO raised the solve rate", "Solve rate by optimal length", "Worst", "learning_rate", "2.13.0"):
        assert words in page.text
    assert {link[1:] for link in page.attributes("href")} <= page.ids
    links = page.attributes("src", "href", "srcset", "action", "data", "poster", "xlink:href")
    assert links and all(link.startswith("#") for link in links)
    assert {tag for tag, _ in page.tags}.isdisjoint({"link", "iframe", "object", "embed", "base", "form"})
    assert not re.search(r"url\(|@import", text)
    policy = next(values["content"] for tag, values in page.tags if tag == "meta" and "http-equiv" in values)
    (running,) = [script for attributes, script in page.scripts if attributes.get("type") != "application/json"]
    digest = base64.b64encode(hashlib.sha256(running.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'") and f"script-src 'sha256-{digest}'" in policy
    assert not [name for _, values in page.tags for name in values if name.startswith("on")]
    data = agents_of(page)
    images = list(data["images"].values())
    assert len(set(images)) == len(images) and all(image.startswith("data:image/png;base64,") for image in images)
    assert {frame["image"] for episode in data["episodes"] for frame in episode["frames"]} == set(data["images"])
    shown = {int(value) for value in page.attributes("data-episode", "data-take")}
    assert shown == set(range(len(data["episodes"])))
    assert len(text) < 1_000_000
    assert build_report(make_inputs(metrics=make_metrics(200))) == text


EVERYWHERE = {
    "task": HOSTILE,
    "run": HOSTILE,
    "run_id": HOSTILE,
    "parameters": {HOSTILE: {HOSTILE: HOSTILE}},
    "versions": {HOSTILE: HOSTILE},
    "data_report": {"splits": {HOSTILE: {}}, "split_note": HOSTILE, "source": HOSTILE, "rows_read": 1},
}


def hostile_inputs(**changes: Any) -> ReportInputs:
    """A run with players, a gallery, tokens and an audit, and markup wherever a policy or its folder gives a text."""
    episodes = [make_hostile(play(make_levels(48)[3 + at], 1.0, "train_sokoban/final/sampled", at)) for at in range(3)]
    for episode in episodes:
        episode.advantage, episode.trained, episode.status, episode.drop_reason = 1.0, True, HOSTILE, HOSTILE
    part = {"iter=00000/part-000": lazily(episodes)}
    summary = make_summary()
    summary["rows"][0]["policy"] = HOSTILE
    check = {"check": HOSTILE, "subject": f"a.{HOSTILE}", "checked": 1, "findings": [HOSTILE], "notes": []}
    audit = {"checks": [{**check, "episodes": [HOSTILE]}], "findings": 1, "iterations": 0}
    given = {"held_out": part, "trained": part, "token_texts": lambda ids: [HOSTILE for _ in ids]}
    return make_inputs(**given | {"summary": summary, "audit": audit, "whole_audit": audit} | changes)


def test_texts_are_never_markup():
    text = build_report(hostile_inputs(**EVERYWHERE))
    hostile = Page(text)
    assert "<script>document" not in text and "<img src=x" not in text
    assert not [link for link in hostile.attributes("src", "href") if "onerror" in link]
    assert not [name for _, values in hostile.tags for name in values if name.startswith("on")]
    assert len([1 for attributes, _ in hostile.scripts if attributes.get("type") != "application/json"]) == 1
    assert HOSTILE in agents_of(hostile)["episodes"][0]["frames"][0]["response"]
    assert "{{ 7*7 }}" in hostile.text


NOTHING = {"metrics": [], "summary": {}, "warm_start": [], "held_out": {}, "trained": {}, "data_report": None}
EVALUATION = {"metrics": [], "warm_start": [], "trained": {}, "data_report": None, "run": "evaluate_sokoban"}


@pytest.mark.parametrize(
    ("changes", "sections"),
    [
        pytest.param(NOTHING, {"evaluation", "settings"}, id="nothing"),
        pytest.param(EVALUATION, {"evaluation", "episodes", "settings"}, id="an evaluation"),
        pytest.param({"metrics": BARE[:1], "parameters": {}, "versions": {}}, None, id="bare metrics"),
        pytest.param({"metrics": [{}], "warm_start": [{}]}, None, id="empty rows"),
        pytest.param(
            {"metrics": [{**row, "train/entropy_loss": None} for row in make_metrics(3)]}, None, id="null metrics"
        ),
        pytest.param(
            {"summary": {"policies": ["warm_start", "final"], "rows": [{"policy": "final", "mode": "sampled"}]}},
            None,
            id="bare rows",
        ),
        pytest.param({"summary": {"policies": ["final"]}, "token_texts": None}, None, id="no tokenizer"),
        pytest.param(
            {"held_out": {"iter=00000/part-000": lazily([])}, "trained": {"iter=00000/part-000": lazily([])}},
            None,
            id="empty parts",
        ),
        pytest.param({"data_report": {"splits": {"train": {"levels": 3}}}}, None, id="bare data"),
    ],
)
def test_what_is_missing_leaves_the_page_whole(changes, sections):
    page = Page(build_report(make_inputs(**{"metrics": BARE, "held_out": make_played(4)} | changes)))
    menu = {link[1:] for link in page.attributes("href")}
    assert menu == page.ids - {"players"} and (sections or menu) == menu
    assert not re.search(r"\bnan\b|\bNone\b|\bundefined\b", page.text)
    assert "No evaluation is stored" in page.text or changes.get("summary") != {}


def test_page_says_when_how_and_where_it_was_made():
    entry = {"started": "2026-03-01T10:20:00+01:00", "seconds": 376.0, "outcome": "finished", "cores": 2}
    entry |= {"command": "kedro run --pipelines=train_sokoban", "commit": "abc123+", "processor": "A CPU"}
    time = summarise_commands([{**entry, "seconds": 4.0}, entry])
    page = build_report(
        lean(metrics=make_metrics(3), time=time, summary={**make_summary(), "data_id": "6x6-1box-0af3"})
    )
    text = Page(page).text.replace("\u202f", " ")
    told = ("2026-03-01 10:20", "6 min 20 s in 2 commands", "abc123+", "A CPU, 2 cores", entry["command"])
    for words in (*told, "6x6-1box-0af3", "whole run took 6 min 20 s"):
        assert words in text
    assert "time in iterations" not in text


@pytest.mark.parametrize(
    ("evaluated", "said"),
    [(1, " The evaluation is of the checkpoint after 1 of 4 iterations."), (4, None)],
)
def test_an_evaluation_of_an_older_checkpoint_is_called_one(evaluated, said):
    metrics = [{"iteration": number} for number in range(4)]
    text = Page(build_report(lean(metrics=metrics, summary=make_summary(evaluated)))).text
    assert ("The evaluation is of" in text) == (said is not None) and (said is None or said in text)


def test_lengths_that_one_policy_lacks_are_dashes():
    summary = make_summary()
    del summary["rows"][0]["by_length"][2]
    table = kind_tables(summary)[0]
    assert table.names == ["warm start", "after GRPO", "random legal moves"]
    assert table.lines[2][1][0] is None and table.lines[2][1][1] is not None
    dash = '<td title="">– <span class="quiet"></span></td>'
    assert build_report(lean(summary=summary)).count(dash) == 1


def test_parameters_are_flattened():
    page = build_report(lean(parameters={"train": {"grpo": {"size": 8, "clip": None}, "empty": {}}, "seed": 1}))
    assert [re.findall("<code>(.*?)</code>", table) for table in section(page, "settings").split("<summary>")[1:]] == [
        ["run", "seed", "1"],
        ["train", "grpo.size", "8", "grpo.clip", "null", "empty", "{}"],
    ]


@pytest.mark.parametrize(
    ("task", "options", "title"),
    [
        ("sokoban", {}, "sokoban · "),
        ("geo3k", task_of("geo3k").train_config.model_validate({}).model_dump(), "geo3k · "),
        ("geo3k", {"env": {"factory": "tasks/cells.py:build_env"}}, "own task cells.py · "),
    ],
)
def test_title_names_the_task_of_ones_own(task, options, title):
    page = Page(build_report(lean(task=task, parameters={f"train_{task}": options})))
    assert page.text.strip().startswith(title)


def test_a_page_has_no_words_for_what_its_run_has_not():
    """Columns of the geometry for tasks of one's own; a warm start."""
    summary = make_summary() | {"task": "geo3k"}
    for row in summary["rows"]:
        row["plausible_share"] = None
        row["breakdowns"] = {"family": [{"label": "unknown", "solve_rate": 0.5, "solved": 1, "episodes": 2}]}
    text = Page(build_report(lean(task="geo3k", summary=summary))).text
    assert "lausible" not in text and "unknown" not in text
    summary = json.loads(json.dumps(make_summary()).replace('"warm_start', '"start'))
    text = Page(build_report(lean(held_out=make_played(4), summary=summary))).text
    assert "warm start" not in text.replace("warm_start", "") and "before GRPO, sampled" in text


def trained_by_turns() -> dict[str, Any]:
    """Training episodes whose turns have equal shares of the reward."""
    episodes = table_to_trajectories(make_trained()["iter=00199/part-000"]())
    for episode in episodes:
        turns = [turn for turn in episode.turns if turn.role == "assistant"]
        for turn in turns:
            turn.credit = episode.reward / len(turns)
    return {"iter=00199/part-000": lazily(episodes)}


def test_turns_show_the_reward_that_they_were_trained_on():
    trained = trained_by_turns()
    page = Page(build_report(lean(trained=trained)))
    turn = choose_extremes(trained).best[0].turns[1]
    assert "reward trained on" in page.text and signed(turn.credit) in page.text
    assert signed(turn.credit) != signed(turn.reward)
    # The episode's own advantage trained nothing where the turns have theirs.
    assert " · advantage " not in page.text.split("Best and worst training")[-1]


def test_played_turns_have_their_share_of_the_reward_where_training_had_it():
    parameters = {"train_sokoban": {"reward": {"args": {"aggregate": "sum", "distance_weight": 0.1}}}}
    for trained, reward in ((make_trained(), "reward \u22120.01"), (trained_by_turns(), "reward +1.09")):
        page = Page(build_report(lean(held_out=make_played(), trained=trained, parameters=parameters)))
        assert agents_of(page)["episodes"][0]["frames"][0]["note"].endswith(reward)


def test_lost_levels_are_named_with_their_turn():
    board = Board.from_text("######\n#    #\n# $  #\n# @  #\n#.   #\n######")
    level = dataclasses.replace(make_levels(48)[0], board=board)
    for end_when_lost, wanted in ((True, "not solved after 3 turns"), (False, "not solved after 5 turns")):
        episode = play_moves_of(level, ["left", "right", "up", "left", "right"], end_when_lost)
        assert describe_end(episode) == f"Deadlocked at turn 3: {wanted}."


def test_a_page_beside_a_site_links_into_it():
    """Players of the best and worst episodes and their tokens are then those of the site."""
    trained = make_trained()
    plain, linked = (build_report(lean(trained=trained, site=site)) for site in (None, SITE))
    addresses = [one for one in Page(linked).attributes("href") if one.startswith(SITE)]
    pages = [one.removeprefix(f"{SITE}/index.html#/").partition("?")[0] for one in addresses]
    extremes = choose_extremes(trained)
    shown = [*extremes.best, *extremes.worst]
    assert addresses[0] == f"{SITE}/index.html" and pages.count("group") == len(shown)
    assert f"{SITE}/index.html#/episode?run=train_sokoban/default&id={shown[0].trajectory_id}" in addresses
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
        parts[f"iter={version:05d}/part-000"] = lazily(episodes)
    found = follow_prompts(parts)
    assert (found.versions, found.mode) == ([0, 5, 10], "greedy")
    names = ["optimal: 1 move", *(f"optimal: {number} moves" for number in (2, 4, 5, 7, 8))]
    assert [name for _, name, _ in found.prompts] == names
    last = [answers[-1] for _, _, answers in found.prompts]
    assert all(answer.solved for answer in last)
    assert [len(answer.text) for answer in last] == [1, 2, 4, 5, 7, 8]
    assert set(last[-1].text) <= set("↑↓←→")
    page = Page(build_report(lean(validations=parts)))
    assert "validations" in page.ids and "after 10 iterations" in page.text
    assert follow_prompts({}) is None


def test_curves_come_from_the_training_episodes():
    episodes = table_to_trajectories(make_trained()["iter=00199/part-000"]())
    for episode in episodes[:4]:
        episode.reward, episode.advantage = 1.0, 0.0
    found = summarise_training({"iter=00199/part-000": lazily(episodes)})
    (row,) = found.rows
    equal = sum(len({one.reward for one in episodes[at : at + 4]}) == 1 for at in range(0, 24, 4))
    wanted = {"iteration": 199, "episodes/equal_groups": equal / 6}
    wanted["part/final_bonus"] = sum(e.reward_parts["final_bonus"] for e in episodes) / 24
    wanted["episodes/lost"] = sum(e.metrics["lost"] for e in episodes) / 24
    assert {name: row[name] for name in wanted} == pytest.approx(wanted)
    assert task_of("sokoban").report.reward_parts(found.parts, {}) == ["distance_delta", "final_bonus"]
    assert list(found.kinds) == sorted(found.kinds, key=int)
    length = next(iter(found.kinds))
    solved = [e.metrics["success"] for e in episodes if e.difficulty == length]
    assert found.kinds[length] == [{"iteration": 199, "success": pytest.approx(sum(solved) / len(solved))}]


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
    page = Page(build_report(lean(metrics=make_metrics(3), index=index)))
    assert "What goes wrong" in page.text and "no move" in page.text and "hedge" not in page.text
    # Without tags there is no chart; of many, the most frequent ones are drawn.
    for tags in ([], [("train", 0, []), ("train", 1, [])], [("validation", 0, ["hedge"])]):
        assert tags_chart(tag_shares(make_index(tags))) is None
    names = [f"tag_{number}" for number in range(9)]
    many = make_index([("train", step, names[number:]) for step in range(2) for number in range(9)])
    chart = tags_chart(tag_shares(many))
    assert chart.note.startswith("The 6 most frequent of 9.")
    assert [f"tag {number}" in chart.svg for number in range(9)] == [number > 2 for number in range(9)]


def check_of(name, entry, findings=(), notes=(), episodes=()):
    """Findings of an audit about an entry."""
    subject = f"train_sokoban.{entry}" if entry else "sokoban"
    return {
        "check": name,
        "subject": subject,
        "checked": 5,
        "findings": findings,
        "notes": notes,
        "episodes": episodes,
    }


def test_the_audit_has_a_row_for_each_check_and_its_findings_as_text():
    checks = [
        check_of("replay", "trajectories", ["iter=00001/part-000: a/b: <script>reward"], ["hidden by the finding"]),
        check_of("replay", "eval_trajectories"),
        check_of("groups", "trajectories", (), ["1 of 12 groups without a signal"]),
        check_of("splits", "", (), ["prompts: 2 of 5 rows repeat another one"]),
    ]
    found = section(build_report(lean(audit={"checks": checks, "findings": 1})), "audit")
    for words in (
        "<strong>1 finding.</strong>",
        "trajectories: iter=00001/part-000: a/b: &lt;script&gt;reward",
        "<td>10</td>",  # both entries together
        "trajectories: 1 of 12 groups without a signal",
        "<div>prompts: 2 of 5 rows repeat another one</div>",
    ):
        assert words in found
    assert "hidden by the finding" not in found
    assert '<section id="audit">' not in build_report(lean())


def audit_with(episodes, iterations):
    """An audit of so many iterations with findings about these episodes."""
    checks = [check_of("replay", "trajectories", ["<b>x</b>"] * 8, episodes=episodes)]
    return {"checks": checks, "findings": 8, "iterations": iterations}


def test_a_whole_audit_takes_the_place_of_the_sample_and_links_to_its_episodes():
    names = [f"train_sokoban/i00001/g{number:03d}/s00" for number in range(21)] + ['<script>&"']
    inputs = lean(audit=audit_with(names[:1], 1), whole_audit=audit_with(names[::-1], 3), site=SITE)
    found = section(build_report(inputs), "audit")
    assert found.count("<table") == 1 and "Looked at all episodes" in found and "has gone on" not in found
    assert found.count("&lt;b&gt;x&lt;/b&gt;") == 6 and "and 2 more" in found
    assert found.count("<a href=") == 20 and "22 episodes" in found
    address = f"{SITE}/index.html#/episode?run=train_sokoban/default&amp;id="
    assert f'<a href="{address}{names[20]}">{names[20]}</a>' in found
    assert f'<a href="{address}%3Cscript%3E%26%22">&lt;script&gt;&amp;&#34;</a>' in found
    plain = section(build_report(dataclasses.replace(inputs, site=None)), "audit")
    assert f"<div>{names[20]}</div>" in plain and "<a href=" not in plain


def test_an_audit_of_fewer_iterations_is_shown_beside_the_sample(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["kedro", "run", "--env=test"])
    monkeypatch.setenv("GEO_SOKOBAN_DATA_ROOT", "/big/runs")
    inputs = lean(audit=audit_with([], 1), whole_audit=audit_with([], 2), run_id="seed2")
    found = section(build_report(inputs), "audit")
    assert found.count("<table") == 2 and "the run has gone on since" in found
    command = "kedro run --pipelines=audit_sokoban --env=test --params run_id=seed2"
    assert found.count(f"<code>GEO_SOKOBAN_DATA_ROOT=/big/runs {command}</code>") == 2


def test_what_an_episode_costs():
    def row(episodes, cpu, seen, sampled, seconds):
        time = {"perf/rollout_time": seconds, "perf/update_time": seconds, "perf/tokens_per_second": seen / seconds}
        return {"rollout/episodes": episodes, "perf/cpu_time": cpu, "rollout/response_len/mean": sampled, **time}

    rows = [row(10.0, 2.0, 900.0, 20.0, 3.0), row(30.0, 4.0, 3100.0, 40.0, 5.0)]
    # Rows of an older version have wall time alone; without tokens there is no word about them.
    older = [{k: v for k, v in one.items() if k not in ("perf/cpu_time", "perf/tokens_per_second")} for one in rows]
    for found, cost, tokens in (
        (rows, "0.15 CPU-seconds", "100.0, of them 35.0 sampled"),
        ([row(2.0, 2468.0, 9.0, 1.0, 1.0)], "1\u202f234 CPU-seconds", "4.5, of them 1.0 sampled"),
        (older, "0.4 seconds", None),
    ):
        costs = dict(run_facts(found, []))
        assert (costs["an episode, rollout and update"], costs.get("its tokens")) == (cost, tokens)
