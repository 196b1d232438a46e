"""Trajectory files: other tools open them, their size has a bound, torn and foreign ones are named."""

from __future__ import annotations

from pathlib import Path

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
from geo_sokoban_pipeline.trajectories.types import Trajectory, trajectories_to_table


@pytest.fixture
def part(tmp_path: Path) -> Path:
    path = tmp_path / "iter=00000" / "part-000.parquet"
    write_trajectories(path, trajectories_to_table(make_trajectories(8, turns=4), CONTEXT))
    return path


def test_file_has_the_pinned_schema_and_one_row_group(part: Path) -> None:
    assert pq.read_schema(part).equals(TRAJECTORY_SCHEMA)
    assert read_context(pq.read_schema(part)) == CONTEXT
    assert pq.ParquetFile(part).num_row_groups == 1


def test_reading_keeps_one_copy_of_each_image(part: Path) -> None:
    images = read_trajectories(part)["images"].chunk(0).flatten().field("bytes")
    assert pa.types.is_dictionary(images.type)
    assert len(images.dictionary) == len(images.dictionary.unique()) < len(images)


def test_chosen_columns_are_read(part: Path) -> None:
    assert read_trajectories(part, ["reward", "turns"]).column_names == ["reward", "turns"]


def test_datasets_decodes_images(part: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", tmp_path / "downloads")
    rows = datasets.load_dataset("parquet", data_files=str(part), split="train", cache_dir=str(tmp_path / "cache"))
    trajectories = make_trajectories(8, turns=4)
    assert rows.num_rows == 8
    assert rows[0]["images"][0].size == (96, 96)
    assert rows[0]["images"][0].mode == "RGB"
    assert rows[3]["token_ids"] == trajectories[3].token_ids.tolist()
    assert rows[3]["turns"][1]["action"] == trajectories[3].turns[1].action


def test_duckdb_opens_it(part: Path) -> None:
    import duckdb

    query = f"""select count(*), sum(len(token_ids)), sum(list_sum(loss_mask)), min(octet_length(images[1].bytes)),
        avg(reward), any_value(turns[2].role) from read_parquet('{part}')"""
    rows, tokens, trained, smallest, reward, role = duckdb.sql(query).fetchall()[0]
    trajectories = make_trajectories(8, turns=4)
    assert (rows, role) == (8, "assistant")
    assert tokens == sum(len(t.token_ids) for t in trajectories)
    assert trained == sum(int(t.loss_mask.sum()) for t in trajectories)
    assert smallest == min(len(t.images[0]) for t in trajectories)
    assert reward == pytest.approx(np.mean([t.reward for t in trajectories]))


def test_polars_and_pandas_open_it(part: Path) -> None:
    import pandas as pd
    import polars as pl

    trajectories = make_trajectories(8, turns=4)
    frame = pl.read_parquet(part)
    assert frame["images"][1][0]["bytes"] == trajectories[1].images[0]
    assert frame["rollout_log_probs"][1].to_numpy().tobytes() == trajectories[1].rollout_log_probs.tobytes()
    assert frame.schema["loss_mask"] == pl.List(pl.Int8)
    rows = pd.read_parquet(part)
    assert rows["images"][1][0]["bytes"] == trajectories[1].images[0]
    assert rows["token_ids"][1].tolist() == trajectories[1].token_ids.tolist()


def test_success_by_iteration_needs_no_unpivot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import duckdb
    import pandas as pd
    import polars as pl

    import datasets

    for iteration in (0, 1):
        trajectories = make_trajectories(4, iteration=iteration)
        for number, trajectory in enumerate(trajectories):
            trajectory.metrics = {"success": float(number <= iteration), "optimal_steps": 3.0}
        trajectories[3].metrics = {}  # a failed episode: unknown, not unsolved
        write_trajectories(tmp_path / f"iter=0000{iteration}.parquet", trajectories_to_table(trajectories, CONTEXT))
    files, wanted = str(tmp_path / "*.parquet"), {0: 1 / 3, 1: 2 / 3}
    query = f"select iteration, avg(success::int) from read_parquet('{files}') group by iteration"
    assert dict(duckdb.sql(query).fetchall()) == pytest.approx(wanted)
    means = pl.read_parquet(files).group_by("iteration").agg(pl.col("success").mean())
    assert dict(means.iter_rows()) == pytest.approx(wanted)
    frame = pd.concat(map(pd.read_parquet, sorted(tmp_path.glob("*.parquet"))))
    assert frame.astype({"success": "boolean"}).groupby("iteration")["success"].mean().to_dict() == pytest.approx(
        wanted
    )
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert [value for value in rows["success"]] == [True, False, False, None, True, True, False, None]
    assert rows["distance_delta"][0] == 1.0
    assert (rows["n_turns"][0], rows["optimal_steps"][0], rows["format"][0]) == (3, 3, None)


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


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def scramble(path: Path) -> None:
    data = bytearray(path.read_bytes())
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    data[footer + 20 : footer + 80] = bytes(60)
    path.write_bytes(bytes(data))


def replace_by_another_table(path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), path)


