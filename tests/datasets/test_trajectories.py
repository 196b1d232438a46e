"""Episodes in the catalog: Kedro validates them on save, a frame and a preview show them without bytes."""

from __future__ import annotations

import inspect
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kedro.io import DataCatalog, DatasetError
from kedro.validation.exceptions import DataValidationError

from builders import CONTEXT, make_trajectories
from geo_sokoban_pipeline.datasets import (
    EpisodesDataset,
    MetricsDataset,
    PromptsDataset,
    ReportDataset,
    TrajectoriesDataset,
    TrajectoriesFrameDataset,
)
from geo_sokoban_pipeline.datasets.tables import FrameDataset
from geo_sokoban_pipeline.runs.storage import Rewind
from geo_sokoban_pipeline.trajectories.parquet import TornFileError
from geo_sokoban_pipeline.trajectories.schema import TRAJECTORY_SCHEMA, validate_trajectories
from geo_sokoban_pipeline.trajectories.types import TrajectoryBatch, table_to_trajectories, trajectories_to_table


def make_catalog(folder: Path) -> DataCatalog:
    return DataCatalog.from_config(
        {
            "trajectories": {
                "type": "geo_sokoban_pipeline.datasets.TrajectoriesDataset",
                "path": str(folder),
                "validator": {"class": "geo_sokoban_pipeline.trajectories.schema.TrajectoryContract", "on": ["save"]},
                "metadata": {"kedro-viz": {"layer": "model_output"}},
            },
            "trajectories@pandas": {
                "type": "geo_sokoban_pipeline.datasets.TrajectoriesFrameDataset",
                "path": str(folder),
            },
        }
    )


def batch(iteration: int, episodes: int = 4) -> TrajectoryBatch:
    return TrajectoryBatch(make_trajectories(episodes, iteration=iteration), CONTEXT)


def test_tables_and_batches_are_stored_alike_and_broken_or_torn_ones_named(tmp_path: Path) -> None:
    catalog = make_catalog(tmp_path)
    catalog.save("trajectories", {"iter=00000/part-000": batch(0), "iter=00001/part-000": batch(1).to_table()})
    broken = batch(2)
    broken.trajectories[2].loss_mask[0] = 1
    with pytest.raises(DataValidationError, match=r"iter=00002/part-000: loss_mask of trajectory '.*0000/02'"):
        catalog.save("trajectories", {"iter=00002/part-000": broken})
    parts = catalog.load("trajectories")
    assert list(parts) == ["iter=00000/part-000", "iter=00001/part-000"]
    for iteration, read in enumerate(parts.values()):
        table = read()
        validate_trajectories(table)
        assert table.equals(batch(iteration).to_table())
    path = tmp_path / "iter=00000" / "part-000.parquet"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(TornFileError, match=r"iter=00000/part-000\.parquet"):
        parts["iter=00000/part-000"]()


@pytest.mark.parametrize("value", [make_trajectories(1), {"a": 1}, pa.table({"a": [1]})])
def test_other_values_are_refused(value: object, tmp_path: Path) -> None:
    with pytest.raises(DatasetError):
        TrajectoriesDataset(str(tmp_path)).save({"iter=00000/part-000": value})
    assert list(tmp_path.rglob("*.parquet")) == []


def test_frame_holds_all_but_images(tmp_path: Path) -> None:
    catalog = make_catalog(tmp_path)
    assert not catalog["trajectories@pandas"].exists()
    assert catalog.load("trajectories@pandas").shape == (0, len(TRAJECTORY_SCHEMA))
    with pytest.raises(DatasetError, match="only reads"):
        catalog.save("trajectories@pandas", {})
    catalog.save("trajectories", {f"iter=0000{i}/part-000": batch(i) for i in range(2)})
    frame = catalog.load("trajectories@pandas")
    assert list(frame.columns) == [name for name in TRAJECTORY_SCHEMA.names if name != "images"] + ["partition"]
    assert frame["partition"].tolist() == ["iter=00000/part-000"] * 4 + ["iter=00001/part-000"] * 4
    assert (frame["iteration"].dtype, frame["reward"].dtype) == ("int32", "float64")
    row, trajectory = frame.iloc[5], batch(1).trajectories[1]
    assert row["token_ids"] == trajectory.token_ids.tolist()
    assert isinstance(row["turns"], list)
    assert row["turns"][1]["text"] == trajectory.turns[1].text
    assert row["image_grid_thw"] == [[1, 6, 6]] * 3
    assert row["metrics"] == [{"name": "steps", "value": 3.0}, {"name": "success", "value": 1.0}]
    assert row["reward"] == trajectory.reward


def test_missing_values_keep_their_column_a_number(tmp_path: Path) -> None:
    episodes = make_trajectories(2)
    episodes[0].metrics, episodes[1].metrics = {"optimal_steps": 5.0, "success": 1.0}, {}
    table = trajectories_to_table(episodes, CONTEXT)
    TrajectoriesDataset(str(tmp_path)).save({"iter=00000/part-000": table})
    frame = TrajectoriesFrameDataset(str(tmp_path)).load()
    assert frame["success"].mean() == 1.0
    assert frame["success"].isna().tolist() == frame["optimal_steps"].isna().tolist() == [False, True]
    assert frame["optimal_steps"].dtype == "Int32"


def test_a_run_of_another_version_is_not_continued(tmp_path: Path) -> None:
    dataset = TrajectoriesDataset(str(tmp_path))
    dataset.save({f"iter=0000{i}/part-000": batch(i) for i in range(2)})
    path = tmp_path / "iter=00000" / "part-000.parquet"
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, b"schema_version": b"1"}), path)
    with pytest.raises(DatasetError, match=r"iter=00000/part-000\.parquet was written by another version.*fresh=true"):
        dataset.save(Rewind(1))
    assert dataset.partitions() == ["iter=00000/part-000", "iter=00001/part-000"]
    dataset.save(Rewind(-1))  # fresh: nothing of the other version stays
    dataset.save({"iter=00000/part-000": batch(0)})
    assert dataset.partitions() == ["iter=00000/part-000"]


PREVIEWER = "geo_sokoban_pipeline.reporting.previews.preview_episodes"


def test_preview_shows_the_newest_episodes(tmp_path: Path) -> None:
    dataset = TrajectoriesDataset(str(tmp_path), previewer=PREVIEWER)
    assert dataset.preview() == ""
    dataset.save({"iter=00000/part-000": batch(0), "iter=00001/part-000": batch(1, 8)})
    preview = dataset.preview(nrows=3)
    newest = table_to_trajectories(dataset.load()["iter=00001/part-000"]())[-3:]
    assert [name.replace("_", "ˍ") in preview for name in (one.trajectory_id for one in newest)] == [True] * 3
    assert preview.count("<b>") == 3 and preview.count("data:image/png;base64,") >= 9
    assert TrajectoriesDataset(str(tmp_path)).preview() == ""


@pytest.mark.parametrize(
    ("dataset", "kind"),
    [
        (TrajectoriesDataset, "HTMLPreview"),
        (PromptsDataset, "HTMLPreview"),
        (ReportDataset, "HTMLPreview"),
        (MetricsDataset, "PlotlyPreview"),
        (EpisodesDataset, "TablePreview"),
        (FrameDataset, "TablePreview"),
    ],
)
def test_viz_takes_the_preview(dataset: type, kind: str) -> None:
    annotation = inspect.signature(dataset.preview).return_annotation
    assert getattr(annotation, "__name__", str(annotation)) == kind  # as kedro-viz looks it up
