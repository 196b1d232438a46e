"""The data of the browser's site: what its scripts hold is what is stored."""

from __future__ import annotations

import base64
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from builders import CONTEXT, make_trajectories
from geo_sokoban_pipeline.__main__ import browse, main
from geo_sokoban_pipeline.datasets import TrajectoriesDataset
from geo_sokoban_pipeline.reporting.viewer import site as sites
from geo_sokoban_pipeline.reporting.viewer.site import choose_pages, write_site
from geo_sokoban_pipeline.reporting.viewer.sources import BrowsedRun, NothingToBrowseError, find_runs, open_run
from geo_sokoban_pipeline.runs.folders import DATA_NOTE
from geo_sokoban_pipeline.runs.storage import Thin, write_json
from geo_sokoban_pipeline.tasks import task_of
from geo_sokoban_pipeline.trajectories.parquet import write_trajectories
from geo_sokoban_pipeline.trajectories.schema import OCCLUSION, TOKEN_SCORES, TURN_VALUES
from geo_sokoban_pipeline.trajectories.types import Trajectory, trajectories_to_table
from reporting.sites import (
    HOSTILE,
    answer_groups,
    make_hostile,
    play_groups,
    read_columns,
    read_script,
    rows_of_scores,
    store,
    store_scores,
)

EPISODES = {
    "sokoban": lambda: play_groups(0.6),
    "geo3k": lambda: answer_groups("geo3k"),
    "geo3k_multi_turn": lambda: answer_groups("geo3k_multi_turn"),
}


def expand(span: list[int]) -> list[int]:
    """Token ids; a negative number repeats the one before it."""
    ids: list[int] = []
    for one in span:
        ids += [one] if one >= 0 else [ids[-1]] * -one
    return ids


def check_page(site: Path, chunk: dict[str, Any], page: dict[str, Any], episode: Trajectory) -> None:
    """A page holds its episode."""
    spans = [expand(chunk["spans"][turn["span"]]) for turn in page["turns"]]
    assert [token for span in spans for token in span] == episode.token_ids.tolist()
    sampled = np.flatnonzero(episode.loss_mask)
    assert [at for start, end in page["mask"] for at in range(start, end)] == sampled.tolist()
    assert page["log_probs"] == pytest.approx(episode.rollout_log_probs[sampled].tolist(), abs=1e-4)
    report = task_of(episode.task).report
    for shown, turn in zip(page["turns"], episode.turns, strict=True):
        assert (shown["role"], chunk["texts"][shown["text"]]) == (turn.role, turn.text)
        assert (shown["reward"], shown["advantage"]) == (turn.reward, turn.advantage)
        assert shown["action"] == report.read_action(turn) and shown["images"] == turn.image_indices
        assert (json.loads(chunk["texts"][shown["info"]]) if turn.info else None) == (turn.info or None)
    scripts = {number: read_script(site / "data" / "images" / f"{number}.js") for number, _ in page["images"]}
    assert [base64.b64decode(scripts[number][place]) for number, place in page["images"]] == episode.images
    assert page["reward_parts"] == pytest.approx(episode.reward_parts) and page["label"] == episode.label


@pytest.mark.parametrize("task", EPISODES)
def test_list_and_pages_hold_the_episodes(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "LIST_ROWS", 5)
    monkeypatch.setattr(sites, "EPISODES_BYTES", 3000)
    monkeypatch.setattr(sites, "IMAGES_BYTES", 2000)
    episodes = EPISODES[task]()
    outputs = store(tmp_path, episodes, f"train_{task}", "default")
    (outputs / "commands.json").write_text('[{"env": "local"}, {"env": "test"}]')
    run = open_run(outputs)
    counts = write_site(tmp_path / "site", [run])
    assert counts["episodes"] == counts["pages"] == len(episodes)
    assert counts["images"] >= len({image for episode in episodes for image in episode.images})
    rows = read_columns(tmp_path / "site")
    for row, known, episode in zip(rows, run.index.to_pylist(), episodes, strict=True):
        assert row["run"] == f"train_{task}/default" and row["trajectory_id"] == episode.trajectory_id
        assert row["tags"] == dict(zip(known["tags"], known["tag_counts"], strict=True))
        for name in ("task_id", "split", "success", "answer", "reward", "n_turns", "mean_log_prob", "greedy"):
            wanted = known[name]
            assert row[name] == (pytest.approx(wanted, abs=1e-6) if isinstance(wanted, float) else wanted)
        chunk = read_script(tmp_path / "site" / "data" / "episodes" / f"{row['chunk']}.js")
        check_page(tmp_path / "site", chunk, chunk["episodes"][row["place"]], episode)
    assert len(list((tmp_path / "site" / "data" / "episodes").iterdir())) > 1
    images = [one for path in (tmp_path / "site" / "data" / "images").iterdir() for one in read_script(path)]
    assert len(set(images)) == len(images) == counts["images"]
    site = read_script(tmp_path / "site" / "data" / "site.js")
    assert site["tasks"][task]["title"] == task_of(task).title
    assert site["runs"][f"train_{task}/default"]["score"].endswith(f"kedro run --pipelines=score_{task} --env=test")