def strip_metadata(path: Path) -> None:
    pq.write_table(pq.read_table(path).replace_schema_metadata(None), path)


@pytest.mark.parametrize("damage", [cut, cut_in_half, empty, scramble, replace_by_another_table, strip_metadata])
def test_torn_and_foreign_files_are_named(damage, part: Path) -> None:
    damage(part)
    with pytest.raises(TornFileError, match=r"part-000\.parquet.*(delete it|move it)"):
        read_trajectories(part)


def age(path: Path) -> None:
    """A file as the first version of the schema had it: fewer columns, another number."""
    table = pq.read_table(path).drop_columns(["success", "n_turns"])
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, b"schema_version": b"1"}), path)


def test_files_of_another_version_are_refused(part: Path) -> None:
    age(part)
    with pytest.raises(OtherVersionError, match=r"part-000\.parquet was written by another .*'1'.* reads 2.*run_id"):
        read_trajectories(part)


def test_a_flipped_page_is_not_half_loaded(part: Path) -> None:
    data = bytearray(part.read_bytes())
    data[200:260] = bytes(60)
    part.write_bytes(bytes(data))
    with pytest.raises(TornFileError, match=str(part)):
        read_trajectories(part)


def test_a_foreign_table_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(TrajectoryError):
        write_trajectories(tmp_path / "part-000.parquet", pa.table({"a": [1]}))
    assert list(tmp_path.iterdir()) == []


def test_missing_file_is_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_trajectories(tmp_path / "part-000.parquet")


def test_empty_table_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "part-000.parquet"
    write_trajectories(path, trajectories_to_table([], CONTEXT))
    assert read_trajectories(path).num_rows == 0


def shape(parts: list[list[Trajectory]]) -> list[int]:
    return [len(part) for part in parts]


@pytest.mark.parametrize(
    ("limit_in_images", "sizes"),
    [(1000, [12]), (24, [8, 4]), (23, [4, 4, 4]), (12, [4, 4, 4]), (1, [4, 4, 4])],
)
def test_parts_close_before_the_limit(limit_in_images: int, sizes: list[int]) -> None:
    trajectories = make_trajectories(12, turns=3, group_size=4)
    assert decoded_size(trajectories[0].images[0]) == 96 * 96 * 3
    parts = split_parts(trajectories, limit_in_images * 96 * 96 * 3)
    assert shape(parts) == sizes
    assert [t for part in parts for t in part] == trajectories


def test_scattered_groups_stay_whole() -> None:
    first, second, third = (make_trajectories(12, group_size=4)[start : start + 4] for start in (0, 4, 8))
    mixed = [first[0], second[0], *first[1:], *second[1:], *third]
    assert shape(split_parts(mixed, 1)) == [8, 4]


def test_no_episodes_make_no_parts() -> None:
    assert split_parts([]) == []
    assert name_parts(3, [], CONTEXT) == {}


def test_parts_are_named_and_valid() -> None:
    parts = name_parts(12, make_trajectories(4, iteration=12), CONTEXT)
    assert list(parts) == ["iter=00012/part-000"]
    validate_trajectories(parts["iter=00012/part-000"])


def test_statistics_stand_where_a_reader_filters(part: Path) -> None:
    group = pq.ParquetFile(part).metadata.row_group(0)
    columns = {group.column(index).path_in_schema: group.column(index) for index in range(group.num_columns)}
    assert all(columns[name].is_stats_set for name in ("iteration", "group_index", "reward", "status"))
    assert not columns["token_ids.list.element"].is_stats_set
    assert columns["images.list.element.bytes"].compression == "ZSTD"
