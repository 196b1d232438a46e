"""The browser's pages in a headless Chromium: what a reader sees, clicks and types."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from builders import CONTEXT
from chromium import Page, open_page
from geo_sokoban_pipeline.evaluation.metrics import mcnemar
from geo_sokoban_pipeline.formats import p_value, percent
from geo_sokoban_pipeline.grpo.loss import policy_loss
from geo_sokoban_pipeline.reporting.viewer.site import write_site
from geo_sokoban_pipeline.reporting.viewer.sources import open_run
from geo_sokoban_pipeline.tasks import task_of
from geo_sokoban_pipeline.trajectories.index import Place, build_index
from geo_sokoban_pipeline.trajectories.schema import OCCLUSION, TOKEN_SCORES
from geo_sokoban_pipeline.trajectories.types import Trajectory, trajectories_to_table
from legible import illegible
from reporting.material import WORDS, make_levels, play
from reporting.sites import (
    HOSTILE,
    answer_groups,
    make_hostile,
    play_groups,
    rows_of_scores,
    store,
    store_scores,
)

pytestmark = pytest.mark.slow
RUN = "train_sokoban/default"
WIDEST = {5: 0.125, 7: -0.5}  # by the episode's place: trainer minus engine at its third sampled token
SCORED = 7  # place of the episode with scores and a map
RATIOS, RELIANCES, ENTROPY = (0.5, 1.0, 2.0), (0.0, 1.5, -0.5), 0.75  # in turn, of its sampled tokens
ALL_CHANNELS = ("loss mask", "log-prob", "advantage", "trainer − engine", "ratio new to old", "clipped")


@pytest.fixture(scope="module")
def episodes() -> list[Trajectory]:
    """Those of the run: three iterations of boards. The trainer's log-probs differ where `WIDEST` says."""
    found = [one for number in range(3) for one in play_groups(0.2 + 0.3 * number, iteration=number)]
    for number, gap in WIDEST.items():
        episode = found[number]
        assert episode.old_log_probs is not None
        episode.old_log_probs[np.flatnonzero(episode.loss_mask)[2]] += np.float32(gap)
    return found


@pytest.fixture(scope="module")
def held_out() -> dict[str, list[Trajectory]]:
    """Evaluation episodes of two runs, by run id; each prompt has a sampled one, and a greedy one that is solved."""
    found = {}
    for run_id, skill in (("default", 0.35), ("seed2", 0.75)):
        found[run_id] = [
            play(level, 1.0 if mode == "greedy" else skill, f"train_sokoban/final/{run_id}/{mode}", group)
            for mode in ("sampled", "greedy")
            for group, level in enumerate(make_levels(16))
        ]
    return found


