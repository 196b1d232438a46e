"""Trajectory files: other tools open them, their size has a bound, torn and foreign ones are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from builders import CONTEXT, make_png, make_trajectories
from geo_sokoban_pipeline.trajectories.parquet import (
    OtherVersionError,
    TornFileError,
    decoded_size,
    name_parts,
    read_trajectories,
    split_parts,
    write_trajectories,
)
from geo_sokoban_pipeline.trajectories.schema import (
    TRAJECTORY_SCHEMA,
    TrajectoryError,
    read_context,
    validate_trajectories,
)
from geo_sokoban_pipeline.trajectories.types import trajectories_to_table


@pytest.fixture
def part(tmp_path: Path) -> Path:
    path = tmp_path / "iter=00000" / "part-000.parquet"
    write_trajectories(path, trajectories_to_table(make_trajectories(8, turns=4), CONTEXT))
    return path


def test_a_file_has_one_row_group_and_statistics_where_a_reader_filters(part: Path) -> None:
    assert pq.read_schema(part).equals(TRAJECTORY_SCHEMA)
    assert read_context(pq.read_schema(part)) == CONTEXT
    metadata = pq.ParquetFile(part).metadata
    assert metadata.num_row_groups == 1
    group = metadata.row_group(0)
    columns = {group.column(index).path_in_schema: group.column(index) for index in range(group.num_columns)}
    assert all(columns[name].is_stats_set for name in ("iteration", "group_index", "reward", "status"))
    assert not columns["token_ids.list.element"].is_stats_set
    assert columns["images.list.element.bytes"].compression == "ZSTD"


def test_reading_keeps_one_copy_of_each_image_and_the_chosen_columns(part: Path) -> None:
    images = read_trajectories(part)["images"].chunk(0).flatten().field("bytes")
    assert pa.types.is_dictionary(images.type)
    assert len(images.dictionary) == len(images.dictionary.unique()) < len(images)
    assert read_trajectories(part, ["reward", "turns"]).column_names == ["reward", "turns"]


def test_others_read_the_same_values(part: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import duckdb
    import pandas as pd
    import polars as pl

    import datasets

    for name in ("HF_DATASETS_CACHE", "DOWNLOADED_DATASETS_PATH"):
        monkeypatch.setattr(datasets.config, name, tmp_path / "cache")
    loaded = datasets.load_dataset("parquet", data_files=str(part), split="train", cache_dir=str(tmp_path / "cache"))
    readers: dict[str, list[Any]] = {
        "datasets": list(loaded),
        "duckdb": duckdb.sql(f"select * from read_parquet('{part}')").to_arrow_table().to_pylist(),
        "pandas": pd.read_parquet(part).to_dict("records"),
        "polars": pl.read_parquet(part).to_dicts(),
    }
    for name, rows in readers.items():
        for row, wanted in zip(rows, make_trajectories(8, turns=4), strict=True):
            assert list(row["token_ids"]) == wanted.token_ids.tolist(), name
            assert np.float32(row["rollout_log_probs"]).tobytes() == wanted.rollout_log_probs.tobytes(), name
            assert (row["reward"], row["turns"][1]["action"]) == (wanted.reward, wanted.turns[1].action), name
            assert (row["n_turns"], row["success"]) == (4, bool(wanted.metrics["success"])), name
            images = [(image.size, image.mode) if name == "datasets" else image["bytes"] for image in row["images"]]
            assert images == ([((96, 96), "RGB")] * 4 if name == "datasets" else wanted.images), name
    assert pl.read_parquet(part).schema["loss_mask"] == pl.List(pl.Int8)


@pytest.mark.parametrize("px", [96, 384])
@pytest.mark.parametrize("episodes", [8, 64])
@pytest.mark.parametrize("response_tokens", [8, 300])
def test_size_has_a_bound(px: int, episodes: int, response_tokens: int, tmp_path: Path) -> None:
    trajectories = make_trajectories(
        episodes, turns=8, image_px=px, response_tokens=response_tokens, distinct_images=60
    )
    generator = np.random.default_rng(0)
    for trajectory in trajectories:  # the largest rows there are: three kinds of log-probs, none alike
        noise = generator.exponential(size=(2, len(trajectory.token_ids))).astype(np.float32)
        trajectory.old_log_probs, trajectory.ref_log_probs = -noise * trajectory.loss_mask
    path = tmp_path / "part-000.parquet"
    write_trajectories(path, trajectories_to_table(trajectories, CONTEXT))
    images = sum(map(len, {image for trajectory in trajectories for image in trajectory.images}))
    trained = sum(int(trajectory.loss_mask.sum()) for trajectory in trajectories)
    assert path.stat().st_size <= 1.3 * images + 4096 * episodes + 12 * trained


def test_many_large_frames_cost_their_bytes_once(tmp_path: Path) -> None:
    # 6 MB of distinct frames: well above the writer's default dictionary limit of 1 MiB.
    frames = [make_png(32, 0) + np.random.default_rng(index).bytes(60_000) for index in range(100)]
    trajectories = make_trajectories(100, turns=4, image_px=32)
    for index, trajectory in enumerate(trajectories):
        trajectory.images = [frames[(index * 7 + step) % 100] for step in range(4)]
    path = tmp_path / "part-000.parquet"
    write_trajectories(path, trajectories_to_table(trajectories, CONTEXT))
    assert path.stat().st_size < 1.1 * sum(map(len, frames))
    assert read_trajectories(path).nbytes < 1.3 * sum(map(len, frames))


def scramble(data: bytes) -> bytes:
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    return data[: footer + 20] + bytes(60) + data[footer + 80 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[:-100],
    "cut in half": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "another footer": scramble,
    "another page": lambda data: data[:200] + bytes(60) + data[260:],
}


@pytest.mark.parametrize("name", DAMAGE)
def test_torn_files_are_named(name: str, part: Path) -> None:
    part.write_bytes(DAMAGE[name](part.read_bytes()))
    with pytest.raises(TornFileError, match=r"part-000\.parquet.*(delete it|move it)"):
        read_trajectories(part)


def test_foreign_files_and_those_of_another_version_are_named(part: Path) -> None:
    table = pq.read_table(part)
    # The first version of the schema had fewer columns, and its number.
    older = table.drop_columns(["success", "n_turns"])
    older = older.replace_schema_metadata({**table.schema.metadata, b"schema_version": b"1"})
    for other, error, words in (
        (pa.table({"a": [1]}), TornFileError, "(delete it|move it)"),
        (table.replace_schema_metadata(None), TornFileError, "(delete it|move it)"),
        (older, OtherVersionError, "was written by another .*'1'.* reads 2.*run_id"),
    ):
        pq.write_table(other, part)
        with pytest.raises(error, match=rf"part-000\.parquet.*{words}"):
            read_trajectories(part)


def test_a_foreign_table_is_not_written_and_an_empty_one_is(tmp_path: Path) -> None:
    path = tmp_path / "part-000.parquet"
    with pytest.raises(TrajectoryError):
        write_trajectories(path, pa.table({"a": [1]}))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        read_trajectories(path)
    write_trajectories(path, trajectories_to_table([], CONTEXT))
    assert read_trajectories(path).num_rows == 0


@pytest.mark.parametrize(
    ("limit_in_images", "sizes"),
    [(1000, [12]), (24, [8, 4]), (23, [4, 4, 4]), (12, [4, 4, 4]), (1, [4, 4, 4])],
)
def test_parts_close_before_the_limit(limit_in_images: int, sizes: list[int]) -> None:
    trajectories = make_trajectories(12, turns=3, group_size=4)
    assert decoded_size(trajectories[0].images[0]) == 96 * 96 * 3
    parts = split_parts(trajectories, limit_in_images * 96 * 96 * 3)
    assert [len(part) for part in parts] == sizes
    assert [t for part in parts for t in part] == trajectories


def test_scattered_groups_stay_whole() -> None:
    first, second, third = (make_trajectories(12, group_size=4)[start : start + 4] for start in (0, 4, 8))
    mixed = [first[0], second[0], *first[1:], *second[1:], *third]
    assert [len(part) for part in split_parts(mixed, 1)] == [8, 4]


def test_parts_are_named_and_valid() -> None:
    parts = name_parts(12, make_trajectories(4, iteration=12), CONTEXT)
    assert list(parts) == ["iter=00012/part-000"]
    validate_trajectories(parts["iter=00012/part-000"])
    assert split_parts([]) == [] and name_parts(3, [], CONTEXT) == {}
