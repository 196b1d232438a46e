"""Exports: token-exact labels, messages that show the images in their place, pairs of each group; others open them.

Trajectories, index and exports open with `datasets`, DuckDB and polars where this package cannot be imported.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from builders import CONTEXT, make_trajectories
from geo_sokoban_pipeline.config.grpo import ExportPipelineOptions, SourceOptions
from geo_sokoban_pipeline.datasets.iterations import TrajectoriesDataset
from geo_sokoban_pipeline.runs.storage import Thin
from geo_sokoban_pipeline.trajectories import exports
from geo_sokoban_pipeline.trajectories.exports import NothingSelectedError, write_export
from geo_sokoban_pipeline.trajectories.index import trajectory_files
from geo_sokoban_pipeline.trajectories.parquet import name_parts, write_trajectories
from geo_sokoban_pipeline.trajectories.types import Trajectory, trajectories_to_table


def stored(folder: Path, *iterations: list[Trajectory]) -> list[Path]:
    files = []
    for number, episodes in enumerate(iterations):
        files.append(folder / f"iter={number:05d}" / "part-000.parquet")
        write_trajectories(files[-1], trajectories_to_table(episodes, CONTEXT))
    return files


def exported(folder: Path, files: list[Path], **conditions: Any) -> dict[str, list[dict[str, Any]]]:
    folder.mkdir()
    options = ExportPipelineOptions(source=SourceOptions(run="train_sokoban"), **conditions)
    write_export(files, folder, options, {"run": "train_sokoban/default"})
    return {path.parent.name: pq.read_table(path).to_pylist() for path in folder.glob("*/train-*.parquet")}


def test_labels_are_the_tokens_that_the_policy_wrote(tmp_path: Path) -> None:
    episodes = make_trajectories(8)
    rows = exported(tmp_path / "out", stored(tmp_path, episodes))["tokens"]
    for row, episode in zip(rows, episodes, strict=True):
        assert row["trajectory_id"] == episode.trajectory_id
        assert row["input_ids"] == episode.token_ids.tolist()
        assert row["labels"] == np.where(episode.loss_mask == 1, episode.token_ids, -100).tolist()
        assert [image["bytes"] for image in row["images"]] == episode.images
        assert row["image_grid_thw"] == [list(grid) for grid in episode.image_grid_thw]


def test_messages_show_each_image_where_its_turn_does() -> None:
    (episode,) = make_trajectories(1, turns=2)
    # The second observation shows the first board again, and the policy has written a mark that is no image.
    episode.turns[2].image_indices = [0, 1]
    episode.turns[2].text = "before<image>, now<image>"
    episode.turns[1].text = "<image> is what I see"
    row = exports.chat_row(trajectories_to_table([episode], CONTEXT).to_pylist()[0])
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "user", "assistant"]
    words, shown = {"type": "text"}, {"type": "image", "text": None}
    assert row["messages"][0]["content"] == [shown, words | {"text": "\nTurn 0: choose your next moves."}]
    assert row["messages"][1]["content"] == [words | {"text": "<image>"}, words | {"text": " is what I see"}]
    assert row["messages"][2]["content"] == [words | {"text": "before"}, shown, words | {"text": ", now"}, shown]
    assert [image["bytes"] for image in row["images"]] == [episode.images[k] for k in (0, 0, 1)]


def test_a_pair_is_the_best_and_the_worst_completed_sample(tmp_path: Path) -> None:
    episodes = make_trajectories(12)  # three groups of four
    for episode, reward in zip(
        episodes, [0.0, 3.0, 1.0, -9.0, 2.0, 2.0, 2.0, 2.0, 5.0, 5.0, 5.0, 5.0 - 1e-7], strict=True
    ):
        episode.reward, episode.advantage, episode.trained, episode.old_log_probs = reward, None, False, None
    episodes[3].status = "truncated"
    rows = exported(tmp_path / "out", stored(tmp_path, episodes))["pairs"]
    assert [(row["chosen_id"], row["rejected_id"]) for row in rows] == [
        (episodes[1].trajectory_id, episodes[0].trajectory_id)
    ]
    (row,) = rows
    assert (row["chosen_reward"], row["rejected_reward"]) == (3.0, 0.0)
    assert [message["role"] for message in row["prompt"]] == ["user"]
    for kind, episode in (("chosen", episodes[1]), ("rejected", episodes[0])):
        assert [message["role"] for message in row[kind]] == ["assistant", "user", "assistant", "user", "assistant"]
        assert row[kind][0]["content"][0]["text"] == episode.turns[1].text
        assert [image["bytes"] for image in row[f"{kind}_images"]] == episode.images[1:]
    assert [image["bytes"] for image in row["images"]] == episodes[1].images[:1]


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({}, [(0, 0), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]),
        ({"solved": False}, [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]),
        ({"first_iteration": 1}, [(1, 0), (1, 1), (1, 2), (1, 3)]),
        ({"last_iteration": 0}, [(0, 0), (0, 2), (0, 3)]),
        ({"min_reward": 2.0}, [(0, 2), (0, 3), (1, 2), (1, 3)]),
        ({"best_of_group": True, "last_iteration": 0}, [(0, 2)]),  # two are equal: the first of them
        ({"best_of_group": True, "solved": False, "first_iteration": 1}, [(1, 3)]),
    ],
)
def test_conditions(tmp_path: Path, conditions: dict[str, Any], expected: list[tuple[int, int]]) -> None:
    iterations = [make_trajectories(4, iteration=number) for number in (0, 1)]
    for number, rewards in enumerate([(1.0, 9.0, 3.0, 3.0), (0.0, 1.0, 2.0, 3.0)]):
        for episode, reward in zip(iterations[number], rewards, strict=True):
            episode.reward, episode.advantage, episode.trained, episode.old_log_probs = reward, None, False, None
    iterations[0][1].metrics["success"] = 0.0
    rows = exported(tmp_path / "out", stored(tmp_path, *iterations), **conditions)
    names = [iterations[iteration][sample].trajectory_id for iteration, sample in expected]
    assert [row["trajectory_id"] for row in rows["tokens"]] == names
    assert [row["trajectory_id"] for row in rows["chat"]] == names


def test_episodes_without_reward_are_left_out_and_counted(tmp_path: Path) -> None:
    episodes = make_trajectories(4)
    episodes[1] = replace(
        episodes[1], status="aborted", reward=None, advantage=None, trained=False, drop_reason="aborted",
        old_log_probs=None,
    )  # fmt: skip
    files = stored(tmp_path, episodes)
    rows = exported(tmp_path / "out", files, solved=False)
    assert [row["trajectory_id"] for row in rows["chat"]] == [episodes[k].trajectory_id for k in (0, 2, 3)]
    assert "episodes read: 4; without reward, left out: 1" in (tmp_path / "out" / "README.md").read_text()


def test_nothing_chosen_is_an_error_with_the_way_out(tmp_path: Path) -> None:
    episodes = make_trajectories(4)
    for episode in episodes:
        episode.reward = 0.0
    with pytest.raises(NothingSelectedError, match=r"none of 4 stored episodes.*\"min_reward\": 99.*solved=false"):
        exported(tmp_path / "out", stored(tmp_path, episodes), min_reward=99.0)


def test_row_groups_stay_below_the_limit_of_the_viewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports, "ROW_GROUP_BYTES", 8_000)
    exported(tmp_path / "out", stored(tmp_path, make_trajectories(16)))
    file = pq.ParquetFile(tmp_path / "out" / "chat" / "train-00000-of-00001.parquet")
    sizes = [file.metadata.row_group(k).total_byte_size for k in range(file.num_row_groups)]
    assert len(sizes) > 2
    assert max(sizes) < 2 * 8_000
    assert file.metadata.num_rows == 16


# Where this package cannot be imported.

SCRIPT = """
import json, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "geo_sokoban_pipeline":
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
import datasets, duckdb, polars