def test_gaps_scores_and_the_image_at_the_end_are_of_a_page(tmp_path: Path) -> None:
    """Of scores those of another run are not taken, and a score without images is a column of the list."""
    episodes = play_groups(1.0, groups=1, size=3)
    first, second, _ = episodes
    sampled = np.flatnonzero(first.loss_mask)
    count = len(sampled)
    first.old_log_probs = first.rollout_log_probs.copy()
    first.old_log_probs[sampled[2]] -= np.float32(0.25)
    first.ref_log_probs = np.where(first.loss_mask, first.rollout_log_probs + np.float32(0.5), 0)
    outputs = store(tmp_path, episodes, "train_sokoban", "default")
    reliances = [0.0] * (count - 1) + [float(count)]
    values = {"ratio": 1.5, "entropy": 0.25, "log_prob": -0.25, "top_log_probs": [[-0.1, -2.0]] * count}
    named = values | {"top_tokens": [["a", "b"]] * count, "scored_version": 3}
    rows = rows_of_scores(first, image_reliance=reliances, **named)[::-1] + rows_of_scores(second)
    rows += [{**row, "run_id": "other", "ratio": 9.0} for row in rows]
    store_scores(tmp_path, "token_scores", rows, TOKEN_SCORES)
    write_site(tmp_path / "site", [open_run(outputs)])
    pages = read_script(tmp_path / "site" / "data" / "episodes" / "0.js")["episodes"]
    assert pages[0]["widest"] == sampled[2]
    assert pages[0]["gaps"] == pytest.approx([0, 0, -0.25] + [0] * (count - 3), abs=1e-6)
    assert pages[0]["ref_gaps"] == pytest.approx([0.5] * count, abs=1e-4)
    scores = pages[0]["scores"]
    assert (scores["by"], scores["version"], pages[2]["scores"]) == ("x", 3, None)
    for name in ("ratio", "entropy", "log_prob"):
        assert scores[name] == [values[name]] * count
    assert scores["image_reliance"] == reliances and scores["top"] == [[["a", -0.1], ["b", -2.0]]] * count
    found = read_columns(tmp_path / "site")
    assert [row["image_reliance"] for row in found] == [1.0, None, None]  # the second was not scored without images
    assert [row["entropy"] for row in found] == [0.25, 1.0, None]
    number, place = pages[0]["last_image"]
    drawn = base64.b64decode(read_script(tmp_path / "site" / "data" / "images" / f"{number}.js")[place])
    assert drawn == task_of("sokoban").report.last_image(first.images[-1], first.turns[-1])


def test_the_worth_of_turns_is_on_the_page_of_their_episode(tmp_path: Path) -> None:
    """Of this run's episodes, turn by turn; a turn that was left out has none."""
    episodes = play_groups(1.0, groups=1, size=2)
    outputs = store(tmp_path, episodes, "train_sokoban", "default")
    worth = {"value": 0.25, "value_after": 1.0, "advantage": 0.75, "success": 0.5, "success_after": 1.0}
    known = {"steps_left": 2, "is_solvable": True, "is_solvable_after": True}
    row = {"run": "train_sokoban", "run_id": "default", "forked_by": "sampler", **worth, **known}
    rows = [{**row, "trajectory_id": episodes[0].trajectory_id, "turn": turn} for turn in (1, 3)]
    rows[1] |= {"value": None, "left_out": "it does not come out again"}
    rows += [{**one, "run_id": "other", "value": 9.0} for one in rows]
    path = tmp_path / "07_model_output/fork_sokoban/some/turn_values/iter=00000/part-000.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=TURN_VALUES), path)
    write_site(tmp_path / "site", [open_run(outputs)])
    first, second = read_script(tmp_path / "site" / "data" / "episodes" / "0.js")["episodes"]
    assert [turn["worth"] for turn in first["turns"][:4]] == [None, worth | known, None, None]
    assert (first["valued_by"], second["valued_by"]) == ("sampler", None)
    assert {turn["worth"] for turn in second["turns"]} == {None}


