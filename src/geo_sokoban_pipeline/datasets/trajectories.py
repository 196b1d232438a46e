"""Stored episodes in the catalog: parts of iterations as Arrow tables, or one pandas frame over all of them.

Whatever is saved has the pinned schema, and whatever is loaded was checked for it; a torn or foreign file is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedro.io import AbstractDataset, DatasetError

from geo_sokoban_pipeline.datasets.partitions import IterationPartitions, read_iteration
from geo_sokoban_pipeline.schemas import TRAJECTORY_SCHEMA, TrajectoryContract
from geo_sokoban_pipeline.signposts import EPISODES_SAVED, reached
from geo_sokoban_pipeline.trajectory_files import (
    OtherVersionError,
    TornFileError,
    check_file,
    read_trajectories,
    write_trajectories,
)

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from kedro_datasets._typing import TablePreview

_PREVIEW_TEXT = 80  # characters of one cell


class TrajectoriesDataset(IterationPartitions):
    """Episodes by iteration and part, `iter=00012/part-000.parquet`.

    Saves {partition: pyarrow.Table or TrajectoryBatch}; loads {partition: callable -> pyarrow.Table}, image bytes
    dictionary-encoded. `name_parts` makes such a dict from an iteration's episodes.

    Args:
        path: folder of all partitions.
        metadata: ignored here; read by kedro-viz.
    """

    suffix = ".parquet"
    parted = True

    def save(self, data: dict[str, Any]) -> None:
        super().save(data)
        reached(EPISODES_SAVED)

    def prune(self, after: int) -> None:
        """As of all partitions; refuses to go on beside episodes of another schema version.

        Raises:
            OtherVersionError: the oldest partition that stays is of another one.
        """
        super().prune(after)
        for name in self.partitions()[:1]:
            try:
                check_file(self._place(name))
            except OtherVersionError:
                raise
            except TornFileError:
                pass  # a damaged file is named when it is read, and costs a continuing run nothing before

    def _write(self, path: Path, value: Any) -> None:
        write_trajectories(path, TrajectoryContract.to_table(value))

    def _read(self, path: Path, columns: Sequence[str] | None = None) -> pa.Table:
        """A partition; `columns` (None: all) spares reading tokens and images where only numbers are wanted."""
        return read_trajectories(path, columns)

    def _bytes_needed(self, value: Any) -> int | None:
        return int(TrajectoryContract.to_table(value).nbytes)

    def preview(self, nrows: int = 5) -> TablePreview:
        """First rows of the newest partition for kedro-viz, JSON-safe: bytes as `<n bytes>`, long values cut.

        Args:
            nrows: number of rows.

        Returns:
            {"index", "columns", "data"} as pandas' split form.
        """
        names = self.partitions()
        columns = TRAJECTORY_SCHEMA.names
        rows = read_trajectories(self._place(names[-1])).slice(0, nrows).to_pylist() if names else []
        data = [[_preview_cell(row[name]) for name in columns] for row in rows]
        return {"index": list(range(len(data))), "columns": columns, "data": data}


def _preview_cell(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else str(_without_bytes(value))
    return text if len(text) <= _PREVIEW_TEXT else f"{text[:_PREVIEW_TEXT]}… ({len(value)} in all)"


def _without_bytes(value: Any) -> Any:
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, dict):
        return {name: _without_bytes(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_bytes(item) for item in value[:_PREVIEW_TEXT]]
    return value


class TrajectoriesFrameDataset(AbstractDataset[None, "pd.DataFrame"]):
    """All stored episodes as one pandas frame without images: the read-only `@pandas` view.

    Lists are Python lists, structs dicts; the last column `partition` says where a row is stored. A run without
    episodes gives a frame with all columns and no rows.

    Args:
        path: folder of the `TrajectoriesDataset`.
        iterations: the iterations to read; None reads all.
        metadata: ignored here; read by kedro-viz.
    """

    def __init__(self, path: str, iterations: list[int] | None = None, metadata: dict[str, Any] | None = None) -> None:
        self._parts = TrajectoriesDataset(path)
        self._iterations = iterations
        self.metadata = metadata

    def load(self) -> pd.DataFrame:
        """Read all partitions, or those of the chosen iterations."""
        import pandas as pd

        columns: dict[str, list[Any]] = {name: [] for name in TRAJECTORY_SCHEMA.names if name != "images"}
        partition: list[str] = []
        for name in self._parts.partitions():
            if self._iterations is None or read_iteration(name) in self._iterations:
                table = read_trajectories(self._parts._place(name), list(columns))
                partition += [name] * table.num_rows
                for column, values in columns.items():
                    values.extend(table.column(column).to_pylist())
        series = {name: pd.Series(values, dtype=_frame_dtype(name)) for name, values in columns.items()}
        return pd.DataFrame({**series, "partition": pd.Series(partition, dtype="str")})

    def save(self, data: None) -> None:
        """Refused: this is a view."""
        raise DatasetError(f"{self._parts} is saved as tables, by the entry without @pandas; this one only reads")

    def _exists(self) -> bool:
        return self._parts.exists()

    def _describe(self) -> dict[str, Any]:
        return {**self._parts._describe(), "iterations": self._iterations}


def _frame_dtype(name: str) -> str:
    field = TRAJECTORY_SCHEMA.field(name)
    kind = str(field.type)
    if field.nullable and kind in ("bool", "int32"):
        return {"bool": "boolean", "int32": "Int32"}[kind]  # pandas' own types that know missing values
    names = {"string": "str", "double": "float64", "int32": "int32", "int64": "int64", "bool": "bool"}
    return names.get(kind, "object")