@pytest.fixture(scope="module")
def site(
    episodes: list[Trajectory], held_out: dict[str, list[Trajectory]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A site of that run, of a second one, and of one with hostile texts."""
    root = tmp_path_factory.mktemp("data")
    store(root, episodes, "train_sokoban", "default")
    hostile = [make_hostile(one) for one in answer_groups("geo3k_multi_turn", groups=1)]
    store_scores(root, "token_scores", make_scores(episodes[SCORED]), TOKEN_SCORES)
    maps = make_map(episodes[SCORED], "train_sokoban", "box") + make_map(hostile[0], "train_geo3k_multi_turn", HOSTILE)
    store_scores(root, "occlusion", maps, OCCLUSION)
    named = []
    walls = {one.task_id: f"walls {one.group_index % 2}" for own in held_out.values() for one in own}
    for run_id, own in held_out.items():
        run = open_run(store(root, own, "train_sokoban", run_id, "held_out_trajectories"))
        settings = {"seed": len(named), **bounded(0.2, 0.28, None)}
        named.append(
            replace(run, clusters=walls, settings=settings, token_texts=lambda ids: [WORDS[one] for one in ids])
        )
    other = open_run(store(root, hostile, "train_geo3k_multi_turn", "default"))
    folder = tmp_path_factory.mktemp("site")
    hostile_run = replace(other, token_texts=lambda ids: [HOSTILE for _ in ids], evaluation=make_evaluation(HOSTILE))
    write_site(folder, [replace(named[0], evaluation=make_evaluation("final")), *named[1:], hostile_run])
    return folder


def bounded(low: float, high: float, dual: float | None) -> dict[str, Any]:
    """Settings of a run with PPO's loss."""
    args = {"clip_low": low, "clip_high": high, "dual_clip": dual}
    return {"grpo.loss": "ppo", **{f"grpo.loss_args.{name}": value for name, value in args.items()}}


def make_scores(episode: Trajectory) -> list[dict[str, Any]]:
    """Rows of `token_scores`, in which ratios and reliances take turns."""
    count = int(episode.loss_mask.sum())
    turns = {"ratio": RATIOS, "image_reliance": RELIANCES}
    columns = {name: [values[at % len(values)] for at in range(count)] for name, values in turns.items()}
    return rows_of_scores(episode, scored_version=9, entropy=ENTROPY, **columns)


def make_map(episode: Trajectory, run: str, content: str) -> list[dict[str, Any]]:
    """Rows of `occlusion` of the first image: two halves, the left one needed by the first token of the response."""
    first = next(turn for turn in episode.turns if turn.role == "assistant")
    width, height = (int.from_bytes(episode.images[0][at : at + 4], "big") for at in (16, 20))
    half = {"top": 0, "width": width // 2, "height": height, "positions": [first.token_start, first.token_start + 1]}
    whose = {"run": run, "run_id": "default", "trajectory_id": episode.trajectory_id, "turn": 0, "image": 0}
    drops = [[0.5, 0.0], [-0.125, -0.125]]
    return [
        {**whose, **half, "left": number * (width // 2), "content": content, "drops": own, "drop": sum(own)}
        for number, own in enumerate(drops)
    ]


def make_evaluation(policy: str) -> dict[str, Any]:
    """Summary rows with and without images: the kind `b` loses all, `a` nothing."""
    solved = {policy: {"a": 1, "b": 4}, f"{policy}_blank": {"a": 1, "b": 0}}
    rows = [
        {
            "policy": name,
            "mode": "sampled",
            "episodes": 8,
            "by_length": [{"length": kind, "solved": one, "episodes": 4} for kind, one in kinds.items()],
        }
        for name, kinds in solved.items()
    ]
    return {"task": "sokoban", "rows": rows}


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with open_page() as page:
        page.look(1300)
        yield page


@pytest.fixture
def page(browser: Page, site: Path) -> Iterator[Page]:
    """The list of the site, newly opened; a test fails if a script of the page has failed."""
    browser.open(f"file://{site}/index.html", until="document.documentElement.dataset.ready")
    yield browser
    assert browser.errors == []


def address(episode: Trajectory, **more: Any) -> str:
    further = "".join(f"&{name}={value}" for name, value in more.items())
    return f"#/episode?run={RUN}&id={episode.trajectory_id}{further}"


def go(page: Page, route: str, shown: str) -> None:
    """Follow a route and wait until an element of the page there is shown."""
    page.follow(route, until=f"document.querySelector({json.dumps(shown)}) !== null")


def count_of(page: Page) -> int:
    """Episodes that the list says it shows."""
    return int(page.text(".summary strong").replace(",", ""))


QUERIES: list[tuple[str, Any]] = [
    ("", lambda one: True),
    ("success:no", lambda one: one.metrics["success"] < 0.5),
    ("-success:no", lambda one: one.metrics["success"] >= 0.5),
    ("iteration>=1 iteration<2", lambda one: one.iteration == 1),
    ("iter:2 reward>0.01", lambda one: one.iteration == 2 and one.reward > 0.01),
    ("sample:3", lambda one: one.sample_index == 3),
    ("i00001/g001", lambda one: "i00001/g001" in one.trajectory_id),
    ('"i00001/g001" -s02', lambda one: "i00001/g001" in one.trajectory_id and "s02" not in one.trajectory_id),
    ("reward<-1000", lambda one: False),
    ("colour:red", lambda one: False),  # no such column: a text that nothing has
]


def test_queries(page: Page, episodes: list[Trajectory]) -> None:
    for query, holds in QUERIES:
        whole = f"{query} run:{RUN} split:train"
        page.follow(f"#/list?q={whole}", until=f"route.args.q === {json.dumps(whole)} && (m.redraw.sync(), true)")
        assert count_of(page) == sum(map(holds, episodes)), query
        found = page.run(f"selectRows({json.dumps(whole)}).map(row => cell('trajectory_id', row))")
        assert found == [one.trajectory_id for one in episodes if holds(one)], query


def test_the_list_is_sorted_and_its_filters_write_the_query(page: Page) -> None:
    for sort in ("-reward", "reward", "-tag.oscillation", "answer"):
        found = page.run(f"selectRows('', '{sort}').map(row => valueOf('{sort.removeprefix('-')}', row))")
        known = [value for value in found if value is not None]
        assert known == sorted(known, reverse=sort.startswith("-")) and found[: len(known)] == known
    page.click(".head a[title='sort by reward']", until="route.args.sort === '-reward'")
    page.run(
        "(() => { const select = [...document.querySelectorAll('.filters label')]"
        ".find(one => one.firstChild.textContent === 'success').querySelector('select');"
        "select.value = 'yes'; select.dispatchEvent(new Event('change')); })()"
    )
    page.wait("route.args.q === 'success:yes' && document.querySelector('#search').value === 'success:yes'")
    # The address holds it: the same opens again.
    page.open(page.run("location.href"), until="document.documentElement.dataset.ready")
    assert count_of(page) == page.run("selectRows('success:yes').length") < page.run("rows")
    # 36 episodes, and three hostile ones of iteration 0.
    go(page, "#/list?by=iteration&q=split:train", ".breakdown")
    assert [line.split()[:2] for line in page.texts(".breakdown tbody tr")] == [["0", "15"], ["1", "12"], ["2", "12"]]


def test_an_episode_shows_what_is_stored(page: Page, episodes: list[Trajectory]) -> None:
    episode = max(episodes, key=lambda one: len(one.turns))
    go(page, address(episode), ".turn")
    own = [turn for turn in episode.turns if turn.role == "assistant"]
    assert page.texts(".turn .text pre") == [turn.text for turn in episode.turns if turn.text]
    assert page.texts(".turn .action") == [turn.action for turn in own]
    assert page.run("document.querySelectorAll('.turn .seen').length") == len(episode.images)
    assert page.run("[...document.images].every(one => one.naturalWidth > 0)")
    made = [text for text, mask in zip(episode.token_ids.tolist(), episode.loss_mask.tolist(), strict=True) if mask]
    assert page.texts(".tok.made") == [WORDS[token] for token in made]
    # Of the given tokens the pads are one piece.
    assert page.texts(".tok.image") == ["image ×9"] * len(episode.images)
    assert f"{episode.reward:.3f}".rstrip("0").replace("-", "−") in page.text(".panel")


def test_channels_and_tokens(page: Page, episodes: list[Trajectory]) -> None:
    episode = episodes[5]
    go(page, address(episode), ".tok.made")
    assert page.text(".channels [aria-pressed=true]") == "log-prob"
    assert page.texts(".channels button:disabled") == [
        "value before",
        "measured advantage",
        "ratio new to old",
        "clipped",
        "reference − engine",
        "entropy",
        "use of the image",
    ]
    page.press(".", until="document.querySelector('.detail') !== null")
    first = int(np.flatnonzero(episode.loss_mask)[0])
    assert f"token {first} of {len(episode.token_ids)}" in page.text(".detail")


def open_scored(page: Page, episodes: list[Trajectory], **more: Any) -> Trajectory:
    page.follow(
        address(episodes[SCORED], **more),
        until=f"openEpisode?.row === {SCORED} && document.querySelectorAll('.tok.made').length > 0",
    )
    return episodes[SCORED]


LEVEL = "Number(one.style.getPropertyValue('--level')) * (one.classList.contains('less') ? -1 : 1)"
LEVELS = f"[...document.querySelectorAll('.tok.made')].map(one => {LEVEL})"
CHANNELS = [
    ("mask", lambda e, k: 0.25),
    ("probability", lambda e, k: np.exp(e.rollout_log_probs[e.loss_mask == 1][k])),
    ("advantage", lambda e, k: np.sign(e.advantage)),
    ("gap", lambda e, k: -1.0 if k == 2 else 0.0),
    ("ratio", lambda e, k: np.clip(np.log(RATIOS[k % 3]) / 0.5, -1, 1)),
    ("entropy", lambda e, k: ENTROPY / 2),
    ("reliance", lambda e, k: RELIANCES[k % 3] / 2),
    ("clipped", lambda e, k: np.sign(e.advantage) * (RATIOS[k % 3] == {1: 2.0, -1: 0.5}[int(np.sign(e.advantage))])),
]


def test_the_colour_of_each_channel(page: Page, episodes: list[Trajectory]) -> None:
    """Clipped are ratios beyond the range on the side that is pushed to: the settings clip at 1.28 and at 0.8."""
    for channel, level in CHANNELS:
        episode = open_scored(page, episodes, channel=channel)
        page.wait(f"route.args.channel === '{channel}' && (m.redraw.sync(), true)")
        wanted = [float(level(episode, k)) for k in range(int(episode.loss_mask.sum()))]
        assert page.run(LEVELS) == pytest.approx(wanted, abs=0.006), channel
        assert set(ALL_CHANNELS) <= set(page.texts(".channels button:enabled"))
    # Every bound is the run's own; where one is not stored, or the loss has others, nothing is called clipped.
    bounds = bounded(0.2, 0.28, None)
    without = {name: value for name, value in bounds.items() if not name.endswith("dual_clip")}
    for settings in (without, {**bounds, "grpo.loss": "gspo"}):
        page.run(f"openEpisode.settings = {json.dumps(settings)}; m.redraw.sync()")
        assert "clipped" in page.texts(".channels button:disabled") and set(page.run(LEVELS)) == {0}
    page.run(f"openEpisode.settings = {json.dumps(bounds)}; m.redraw.sync()")
    assert "clipped" not in page.texts(".channels button:disabled") and set(page.run(LEVELS)) > {0}
    # One token: its own numbers.
    open_scored(page, episodes, token=int(np.flatnonzero(episode.loss_mask)[2]))
    page.wait("document.querySelector('.detail') !== null")
    own = episode.rollout_log_probs[episode.loss_mask == 1][2]
    found = dict(zip(page.texts(".detail dt"), page.texts(".detail dd"), strict=True))
    assert found["log-prob"].startswith(f"−{abs(own):.4f}".rstrip("0")) and found["ratio new to old"] == "2"
    assert found["trainer − engine"] == "−0.5 nats" and found["use of the image"] == "−0.5 nats"


BOUNDS: list[tuple[tuple[float, float, float | None], int, list[int]]] = [  # and an advantage; ratios below
    ((0.2, 0.28, None), 1, [0, 0, 0, 1, 1]),
    ((0.2, 0.28, None), -1, [-1, 0, 0, 0, 0]),
    ((0.5, 1.5, None), 1, [0, 0, 0, 0, 1]),
    ((0.5, 1.5, None), -1, [0, 0, 0, 0, 0]),
    ((0.2, 0.28, 3.0), 1, [0, 0, 0, 1, 1]),
    ((0.2, 0.28, 3.0), -1, [-1, 0, 0, 0, 1]),  # dual-clip PPO
    ((0.2, 0.28, 3.0), 0, [0, 0, 0, 0, 0]),
]


def test_the_bounds_are_those_of_the_loss(page: Page) -> None:
    ratios = [0.7, 0.9, 1.2, 2.0, 4.0]
    for bounds, advantage, clipped in BOUNDS:
        episode = json.dumps({"settings": bounded(*bounds), "scores": {"ratio": ratios}})
        found = page.run(f"{ratios}.map((_, k) => isClipped({episode}, k, {{advantage: {advantage}}}))")
        assert found == clipped
        if advantage:  # the loss itself has no gradient there
            log_probs = torch.tensor(np.log(ratios)[None], requires_grad=True)
            ones = torch.ones(1, 5)
            clips = dict(zip(("clip_low", "clip_high", "dual_clip"), bounds, strict=True))
            policy_loss(log_probs, ones * 0, advantage * ones, ones, **clips).loss.backward()
            assert [int(one == 0) for one in log_probs.grad[0]] == [abs(one) for one in clipped]


@pytest.mark.parametrize(
    ("worths", "worst", "lost"),
    [
        ([(0.5, 0.6, True, True), (0.6, 0.1, True, False), (0.1, 0.0, False, False)], 1, 1),
        ([(0.5, 0.5, True, True), None, (0.5, 0.25, True, False)], 2, 2),  # a turn was left out
        ([(0.25, 0.5, None, None), (0.5, 1.0, None, None)], None, None),  # nothing was lost, and no solver knows more
    ],
)
def test_the_turn_that_loses_most(page: Page, worths: list[Any], worst: int | None, lost: int | None) -> None:
    """Of the value where there is no goal."""
    for names in (("success", "success_after"), ("value", "value_after")):
        base = dict.fromkeys(("success", "success_after", "value", "value_after"))
        known = [
            one and {**base, **dict(zip((*names, "is_solvable", "is_solvable_after"), one, strict=True))}
            for one in worths
        ]
        frames = [{"turn": {"worth": worth}, "at": at} for at, worth in enumerate(known)]
        found = page.run(f"largestDrop({json.dumps({'frames': frames})})")
        assert [one and one["at"] for one in (found["worst"], found["lost"])] == [worst, lost]


def test_the_occlusion_map_lies_over_its_image(page: Page, episodes: list[Trajectory]) -> None:
    episode = open_scored(page, episodes)
    assert page.run("document.querySelectorAll('.mapped').length") == 0
    # One image has a map.
    page.click(
        ".channels [aria-label='Occlusion maps of the images'] button",
        until="document.querySelectorAll('.turn .mapped').length === 1",
    )
    page.press("m", until="document.querySelectorAll('.mapped').length === 0")
    page.press("m", until="document.querySelectorAll('.turn .mapped').length === 1")
    assert page.run("route.args.map") == "on"
    parts = f"[...document.querySelectorAll('.turn .mapped i')].map(one => {LEVEL})"
    assert page.run(parts) == [1, -0.5] and "(box): +0.5 nats" in page.text(".hint.map")
    boxes = page.run(
        "[document.querySelector('.turn .mapped'), ...document.querySelectorAll('.turn .mapped i')]"
        ".map(one => one.getBoundingClientRect()).map(box => [box.left, box.width, box.height])"
    )
    (left, width, height), first, second = boxes
    assert first == pytest.approx([left, width / 2, height]) and second[0] == pytest.approx(left + width / 2)
    # In a narrow window the large image keeps its shape, too.
    page.look(400)
    shape = page.run(
        "(box => box.width / box.height)(document.querySelector('.player .mapped').getBoundingClientRect())"
    )
    page.look(1300)
    assert shape == pytest.approx(1, abs=0.01)
    # A token that the map knows has one of its own; the address holds both.
    token = int(np.flatnonzero(episode.loss_mask)[1])
    page.open(
        page.run("location.href") + f"&token={token}", until="document.querySelectorAll('.turn .mapped i').length === 2"
    )
    assert page.run(parts) == [0, -1] and f"token {token} likelier" in page.text(".hint.map")


def test_the_token_with_the_widest_gap(page: Page, episodes: list[Trajectory]) -> None:
    go(page, f"#/tokens?run={RUN}&sort=-widest", ".tokens tbody tr")
    assert page.texts(".tokens tbody tr td:nth-child(6)")[0] == "−0.5"
    page.click(".tokens tbody tr td:nth-child(6) a", until="document.querySelector('.detail') !== null")
    at = int(np.flatnonzero(episodes[SCORED].loss_mask)[2])
    assert page.run("[route.args.id, route.args.channel, Number(route.args.token)]") == [
        episodes[SCORED].trajectory_id,
        "gap",
        at,
    ]
    assert f"at token {at}" in page.text(".panel")


def test_a_site_says_which_episodes_have_pages(page: Page, episodes: list[Trajectory], tmp_path: Path) -> None:
    run = open_run(store(tmp_path, episodes, "train_sokoban", "default"))
    write_site(tmp_path / "site", [run], pages=8)
    page.open(
        (tmp_path / "site" / "index.html").as_uri(),
        until="document.documentElement.dataset.ready && document.querySelector('.summary') !== null",
    )
    assert page.text(".summary").startswith(f"{len(episodes)} episodes, 8 with a page")
    page.follow(
        "#/list?q=page:no&sort=-max_log_prob_gap",
        until=f"document.querySelector('.summary strong').innerText === '{len(episodes) - 8}'",
    )
    # The widest gap has a page, and the list names its token.
    page.follow("#/list?sort=-max_log_prob_gap", until="document.querySelector('.summary strong').innerText === '36'")
    episode = episodes[SCORED]
    at = int(np.flatnonzero(episode.loss_mask)[2])
    cells = page.run("[...document.querySelector('#rows .row').children].slice(-3).map(one => one.innerText)")
    assert cells == ["0.5", f'"{episode.token_ids[at]}"', str(at)]
    assert episode.trajectory_id in page.run("document.querySelector('#rows .row').hash")
    other = episodes[page.run("selectRows('page:no', '')[0]")]
    page.follow(
        address(other),
        until="document.querySelector('main .empty') !== null && document.querySelector('.facts') !== null",
    )
    assert "no page of this episode" in page.text(".empty")
    known = dict(zip(page.texts(".facts dt"), page.texts(".facts dd"), strict=True))
    assert known["task_id"] == other.task_id and known["max_log_prob_gap"] == "0 nats"


def test_tokens_are_counted_and_filtered(page: Page, episodes: list[Trajectory]) -> None:
    held = [int(one) for episode in episodes for one in episode.token_ids[episode.loss_mask == 1]]
    page.follow(f"#/tokens?run={RUN}&q=answer", until="document.querySelectorAll('.tokens tbody tr').length === 2")
    shown = dict(zip(page.texts(".tokens tbody code"), page.texts(".tokens tbody td:nth-child(3)"), strict=True))
    counts = {WORDS[token]: times for token, times in Counter(held).items()}
    # The run has evaluation episodes, too.
    assert int(shown['"<answer>"'].replace(",", "")) > counts["<answer>"]
    page.follow(
        f"#/tokens?run={RUN}&sort=-image_reliance&least=2", until="route.args.least === '2' && (m.redraw.sync(), true)"
    )
    chosen = "chooseTokens(all[tokenRun()], route.args).map(at => all[tokenRun()].image_reliance[at])"
    found = page.run(f"load('tokens').then(all => {chosen})")
    assert found == sorted(found, reverse=True) and None not in found


def test_kinds_that_lose_most_without_images_come_first(page: Page) -> None:
    go(page, f"#/images?run={RUN}", ".images tbody tr")
    assert [line.split("\t") for line in page.texts(".images tr")[1:]] == [
        ["b", "4", "100.0 %", "0.0 %", "−100 points"],
        ["a", "4", "25.0 %", "25.0 %", "0 points"],
        ["all", "8", "62.5 %", "12.5 %", "−50 points"],
    ]


def test_a_breakdown_by_the_use_of_the_image(page: Page, episodes: list[Trajectory]) -> None:
    go(page, f"#/list?q=run:{RUN} split:train&by=difficulty&of=image_reliance", ".breakdown tbody tr")
    found = {line.split("\t")[0]: line.split("\t")[-1] for line in page.texts(".breakdown tbody tr")}
    count = int(episodes[SCORED].loss_mask.sum())
    mean = np.mean([RELIANCES[at % 3] for at in range(count)])
    known = {kind: text for kind, text in found.items() if text != "–"}
    assert known == {episodes[SCORED].difficulty: f"{mean:.3f}".rstrip("0").rstrip(".")}


def test_keys(page: Page, episodes: list[Trajectory]) -> None:
    """`j` and `k` go through a list, Space plays, `.` and `,` go through tokens, `g` and `t` open group and task."""
    first, second = np.flatnonzero(episodes[2].loss_mask)[:2].tolist()
    for keys, state in (
        ("jjk", "document.querySelector('.row.on').dataset.at === '1'"),
        (["Enter"], f"route.args.id === '{episodes[1].trajectory_id}' && openEpisode?.row === 1"),
        ("j", f"route.args.id === '{episodes[2].trajectory_id}' && openEpisode?.row === 2"),
        (["ArrowRight"], "Number(route.args.turn) === 1"),
        (" ", "player.timer !== null"),
        (" ", "player.timer === null"),
        ("..", f"Number(route.args.token) === {second}"),
        (",", f"Number(route.args.token) === {first}"),
        ("g", "route.page === 'group' && document.querySelector('.tree') !== null"),
        ("u", "route.page === 'list' && document.querySelector('.row.on') !== null"),
        (["Enter"], "route.page === 'episode' && openEpisode?.row === 2"),
        ("t", f"route.page === 'task' && route.args.id === '{episodes[2].task_id}'"),
        ("u", "route.page === 'list' && document.querySelector('#search') !== null"),
        ("/", "document.activeElement.id === 'search'"),
        ("x", "route.args.q === 'x'"),
        (["Escape", "?"], "document.querySelector('.keys') !== null"),
    ):
        page.press(*keys, until=state)


def test_a_key_goes_round_the_channels(page: Page, episodes: list[Trajectory]) -> None:
    open_scored(page, episodes)
    pressed, seen = ".channels [aria-pressed=true]", []
    before, names = page.text(pressed), page.texts(".channels [aria-label='Channel of the tokens'] button:enabled")
    for _ in names:
        page.press("c")
        page.run("m.redraw.sync()")
        seen.append(page.text(pressed))
    assert seen[-1] == before and sorted(seen) == sorted(names)


LINKED = {
    "list": f"'#/list?q=run:{RUN} success:no&sort=-reward&by=difficulty&of=image_reliance'",
    "episode": f"episodeLink({SCORED}, {{channel: 'ratio', token: 17, map: 'on', turn: 1}})",
    "group": f"groupLink({SCORED})",
    "tasks": f"'#/tasks?q=run:{RUN} split:train&sort=-solved&after=1'",
    "task": f"taskLink({SCORED})",
    "tokens": f"'#/tokens?run={RUN}&sort=-entropy&least=2&q=e'",
    "images": f"'#/images?run={RUN}&mode=sampled'",
    "compare": "href('compare', {show: 'all', task: cell('task_id', selectRows('split:evaluation')[0])})",
}


def test_an_address_opens_the_same_page_anew(page: Page) -> None:
    ready = "route.page !== 'none' && ![...document.querySelectorAll('.empty')].some(one => one.innerText === '…')"
    for link in LINKED.values():
        route = page.run(link)
        same = f"decodeURIComponent(location.hash) === decodeURIComponent({json.dumps(route)})"
        page.follow(route, until=f"location.hash.length > 1 && {same}")
        page.wait(ready)
        page.run("m.redraw.sync()")
        shown = page.text()
        page.open(page.run("location.href"), until=f"document.documentElement.dataset.ready && {ready}")
        page.run("m.redraw.sync()")
        # The neighbours of an episode are those of the list that it was opened from.
        assert re.sub(r"\d+ of \d+", "", page.text()) == re.sub(r"\d+ of \d+", "", shown)
    page.follow("#/episode?id=none", until="document.body.innerText.includes('There is no episode none')")
    page.follow("#/nowhere", until="document.body.innerText.includes('There is no page nowhere')")


HOSTILE_ROW = "selectRows('run:train_geo3k_multi_turn/default')[0]"
HOSTILE_SIDE = "train_geo3k_multi_turn/default|train|all"
HOSTILE_TASK = f"cell('task_id', {HOSTILE_ROW})"
HOSTILE_PAGES = {
    "list": "'#/list?q=run:train_geo3k_multi_turn/default'",
    "answers": "'#/list?by=answer'",
    "difficulties": "'#/list?by=difficulty'",
    "episode": f"episodeLink({HOSTILE_ROW}, {{channel: 'mask', token: 16}})",
    "group": f"groupLink({HOSTILE_ROW})",
    "tasks": "'#/tasks?q=run:train_geo3k_multi_turn/default'",
    "task": f"taskLink({HOSTILE_ROW})",
    "map": f"episodeLink({HOSTILE_ROW}, {{map: 'on'}})",
    "tokens": "'#/tokens?run=train_geo3k_multi_turn/default'",
    "images": "'#/images?run=train_geo3k_multi_turn/default'",
    "compare": f"href('compare', {{a: '{HOSTILE_SIDE}', b: '{HOSTILE_SIDE}', show: 'all', task: {HOSTILE_TASK}}})",
}


def test_hostile_text_is_text(page: Page) -> None:
    for link in HOSTILE_PAGES.values():
        route = page.run(link)
        page.follow(route, until=f"decodeURIComponent(location.hash) === decodeURIComponent({json.dumps(route)})")
        page.wait("(m.redraw.sync(), document.body.innerText.includes('document.title'))")
        assert "onerror=" in page.text() and page.run("document.title").startswith("Episodes")
        assert page.run("[...document.images].every(one => one.getAttribute('src').startsWith('data:'))")
        assert page.run("[...document.scripts].every(one => /^(assets|data)\\//.test(one.getAttribute('src')))")


PAIR = "href('compare', {show: 'all', task: cell('task_id', selectRows('split:evaluation')[0])})"
SHOWN = {
    "'#/tasks'": ".tasks tbody tr",
    "'#/tokens'": ".tokens tbody tr",
    "'#/images'": ".images tbody tr",
    "'#/compare'": ".pairs tbody tr",
    "'#/list?by=iteration'": ".breakdown",
    f"taskLink({SCORED})": ".task .seen",
    "episodeLink(35)": ".turn",
    f"episodeLink({SCORED}, {{map: 'on'}})": ".turn .mapped",
    "groupLink(35)": ".tree",
    PAIR: ".pair",
}


@pytest.mark.parametrize("link", SHOWN)
def test_pages_fit_the_window_and_can_be_read(page: Page, link: str) -> None:
    """In every colour scheme each text has the contrast of WCAG; every channel of the tokens, too."""
    go(page, page.run(link), SHOWN[link])
    for width, dark in product((400, 1300), (True, False)):  # ends as the other tests look at pages
        page.look(width, dark=dark)
        page.run("m.redraw.sync()")
        assert page.run("document.documentElement.scrollWidth") <= width
        assert illegible(page, dark=dark) == []
        for channel in page.run("Object.keys(CHANNELS)") if "map" in link else ():
            page.run(f"setArgs({{channel: '{channel}'}}); m.redraw.sync()")
            assert illegible(page) == [], channel


# Groups, tasks, comparisons.


def branches(samples: list[Trajectory], start: int = 0) -> list[tuple[int, ...]]:
    """Samples of each node of the tree below the root, as their numbers, in any order."""
    shared = start
    while len({tuple(one.token_ids[shared : shared + 1]) for one in samples}) == 1 and shared < len(
        samples[0].token_ids
    ):
        shared += 1
    ways: dict[int, list[Trajectory]] = {}
    for one in samples:
        if shared < len(one.token_ids):
            ways.setdefault(int(one.token_ids[shared]), []).append(one)
    found = [] if len(ways) + sum(shared == len(one.token_ids) for one in samples) < 2 else list(ways.values())
    return [key for own in found for key in (tuple(one.sample_index for one in own), *branches(own, shared))]


def test_the_tree_of_a_group(page: Page, episodes: list[Trajectory]) -> None:
    group = [one for one in episodes if (one.iteration, one.group_index) == (1, 1)]
    go(page, f"#/group?run={RUN}&id={group[2].trajectory_id}", ".tree .node")
    numbers = "one.samples.map(({row}) => cell('sample_index', row))"
    collect = f"(node) => node.children.flatMap(one => [{numbers}, ...collect(one)])"
    nodes = page.run(
        f"(async () => {{ const collect = {collect}; const group = await loadGroup({episodes.index(group[2])});"
        "return collect(group.tree); })()"
    )
    assert sorted(map(tuple, nodes)) == sorted(branches(group))
    # Each branch begins with a boxed token and has the side of its mean advantage.
    assert page.run("document.querySelectorAll('.tree .parts').length") == len(nodes)
    side = "[...document.querySelectorAll('.tree .node')].map(one => one.classList.contains('less'))"
    said = page.texts(".tree .branch > span:nth-of-type(2)")
    assert page.run(side) == [text.startswith("advantage −") for text in said]
    # Every sample is somewhere, with its reward; the prompt is there once.
    assert len(page.texts(".tree .sample")) == len(group)
    assert page.texts(".tree .begins").count("user") <= len({tuple(one.turns[0].text) for one in group}) + len(nodes)
    assert page.run("document.querySelectorAll('.samples tbody tr').length") == len(group)
    page.click(".tree .sample", until="route.page === 'episode'")


def test_tasks_and_when_they_were_first_solved(page: Page, episodes: list[Trajectory]) -> None:
    first: dict[str, int] = {}
    for one in episodes:  # by iteration
        if one.metrics["success"] >= 0.5:
            first.setdefault(one.task_id, one.iteration)
    late = {task: number for task, number in first.items() if number >= 1}
    assert late, "a skill of 0.2 solves none of the levels at once"
    go(page, f"#/tasks?q=run:{RUN} split:train&sort=first&after=1", ".tasks tbody tr")
    found = page.run("chooseTasks(route.args).map(one => [cell('task_id', one.row), one.first])")
    assert dict(found) == late and [number for _, number in found] == sorted(late.values())
    page.click(".tasks tbody a", until="route.page === 'task' && document.querySelector('.task .seen') !== null")
    task, number = found[0]
    assert task in page.text("h1") and f"policy version {number}" in page.text("section .summary")
    own = f"[...document.querySelectorAll('section')].find(one => one.innerText.startsWith('{RUN}, train'))"
    attempts = [one for one in episodes if one.task_id == task]
    assert page.run(f"{own}.querySelectorAll('.answer').length") == len(attempts)


def test_numbers_are_those_of_the_reports(page: Page) -> None:
    """264 of 640 is one number everywhere, and so is every other share whose last digit is a tie."""
    singles = [[1] * gained + [-1] * lost for gained, lost in ((0, 0), (4, 0), (9, 0), (3, 10), (12, 12), (300, 260))]
    gains = [*singles, [3, -1, 2, 0, 5], [7], [2, -2], [(7 * at) % 11 - 4 for at in range(60)]]
    found = page.run(f"{json.dumps(gains)}.map(mcnemar)")
    assert found == pytest.approx([mcnemar(one) for one in gains], rel=1e-9)
    # Many p-values are sums of powers of 2: 0.0625 is a tie.
    assert page.run(f"{json.dumps(found)}.map((p) => `p ${{writeP(p)}}`)") == [p_value(one) for one in found]
    counts = [(k, n) for n in (3, 7, 16, 32, 80, 160, 320, 400, 640, 2000) for k in range(0, n + 1, 1 + n // 160)]
    found = page.run(f"{json.dumps(counts)}.map(([k, n]) => [percent(k / n), fixed((k - n) / n * 100, 1)])")
    assert found == [[percent(k / n).replace("\u202f", " "), f"{(k - n) / n * 100:.1f}"] for k, n in counts]


def test_two_runs_compared(page: Page, held_out: dict[str, list[Trajectory]]) -> None:
    default, seed2 = ([one for one in own if "sampled" in one.trajectory_id] for own in held_out.values())
    gains = [
        int(after.metrics["success"] - before.metrics["success"]) for before, after in zip(default, seed2, strict=False)
    ]
    go(page, "#/compare", ".verdict")
    found = page.run("sumPairs(comparedTasks(...chooseSides(listSides(), {})))")
    both = sum(before.metrics["success"] and not gain for before, gain in zip(default, gains, strict=False))
    wanted = {"win": gains.count(1), "loss": gains.count(-1), "both": both, "neither": gains.count(0) - both}
    assert {kind: found[kind] for kind in wanted} == wanted
    assert found["p"] == pytest.approx(mcnemar([sum(gains[at::2]) for at in (0, 1)])) and found["single"]
    assert found["clusters"] == 2 and "levels of 2 wall layouts. McNemar's test over clusters" in page.text(".verdict")
    differ = [f"{one.task_id[:7]}…" for one, gain in zip(default, gains, strict=False) if gain]
    assert page.texts(".pairs tbody tr td:first-child") == differ
    assert page.texts(".compare .grid:last-of-type tbody tr")[-1].split() == ["seed", "0", "1"]  # settings that differ
    page.press("j", until="openPair !== null")
    task = page.run("route.args.task")
    first, second = (next(one for one in own if one.task_id == task) for own in (default, seed2))
    moves = [[turn.action for turn in one.turns if turn.role == "assistant"] for one in (first, second)]
    assert page.texts(".pair .action") == [own[0] for own in moves]
    page.press("ArrowRight", until="together.at === 1")
    page.run("m.redraw.sync()")
    assert page.texts(".pair .action code") == [own[1] for own in moves if len(own) > 1]
    parted = next(
        at for at, pair in enumerate(zip(first.token_ids, second.token_ids, strict=False)) if pair[0] != pair[1]
    )
    assert f"part at token {parted}" in page.text(".both")
    # The address holds sides and task.
    page.open(
        page.run("location.href"), until="openPair !== null && document.querySelectorAll('.pair .frame').length === 2"
    )


def test_sides_of_a_comparison(page: Page, episodes: list[Trajectory], held_out: dict[str, list[Trajectory]]) -> None:
    """Two wrong answers may differ, and two right ones too. Pairs of several samples: the test is over tasks."""
    chosen = "sumPairs(comparedTasks(...chooseSides(listSides(), route.args)))"
    side = "train_sokoban/{}|evaluation|0".format
    go(page, f"#/compare?a={side('default')}&b={side('seed2')}&show=answers", ".pairs tbody tr")
    found = page.run(chosen)
    first, second = (read_answers(one) for one in held_out.values())
    differ = {task for task, answer in first.items() if answer != second[task]}
    assert found["differ"] == len(differ) != found["win"] + found["loss"]
    assert {text.rstrip("…") for text in page.texts(".pairs tbody code")} == {task[:7] for task in differ}
    whole = f"{RUN}|train|all"
    page.follow(
        f"#/compare?a={whole}&b={whole}&show=all", until=f"route.args.a === '{whole}' && (m.redraw.sync(), true)"
    )
    found = page.run(chosen)
    assert (found["pairs"], found["win"], found["loss"], found["p"]) == (len(episodes), 0, 0, 1)
    assert "McNemar's test over clusters" in page.text(".verdict")


def read_answers(episodes: list[Trajectory]) -> dict[str, str | None]:
    """Answers of the sampled episodes by task id, as the index has them."""
    table = build_index(trajectories_to_table(episodes, CONTEXT), Place("a", "b", "evaluation", "c"), task_of)
    return {row["task_id"]: row["answer"] for row in table.to_pylist() if not row["greedy"]}