def test_the_table_of_tokens(tmp_path: Path) -> None:
    """Against pandas; of equal gaps the first one is the widest."""
    episodes = play_groups(0.6, groups=2, size=3)
    noise = np.random.default_rng(0)
    parts = []
    for row, episode in enumerate(episodes):
        gaps = noise.choice(np.float32([0, 0.125, -0.25]), len(episode.token_ids)) * episode.loss_mask
        episode.old_log_probs = (episode.rollout_log_probs + gaps).astype(np.float32)
        columns = {"id": episode.token_ids, "log_prob": episode.rollout_log_probs.astype(float)}
        columns["gap"] = episode.old_log_probs.astype(float) - columns["log_prob"]
        parts.append(pd.DataFrame(columns).assign(row=row, at=range(len(gaps)))[episode.loss_mask == 1])
    reliances = noise.normal(size=len(parts[4])).astype(np.float32).tolist()
    parts[4]["image_reliance"] = reliances
    outputs = store(tmp_path, episodes, "train_sokoban", "default")
    store_scores(tmp_path, "token_scores", rows_of_scores(episodes[4], image_reliance=reliances), TOKEN_SCORES)
    write_site(tmp_path / "site", [open_run(outputs)])
    table = read_script(tmp_path / "site" / "data" / "tokens.js")["train_sokoban/default"]
    tokens = pd.concat(parts, ignore_index=True)
    counts = tokens["id"].value_counts()
    assert table["id"] == sorted(counts.index, key=lambda token: (-counts[token], token))
    for number, token in enumerate(table["id"]):
        own = tokens[tokens["id"] == token]
        widest = own.loc[own["gap"].abs().idxmax()]
        reliance = own["image_reliance"].mean() if own["image_reliance"].count() else None
        wanted = {"count": len(own), "log_prob": own["log_prob"].mean(), "gap": own["gap"].abs().mean()}
        wanted |= {"widest": widest["gap"], "scored": own["image_reliance"].count(), "image_reliance": reliance}
        assert {name: table[name][number] for name in wanted} == pytest.approx(wanted, rel=1e-4)
        assert table["at"][number] == [widest["row"], widest["at"]]


@pytest.fixture
def one_gap(tmp_path: Path) -> Path:
    """Outputs of a run of six groups of two, whose widest gap is in the last but one."""
    episodes = play_groups(0.6, groups=6, size=2)
    gaps = episodes[9].old_log_probs
    assert gaps is not None
    gaps[np.flatnonzero(episodes[9].loss_mask)[1]] -= np.float32(0.75)
    return store(tmp_path, episodes, "train_sokoban", "default")


def test_tokens_of_episodes_without_a_page_count(one_gap: Path, tmp_path: Path) -> None:
    tables = []
    for pages in (None, 4):
        run = replace(open_run(one_gap), token_texts=lambda ids: [f"token {one}" for one in ids])
        write_site(tmp_path / f"site{pages}", [run], pages=pages)
        tables.append(read_script(tmp_path / f"site{pages}" / "data" / "tokens.js"))
    assert tables[0] == tables[1] and tables[0]["train_sokoban/default"]["episodes"] == 12
    rows = read_columns(tmp_path / "site4")
    # Groups of two: the first one, and that of the widest gap.
    assert (
        [row["page"] for row in rows] == [row["chunk"] >= 0 for row in rows] == [at in (0, 1, 8, 9) for at in range(12)]
    )
    widest = max(rows, key=lambda row: row["max_log_prob_gap"])
    assert widest is rows[9] and widest["widest_gap"] == pytest.approx(-0.75)
    token = read_script(tmp_path / "site4" / "data" / "tokens.js")["train_sokoban/default"]
    at = int(np.argmax(np.abs(token["widest"])))
    assert token["at"][at] == [9, widest["widest_gap_position"]]
    assert widest["widest_gap_token"] == token["text"][at] == f"token {token['id'][at]}"


