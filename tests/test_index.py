"""The index of episodes: its rows follow from the trajectory files, and its files come and go with theirs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from builders import CONTEXT, make_trajectories
from geo_sokoban_pipeline.config.grpo import ScorePipelineOptions, SourceOptions
from geo_sokoban_pipeline.datasets import EpisodesDataset, TrajectoriesDataset
from geo_sokoban_pipeline.runs.storage import Rewind
from geo_sokoban_pipeline.tasks import task_or_plain
from geo_sokoban_pipeline.trajectories import index
from geo_sokoban_pipeline.trajectories.index import (
    INDEX_SCHEMA,
    NEEDED,
    NoEpisodesError,
    Place,
    StoredEpisode,
    build_index,
    count_repeats,
    find_edits,
    find_episodes,
    read_index,
)
from geo_sokoban_pipeline.trajectories.parquet import name_parts, read_trajectories, write_trajectories
from geo_sokoban_pipeline.trajectories.types import Trajectory, trajectories_to_table

PLACE = Place("train_sokoban", "default", "train", "trajectories/iter=00000/part-000")
TASKS = "geo_sokoban_pipeline.tasks.task_or_plain"


def rows_of(trajectories: list[Trajectory], answers: Mapping[str, str | None] | None = None) -> list[dict[str, Any]]:
    """Rows of the index; with `answers` by trajectory id, else those of the task."""

    given = iter([(answers or {}).get(item.trajectory_id) for item in trajectories])
    told = SimpleNamespace(answer=lambda episode: next(given), tags=lambda episode: {})
    find_task = task_or_plain if answers is None else lambda name: told
    rows: list[dict[str, Any]] = build_index(trajectories_to_table(trajectories, CONTEXT), PLACE, find_task).to_pylist()
    return rows


def test_a_row_repeats_and_counts_what_its_episode_holds() -> None:
    episodes = make_trajectories(8, turns=3)
    episodes[3].old_log_probs = episodes[3].rollout_log_probs.copy()
    episodes[3].old_log_probs[np.flatnonzero(episodes[3].loss_mask)[4]] -= np.float32(0.25)
    episodes[5].old_log_probs = None
    rows = rows_of(episodes)
    for number, (row, episode) in enumerate(zip(rows, episodes, strict=True)):
        sampled = episode.rollout_log_probs[episode.loss_mask == 1]
        assert row["trajectory_id"] == episode.trajectory_id and row["reward"] == episode.reward
        assert (row["tokens"], row["response_tokens"]) == (len(episode.token_ids), len(sampled))
        assert row["mean_log_prob"] == pytest.approx(sampled.astype(float).mean(), rel=1e-12)
        assert (row["n_turns"], row["n_images"], row["row"]) == (3, 3, number)
        assert row["turn_reward_avg"] == episode.reward_parts["turn_reward_avg"] and row["correct"] is None
        assert (row["run"], row["run_id"], row["split"], row["partition"]) == tuple(PLACE.__dict__.values())
    assert [rows[number]["max_log_prob_gap"] for number in (0, 5)] == [0.0, None]
    assert rows[3]["max_log_prob_gap"] == pytest.approx(0.25)


def test_the_token_on_which_trainer_and_engine_differ_most() -> None:
    """Against a loop; of equal gaps the first token, of unsampled ones none."""
    episodes = make_trajectories(6, turns=2)
    noise = np.random.default_rng(1)
    for episode in episodes:
        gaps = noise.choice(np.float32([0, 0.125, -0.5]), len(episode.token_ids)) * episode.loss_mask
        episode.old_log_probs = (episode.rollout_log_probs + gaps).astype(np.float32)
    episodes[1].old_log_probs = None
    episodes[4].old_log_probs = episodes[4].rollout_log_probs.copy()  # all gaps are 0
    for row, episode in zip(rows_of(episodes), episodes, strict=True):
        found = [row[name] for name in ("widest_gap", "widest_gap_position", "widest_gap_token")]
        if episode.old_log_probs is None:
            assert found == [None] * 3
            continue
        own = episode.old_log_probs.astype(float) - episode.rollout_log_probs
        at = max(np.flatnonzero(episode.loss_mask).tolist(), key=lambda place: abs(own[place]))
        assert found == [pytest.approx(own[at], abs=1e-9), at, episode.token_ids[at]]
        assert row["max_log_prob_gap"] == abs(row["widest_gap"])


def test_an_episode_without_a_response_has_no_mean() -> None:
    episode = make_trajectories(1)[0]
    episode.status, episode.reward, episode.advantage, episode.trained = "aborted", None, None, False
    episode.loss_mask[:] = 0
    episode.rollout_log_probs[:] = 0
    episode.old_log_probs = None
    episode.turns = episode.turns[:1]
    row = rows_of([episode])[0]
    assert (row["response_tokens"], row["mean_log_prob"], row["n_turns"], row["tags"]) == (0, None, 0, [])
    assert row["max_log_prob_gap"] is row["widest_gap_position"] is row["widest_gap_token"] is None


LIMITS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("all turns used", {}, ["out_of_turns"]),
    ("solved in the last turn", {"success": True}, []),
    ("slime's rule: truncated at the last turn", {"status": "truncated"}, ["out_of_turns"]),
    ("turns left", {"allowed": 4}, []),
    ("one turn is no limit", {"allowed": 1, "turns": 1}, []),
    ("cut off in an earlier turn", {"allowed": 4, "status": "truncated", "reason": "length"}, ["truncated"]),
    ("cut off in the last turn", {"status": "truncated", "reason": "length"}, ["truncated"]),
    ("no room for an observation", {"allowed": 4, "status": "truncated"}, ["truncated"]),
    ("aborted", {"status": "aborted", "reason": "abort"}, []),
    ("failed", {"status": "failed"}, []),
]


@pytest.mark.parametrize(("name", "case", "tags"), LIMITS, ids=[name for name, _, _ in LIMITS])
def test_tags_of_limits(name: str, case: dict[str, Any], tags: list[str]) -> None:
    episode = make_trajectories(1, turns=case.get("turns", 3))[0]
    episode.sampling = f'{{"max_turns": {case.get("allowed", 3)}}}'
    episode.status, episode.finish_reason = case.get("status", "completed"), case.get("reason", "stop")
    episode.metrics = {"success": float(case.get("success", False))}
    row = rows_of([episode], {})[0]
    assert (row["tags"], row["tag_counts"]) == (tags, [1] * len(tags))


REPEATS = [
    ("", 0),
    ("Up Up Up Up Up", 0),  # shorter than 40 characters
    ("the angle is 40 and so " * 6, 6),
    ("1" * 80, 80),
    ("A long explanation that does not repeat, of some length or other. " + "no " * 14, 0),  # less than half of it
    ("A long explanation that does not repeat, of some length or other. " + "no " * 40, 40),
    ("We add the angles 46, 52 and 82, which gives 180 degrees; so the unknown angle is 82.", 0),
    ("abc " * 3 + "x" * 30, 0),
]


@pytest.mark.parametrize(("text", "repeats"), REPEATS)
def test_repetition_at_the_end_of_a_text(text: str, repeats: int) -> None:
    assert count_repeats(text) == repeats


def test_looking_for_repetition_takes_no_time() -> None:
    began = time.process_time()
    for text in ("ab" * 15_000, "a" * 30_000, ("x" * 499 + "y") * 60, "".join(map(str, range(8000)))):
        count_repeats(text)
    assert time.process_time() - began < 0.5


def test_repetition_is_counted_in_the_worst_response() -> None:
    episode = make_trajectories(1)[0]
    episode.turns[1].text, episode.turns[3].text = "no " * 20, "no, never " * 9
    row = rows_of([episode], {})[0]
    assert dict(zip(row["tags"], row["tag_counts"], strict=True)) == {"repetition": 20}


# Of eight episodes: how many a prompt has; answers; the label of each; which are solved; which are tagged.
COLLAPSES = [
    ("half give one answer", 1, "aaaabcde", "bcdeabcd", [], [0, 1, 2, 3]),
    ("one prompt is no collapse", 8, "aaaaaaaa", "bbbbbbbb", [], []),
    ("less than half", 1, "aaabcdef", "bcdeabcd", [], []),
    ("no answers do not count", 1, "aaaa----", "bcdeabcd", [], [0, 1, 2, 3]),
    ("solved ones are no failures", 1, "aaaabcde", "aacdabcd", [0, 1], [2, 3]),
    ("all problems have that answer", 1, "aaaaaaab", "aaaaaaaa", range(7), []),
    ("wrong throughout", 1, "aaaaaaaa", "bbbbbbbb", [], []),  # one label: no answers to tell apart
]


@pytest.mark.parametrize(
    ("name", "group_size", "answers", "labels", "solved", "tagged"), COLLAPSES, ids=[case[0] for case in COLLAPSES]
)
def test_one_answer_collapse(
    name: str, group_size: int, answers: str, labels: str, solved: list[int], tagged: list[int]
) -> None:
    episodes = make_trajectories(8, group_size=group_size)
    for number, episode in enumerate(episodes):
        episode.label, episode.metrics = labels[number], {"success": float(number in solved)}
    given = {
        item.trajectory_id: None if answer == "-" else answer for item, answer in zip(episodes, answers, strict=True)
    }
    rows = rows_of(episodes, given)
    assert [row["row"] for row in rows if "one_answer_collapse" in row["tags"]] == tagged


def test_a_rule_that_fails_ends_no_run(caplog: pytest.LogCaptureFixture) -> None:
    def fail(episode: StoredEpisode) -> None:
        raise ZeroDivisionError

    table = trajectories_to_table(make_trajectories(2), CONTEXT)
    found = build_index(table, PLACE, lambda name: SimpleNamespace(answer=lambda episode: "a", tags=fail))
    assert found.column("tags").to_pylist() == [[], []]
    assert "its rules failed" in caplog.text


# Files.


def store(folder: Path, kind: str, iterations: range) -> TrajectoriesDataset:
    dataset = TrajectoriesDataset(str(folder / kind), tasks=TASKS)
    for iteration in iterations:
        dataset.save(name_parts(iteration, make_trajectories(4, iteration=iteration), CONTEXT))
    return dataset


def test_index_files_come_and_go_with_trajectories(tmp_path: Path) -> None:
    outputs = tmp_path / "train_sokoban" / "seed2"
    dataset = store(outputs, "trajectories", range(3))
    store(outputs, "eval_trajectories", range(2))
    files = sorted(path.relative_to(outputs).as_posix() for path in (outputs / "episodes").rglob("*.parquet"))
    assert files == [f"episodes/eval_trajectories/iter=0000{i}/part-000.parquet" for i in range(2)] + [
        f"episodes/trajectories/iter=0000{i}/part-000.parquet" for i in range(3)
    ]
    dataset.save(Rewind(0))
    left = [
        path.relative_to(outputs / "episodes").as_posix() for path in (outputs / "episodes" / "trajectories").rglob("*")
    ]
    assert sorted(left) == ["trajectories/iter=00000", "trajectories/iter=00000/part-000.parquet"]
    table = EpisodesDataset(str(outputs), TASKS).load()
    assert table.column("split").to_pylist() == ["train"] * 4 + ["validation"] * 8
    assert set(table.column("run_id").to_pylist()) == {"seed2"}


HARMS: dict[str, Callable[[Path], Any]] = {
    "missing": Path.unlink,
    "torn": lambda path: path.write_bytes(path.read_bytes()[:900]),
    "other version": lambda path: pq.write_table(
        pq.read_table(path, partitioning=None).replace_schema_metadata({"index_version": "0"}), path
    ),
}


@pytest.mark.usefixtures("blocks_of_four")
@pytest.mark.parametrize("name", ["iter=00008/part-000", "block-00000"])
@pytest.mark.parametrize("harm", HARMS)
def test_an_index_is_made_again_with_equal_rows(outputs: Path, harm: str, name: str) -> None:
    dataset = store(outputs, "trajectories", range(9))
    expected, before = read_index(outputs, task_or_plain), files_of(outputs)
    HARMS[harm](outputs / "episodes" / "trajectories" / f"{name}.parquet")
    assert read_index(outputs, task_or_plain).equals(expected)
    dataset.save(Rewind(8))
    assert read_index(outputs, task_or_plain).equals(expected)
    store(outputs, "trajectories", range(8, 9))
    assert files_of(outputs) == before


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    return tmp_path / "train_sokoban" / "default"


def files_of(outputs: Path) -> dict[str, bytes]:
    folder = outputs / "episodes"
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*.parquet"))}


@pytest.fixture
def blocks_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "BLOCK", 4)


@pytest.mark.usefixtures("blocks_of_four")
@pytest.mark.parametrize("after", [-1, 2, 3, 5, 8])
def test_past_iterations_are_one_file_per_block_also_of_a_continued_run(tmp_path: Path, after: int) -> None:
    whole, cut = (tmp_path / name / "train_sokoban" / "default" for name in ("whole", "cut"))
    store(whole, "trajectories", range(10))
    assert list(files_of(whole)) == [
        "trajectories/block-00000.parquet",
        "trajectories/block-00004.parquet",
        "trajectories/iter=00008/part-000.parquet",
        "trajectories/iter=00009/part-000.parquet",
    ]
    rows = read_index(whole, task_or_plain)
    assert rows["iteration"].to_pylist() == [number for number in range(10) for _ in range(4)]
    dataset = store(cut, "trajectories", range(10))
    dataset.save(Rewind(after))
    assert read_index(cut, task_or_plain).equals(rows.slice(0, 4 * (after + 1)))
    stored = sum(pq.read_metadata(path).num_rows for path in (cut / "episodes").rglob("*.parquet"))
    assert stored == 4 * (after + 1)
    store(cut, "trajectories", range(after + 1, 10))
    assert files_of(cut) == files_of(whole)


@pytest.mark.usefixtures("blocks_of_four")
def test_a_merge_that_was_interrupted_doubles_no_row(outputs: Path) -> None:
    store(outputs, "trajectories", range(4))
    single = outputs / "episodes" / "trajectories" / "iter=00002" / "part-000.parquet"
    content = single.read_bytes()
    dataset = store(outputs, "trajectories", range(4, 5))
    assert not single.exists()
    files = files_of(outputs)
    single.parent.mkdir()
    single.write_bytes(content)  # the process ended before it had deleted all files of the block
    assert read_index(outputs, task_or_plain).num_rows == 20
    dataset.save(Rewind(4))
    assert files_of(outputs) == files
    # An iteration that is stored once more is indexed once.
    store(outputs, "trajectories", range(2, 3))
    iterations = read_index(outputs, task_or_plain)["iteration"].to_pylist()
    assert sorted(iterations) == [number for number in range(5) for _ in range(4)]
    assert sum(pq.read_metadata(path).num_rows for path in (outputs / "episodes").rglob("*.parquet")) == 20


def test_a_run_that_may_only_be_read_has_all_rows(outputs: Path) -> None:
    TrajectoriesDataset(str(outputs / "trajectories")).save(name_parts(0, make_trajectories(4), CONTEXT))
    # A file in the folder's place stands for a folder that cannot be written: root may write everywhere.
    (outputs / "episodes").write_text("")
    assert read_index(outputs, task_or_plain).num_rows == 4
    assert (outputs / "episodes").read_text() == ""


def test_the_episodes_of_an_evaluation_are_no_validation(tmp_path: Path) -> None:
    path = tmp_path / "evaluate_sokoban" / "default" / "eval_trajectories" / "iter=00000" / "part-000.parquet"
    assert Place.of(path).split == "evaluation"
    assert Place.of(tmp_path / "train_sokoban/a/held_out_trajectories/iter=00001/part-002.parquet") == replace(
        PLACE, run_id="a", split="evaluation", partition="held_out_trajectories/iter=00001/part-002"
    )


def test_no_images_are_read(outputs: Path) -> None:
    dataset = store(outputs, "trajectories", range(1))
    path = outputs / "trajectories" / f"{dataset.partitions()[0]}.parquet"
    assert "images" not in NEEDED
    found = build_index(read_trajectories(path, NEEDED), Place.of(path), task_or_plain)
    assert found.equals(read_index(outputs, task_or_plain))
    assert found.schema.equals(INDEX_SCHEMA) and all(math.isfinite(row) for row in found["mean_log_prob"].to_pylist())


def test_a_run_without_episodes_has_an_empty_index(outputs: Path) -> None:
    dataset = EpisodesDataset(str(outputs), TASKS)
    assert dataset.load().num_rows == 0 and dataset.load().schema.equals(INDEX_SCHEMA) and not dataset.exists()
    assert dataset.preview() == {"index": [], "columns": INDEX_SCHEMA.names, "data": []}


def made_index() -> Any:
    """Eight training episodes in two iterations and four of a validation; the second of each four is solved."""
    tables = []
    for split, iteration, count in (("train", 0, 4), ("train", 1, 4), ("validation", 0, 4)):
        episodes = make_trajectories(count, iteration=iteration, evaluation=split != "train")
        for number, episode in enumerate(episodes):
            episode.trajectory_id = f"{split}/{iteration}/{number}"
            episode.metrics = {"success": float(number == 1)}
        if iteration == 1:
            silent = episodes[3]
            silent.loss_mask[:], silent.rollout_log_probs[:], silent.old_log_probs = 0, 0, None
        place = Place("train_sokoban", "default", split, f"{split}/iter={iteration:05d}/part-000")
        told = SimpleNamespace(answer=lambda episode: None, tags=lambda episode: {"wall": 2} if episode.success else {})
        tables.append(build_index(trajectories_to_table(episodes, CONTEXT), place, lambda name, told=told: told))
    return pa.concat_tables(tables)


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({}, ["train/0/0", "train/0/1", "train/0/2", "train/0/3", "train/1/0", "train/1/1", "train/1/2"]),
        ({"split": "validation"}, [f"validation/0/{number}" for number in range(4)]),
        ({"first_iteration": 1}, ["train/1/0", "train/1/1", "train/1/2"]),
        ({"last_iteration": 0, "filter": [("success", "==", False)]}, ["train/0/0", "train/0/2", "train/0/3"]),
        ({"filter": [("success", "==", True), ("iteration", ">", 0)]}, ["train/1/1"]),
        ({"filter": [("sample_index", "in", [0, 2])], "last_iteration": 0}, ["train/0/0", "train/0/2"]),
        ({"tags": ["wall", "unknown"]}, ["train/0/1", "train/1/1"]),
        ({"ids": ["validation/0/2", "train/0/3"]}, ["train/0/3", "validation/0/2"]),  # of any split
    ],
)
def test_episodes_are_found_by_all_conditions(conditions: dict[str, Any], expected: list[str]) -> None:
    found = find_episodes(made_index(), ScorePipelineOptions(source=SourceOptions(run="train_sokoban"), **conditions))
    assert found["trajectory_id"].to_pylist() == expected


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ({"ids": ["train/0/9"]}, "ids: there is no episode 'train/0/9' in this run"),
        (
            {"filter": [("succes", "==", True)]},
            r"filter=\[\['succes', '==', True\]\]: the index has no column succes; it",
        ),
        ({"filter": [("reward", ">", "much")]}, r"filter=\[\['reward', '>', 'much'\]\]"),
        ({"first_iteration": 7}, r"none of the 12 stored episodes .* Widen them"),
        ({"ids": ["validation/0/2", "train/0/3"], "filter": [("advantage", "==", None)]}, "none of the 12 stored"),
    ],
)
def test_conditions_that_choose_nothing_are_named(conditions: dict[str, Any], message: str) -> None:
    with pytest.raises(NoEpisodesError, match=message):
        find_episodes(made_index(), ScorePipelineOptions(source=SourceOptions(run="train_sokoban"), **conditions))


# Files that were changed after they had been written


def changed(episodes: list[Trajectory], number: int, name: str, value: Any) -> list[Trajectory]:
    setattr(episodes[number], name, value)
    return episodes


EDITS: list[tuple[Callable[[list[Trajectory]], list[Trajectory]], str]] = [
    (lambda episodes: episodes, ""),
    (lambda episodes: changed(episodes, 3, "reward", episodes[3].reward + 0.5), ": reward is"),
    (lambda episodes: changed(episodes, 3, "advantage", None), ": advantage is None"),
    (lambda episodes: [*episodes[1:], episodes[0]], ": trajectory_id is"),
    (lambda episodes: episodes[:-1], "7 episodes, and 8 when it was written"),
]


@pytest.mark.parametrize("kind", ["trajectories", "eval_trajectories", "held_out_trajectories"])
@pytest.mark.parametrize(("edit", "found"), EDITS)
def test_edited_files_are_found(tmp_path: Path, kind: str, edit: Callable[..., Any], found: str) -> None:
    outputs, episodes = tmp_path / "07_model_output" / "train_sokoban" / "x", make_trajectories(8)
    tables = name_parts(0, episodes, CONTEXT) | name_parts(1, make_trajectories(8, seed=1), CONTEXT)
    TrajectoriesDataset(str(outputs / kind), tasks=TASKS).save(tables)
    path = outputs / kind / "iter=00000" / "part-000.parquet"
    write_trajectories(path, trajectories_to_table(edit(episodes), CONTEXT))
    edits = find_edits(read_index(outputs, task_or_plain), outputs, kind)
    assert len(edits) == bool(found)
    assert all(text.startswith(f"{kind}/iter=00000/part-000") and found in text for text in edits)