root, cache = sys.argv[1:]
places = {
    "trajectories": f"{root}/trajectories/*/*.parquet",
    "index": f"{root}/episodes/**/*.parquet",
    **{name: f"{root}/export/{name}/*.parquet" for name in ("tokens", "chat", "pairs")},
}
found = {}
for name, place in places.items():
    in_duckdb = duckdb.sql(f"select count(*), min(task), max(task) from read_parquet('{place}')").fetchall()[0]
    frame = polars.scan_parquet(place, hive_partitioning=False).collect()
    rows = datasets.load_dataset("parquet", data_files=place, split="train", cache_dir=cache)
    seen = None
    if "images" in rows.column_names:  # decoded by the features in the file
        seen = [image.size for image in rows[0]["images"]]
    found[name] = [list(in_duckdb), frame.height, frame["task"].unique().to_list(), rows.num_rows, seen]
for name in ("tokens", "chat", "pairs"):  # by the card of the folder
    found[name].append(datasets.load_dataset(f"{root}/export", name, split="train", cache_dir=cache).num_rows)
assert not [name for name in sys.modules if name.startswith("geo_sokoban")]
print(json.dumps(found))
"""


def opened(root: Path, cache: Path) -> dict[str, list]:
    words = [sys.executable, "-c", SCRIPT, str(root), str(cache)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_others_open_all_of_it(tmp_path: Path) -> None:
    """Also where the tokens of an older iteration were left out."""
    root = tmp_path / "run"
    dataset = TrajectoriesDataset(str(root / "trajectories"), tasks="geo_sokoban_pipeline.tasks.task_or_plain")
    for iteration in range(2):
        dataset.save(name_parts(iteration, make_trajectories(8, iteration=iteration), CONTEXT))
    export = root / "export"
    export.mkdir()
    files = trajectory_files(root / "trajectories")
    options = ExportPipelineOptions(source=SourceOptions(run="train_sokoban"), solved=False)
    counts = write_export(files, export, options, {})
    assert counts.rows == {"tokens": 16, "chat": 16, "pairs": 4}
    dataset.save(Thin(0, 0, tokens=False, episodes=1, images="file"))
    found = opened(root, tmp_path / "cache")
    boards = [[96, 96]] * 3
    assert found == {
        "trajectories": [[16, "sokoban", "sokoban"], 16, ["sokoban"], 16, boards],
        "index": [[16, "sokoban", "sokoban"], 16, ["sokoban"], 16, None],
        "tokens": [[16, "sokoban", "sokoban"], 16, ["sokoban"], 16, boards, 16],
        "chat": [[16, "sokoban", "sokoban"], 16, ["sokoban"], 16, boards, 16],
        "pairs": [[4, "sokoban", "sokoban"], 4, ["sokoban"], 4, boards[:1], 4],
    }