def test_tokens_that_retention_has_left_out_are_named(one_gap: Path, tmp_path: Path) -> None:
    store(tmp_path, play_groups(0.6, iteration=1, groups=1, size=2), "train_sokoban", "default")
    TrajectoriesDataset(str(one_gap / "trajectories"), tasks="geo_sokoban_pipeline.tasks.task_or_plain").save(
        Thin(0, 0, tokens=False, episodes=1, images="file")
    )
    write_site(tmp_path / "site", [open_run(one_gap)])
    table = read_script(tmp_path / "site" / "data" / "tokens.js")["train_sokoban/default"]
    assert (table["episodes"], table["thinned"]) == (2, 12)
    # The index keeps the widest gap.
    assert max(row["max_log_prob_gap"] for row in read_columns(tmp_path / "site")) == pytest.approx(0.75)


def test_scores_under_the_weights_that_sampled_give_the_gap(tmp_path: Path) -> None:
    """Where the trainer recomputed no log-probs, and only then, and under no other version."""
    first, second, third = play_groups(0.6, groups=1, size=3)
    for episode in (first, second):
        episode.old_log_probs = None
    version = first.policy_version
    rows = [
        *rows_of_scores(first, scored_version=version),
        *rows_of_scores(second, scored_version=version + 1),
        *rows_of_scores(third, scored_version=version),
    ]
    outputs = store(tmp_path, [first, second, third], "train_sokoban", "default")
    store_scores(tmp_path, "token_scores", rows, TOKEN_SCORES)
    write_site(tmp_path / "site", [open_run(outputs)])
    pages = read_script(tmp_path / "site" / "data" / "episodes" / "0.js")["episodes"]
    own = first.rollout_log_probs[first.loss_mask == 1]
    assert pages[0]["gaps"] == pytest.approx((-0.5 - own).tolist(), abs=1e-6)
    assert pages[1]["gaps"] is None and set(pages[2]["gaps"]) == {0}
    table = read_script(tmp_path / "site" / "data" / "tokens.js")["train_sokoban/default"]
    widest = max(table["widest"], key=lambda gap: abs(gap or 0))
    assert widest == pytest.approx((-0.5 - own)[np.argmax(np.abs(-0.5 - own))], rel=1e-4)


def test_occlusion_maps_are_parts_of_the_page(tmp_path: Path) -> None:
    episodes = play_groups(0.6, groups=1, size=2)
    outputs = store(tmp_path, episodes, "train_sokoban", "default")
    whose = {"run": "train_sokoban", "run_id": "default", "trajectory_id": episodes[1].trajectory_id}
    place = {"turn": 0, "image": 0, "top": 0, "width": 16, "height": 16, "positions": [30, 31]}
    parts = [("wall", 0, [0.5, -0.25]), (None, 16, [0.0, 1.0])]
    rows = [
        {**whose, **place, "left": left, "content": content, "drops": drops, "drop": sum(drops)}
        for content, left, drops in parts
    ]
    store_scores(tmp_path, "occlusion", rows, OCCLUSION)
    write_site(tmp_path / "site", [open_run(outputs)])
    pages = read_script(tmp_path / "site" / "data" / "episodes" / "0.js")["episodes"]
    width, height = (int.from_bytes(episodes[1].images[0][at : at + 4], "big") for at in (16, 20))
    wanted = [[left, 0, 16, 16, content, drops] for content, left, drops in parts]
    assert pages[0]["maps"] is None
    assert pages[1]["maps"] == {"0": {"size": [width, height], "positions": [30, 31], "parts": wanted}}


def test_losses_without_images_by_kind() -> None:
    def row(policy: str, mode: str, *solved: int) -> dict[str, Any]:
        cells = [{"length": number, "solved": one, "episodes": 4} for number, one in enumerate(solved)]
        return {"policy": policy, "mode": mode, "episodes": 8, "by_length": cells}

    rows = [row("warm_start", "sampled", 1, 1), row("final", "sampled", 4, 2), row("final", "greedy", 3, 3)]
    ablated = [row("final_blank", "sampled", 1, 2), row("final_shuffled", "sampled", 0, 3)]
    (table,) = sites.describe_ablations({"task": "sokoban", "rows": rows + ablated})
    assert (table["policy"], table["mode"], table["names"]) == ("final", "sampled", ["images", "blank", "shuffled"])
    assert table["lines"] == [("0", [(4, 4), (1, 4), (0, 4)]), ("1", [(2, 4), (2, 4), (3, 4)])]
    # Families of problems are a breakdown like lengths, and there are others.
    families = [{"label": kind, "solved": 1, "episodes": 2} for kind in ("circle", "line")]
    problems = [
        {"policy": name, "mode": "greedy", "episodes": 4, "breakdowns": {"family": families}}
        for name in ("final", "final_blank")
    ]
    tables = sites.describe_ablations({"task": "geo3k", "rows": problems})
    wanted = [("circle", [(1, 2), (1, 2)]), ("line", [(1, 2), (1, 2)])]
    assert [one["lines"] for one in tables if one["by"] == "family"] == [wanted]
    assert all(one["lines"] for one in tables), "a breakdown without lines is no table"
    assert sites.describe_ablations(None) == sites.describe_ablations({"task": "sokoban", "rows": rows}) == []


def test_hostile_texts_are_strings_and_what_is_missing_is_null(tmp_path: Path) -> None:
    """`read_script` checks that no script holds a sign that could end it; here, that the texts come out whole."""
    hostile, empty = make_hostile(answer_groups("geo3k", groups=1, size=1)[0]), make_trajectories(1)[0]
    empty.status, empty.reward, empty.advantage, empty.trained = "aborted", None, None, False
    empty.loss_mask[:] = 0
    empty.rollout_log_probs[:] = 0
    empty.old_log_probs = None
    runs = [open_run(store(tmp_path, [hostile], "train_geo3k", "default"))]
    runs.append(open_run(store(tmp_path, [empty], "train_sokoban", "default")))
    write_site(tmp_path / "site", runs)
    rows = read_columns(tmp_path / "site")
    chunks = [read_script(tmp_path / "site" / "data" / "episodes" / f"{row['chunk']}.js") for row in rows]
    first, second = (chunk["episodes"][row["place"]] for chunk, row in zip(chunks, rows, strict=True))
    check_page(tmp_path / "site", chunks[0], first, hostile)
    assert first["error"] == rows[0]["difficulty"] == HOSTILE
    assert (second["mask"], second["log_probs"], second["gaps"]) == ([], [], None)
    assert (rows[1]["reward"], rows[1]["mean_log_prob"], rows[1]["status"]) == (None, None, "aborted")


@pytest.fixture(scope="module")
def three_iterations(tmp_path_factory: pytest.TempPathFactory) -> BrowsedRun:
    """A run with eight episodes of each iteration, and a validation."""
    root = tmp_path_factory.mktemp("three")
    for iteration in range(3):
        outputs = store(root, make_trajectories(8, iteration=iteration), "train_sokoban", "default")
    store(root, make_trajectories(8, evaluation=True), "train_sokoban", "default", "eval_trajectories")
    return open_run(outputs)


@pytest.mark.parametrize(
    ("pages", "shown"),
    [
        (None, {"train": 24, "validation": 8}),
        (100, {"train": 24, "validation": 8}),
        (16, {"train": 8, "validation": 8}),  # evaluations come first
        (8, {"validation": 8}),
        (4, {"validation": 4}),
        (1, {"validation": 4}),  # never less than a group
    ],
)
def test_which_episodes_have_a_page(pages: int | None, shown: dict[str, int], three_iterations: BrowsedRun) -> None:
    index = three_iterations.index
    chosen = index.filter(pa.array(choose_pages(index, pages)))
    assert dict(zip(*np.unique(chosen["split"].to_pylist(), return_counts=True), strict=True)) == shown
    groups = {(row["split"], row["iteration"], row["group_index"]) for row in chosen.to_pylist()}
    assert len(groups) * 4 == chosen.num_rows
    if pages == 16:
        assert {iteration for split, iteration, _ in groups if split == "train"} == {0, 2}  # evenly spread


def test_iterations_limit_training_alone(three_iterations: BrowsedRun) -> None:
    found = three_iterations.within(1, 1).index
    assert Counter(zip(found["split"].to_pylist(), found["iteration"].to_pylist(), strict=True)) == {
        ("train", 1): 8,
        ("validation", 0): 8,
    }


PLACES = [
    ("", ["train_sokoban/default", "train_sokoban/seed2"], 12),  # a data root
    ("07_model_output/train_sokoban", ["train_sokoban/default", "train_sokoban/seed2"], 12),
    ("07_model_output/train_sokoban/default", ["train_sokoban/default"], 8),
    ("07_model_output/train_sokoban/default/trajectories", ["train_sokoban/default"], 8),
    ("07_model_output/train_sokoban/default/trajectories/iter=00001", ["train_sokoban/default"], 4),
    ("07_model_output/train_sokoban/default/trajectories/iter=00001/part-000.parquet", ["train_sokoban/default"], 4),
]


def test_runs_are_found_at_any_level(tmp_path: Path) -> None:
    for iteration in range(2):
        store(tmp_path, make_trajectories(4, iteration=iteration), "train_sokoban", "default")
    store(tmp_path, make_trajectories(4), "train_sokoban", "seed2")
    for place, names, count in PLACES:
        runs = find_runs([tmp_path / place])
        assert [run.name for run in runs] == names and sum(run.index.num_rows for run in runs) == count
        again = find_runs([tmp_path / place, tmp_path / place])  # named twice, found once; index files are there now
        assert [run.index.num_rows for run in again] == [run.index.num_rows for run in runs]
    copied = tmp_path / "My copies" / "run A"  # a name that no run can have
    shutil.copytree(tmp_path / "07_model_output" / "train_sokoban" / "seed2", copied)
    (run,) = find_runs([copied])
    assert (run.name, run.index.num_rows, run.settings) == ("My copies/run A", 4, {})


def test_a_file_on_its_own_is_a_run(tmp_path: Path) -> None:
    path = tmp_path / "copied" / "some.parquet"
    write_trajectories(path, trajectories_to_table(make_trajectories(4), CONTEXT))
    pq.write_table(pa.table({"a": [1]}), tmp_path / "copied" / "foreign.parquet")
    for given in (path, path.parent):
        (run,) = find_runs([given])
        assert (run.name, run.index.num_rows, run.settings, run.token_texts) == ("copied/some", 4, {}, None)
    write_site(tmp_path / "site", [run])
    assert [row["split"] for row in read_columns(tmp_path / "site")] == ["episodes"] * 4


def test_nothing_to_browse(tmp_path: Path, three_iterations: BrowsedRun) -> None:
    for path, text in ((tmp_path, "no trajectory files"), (tmp_path / "none", "does not exist")):
        with pytest.raises(NothingToBrowseError, match=text):
            find_runs([path])
    none = replace(three_iterations, index=three_iterations.index.slice(0, 0))
    with pytest.raises(NothingToBrowseError, match="train_sokoban/default: no episodes"):
        write_site(tmp_path / "site", [none])
    # Beside another run, one without episodes is no fault.
    counts = write_site(tmp_path / "both", [replace(none, name="train_sokoban/none"), three_iterations])
    assert counts["episodes"] == three_iterations.index.num_rows


def test_the_command_writes_a_site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(tmp_path / "data", make_trajectories(4), "train_sokoban", "default")
    with pytest.raises(SystemExit) as left:
        main(["browse", str(tmp_path / "data"), f"--output={tmp_path / 'site'}"])
    assert left.value.code == 0
    said = capsys.readouterr().out
    assert "4 episodes, 4 with a page" in said and (tmp_path / "site" / "index.html").as_uri() in said
    # It replaces a site, but nothing else.
    again = CliRunner().invoke(browse, [str(tmp_path / "data"), f"--output={tmp_path / 'site'}", "--pages=1"])
    assert again.exit_code == 0, again.output
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    refused = CliRunner().invoke(browse, [str(tmp_path / "data"), f"--output={tmp_path / 'mine'}"])
    assert refused.exit_code == 1 and "is no site" in refused.output
    assert (tmp_path / "mine" / "file").exists()


def test_clusters_are_those_of_the_prompts_and_of_the_evaluation(tmp_path: Path) -> None:
    """Levels between the same walls are one piece of evidence in every split whose tables are still stored."""
    episodes = play_groups(0.5, groups=2)
    outputs = store(tmp_path, episodes, "train_sokoban", "default")
    first, second = (one.task_id for one in (episodes[0], episodes[-1]))
    assert open_run(outputs).clusters == {}
    write_json(tmp_path / "08_reporting/train_sokoban/default/eval_summary.json", {"cluster_of": {first: "w1"}})
    assert open_run(outputs).clusters == {first: "w1"}
    tables = tmp_path / "05_model_input/sokoban/levels"
    tables.mkdir(parents=True)
    for name, level in (("prompts", second), ("validation_prompts", "other")):
        pq.write_table(pa.table({"level_hash": [level], "layout_hash": ["w2"]}), tables / f"{name}.parquet")
    write_json(tmp_path / "06_models/train_sokoban/default" / DATA_NOTE, {"task": "sokoban", "id": "levels"})
    run = open_run(outputs)
    assert run.clusters == {first: "w1", second: "w2", "other": "w2"}
    write_site(tmp_path / "site", [run])
    assert {row["cluster"] for row in read_columns(tmp_path / "site")} == {"w1", "w2"}
