"""Read-only entries: the own output of a node, parts of another run, files of hooks, all episodes as one table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from kedro.io import AbstractDataset, DatasetError
from kedro.utils import load_obj

from geo_sokoban_pipeline.config.grpo import SourceOptions
from geo_sokoban_pipeline.datasets.iterations import (
    CheckpointsDataset,
    ReadOnlyDataset,
    TrajectoriesDataset,
    read_iteration,
)
from geo_sokoban_pipeline.datasets.tables import preview_cell
from geo_sokoban_pipeline.runs.folders import RunStore
from geo_sokoban_pipeline.trajectories.index import read_index
from geo_sokoban_pipeline.trajectories.parquet import read_trajectories
from geo_sokoban_pipeline.trajectories.schema import TRAJECTORY_SCHEMA

if TYPE_CHECKING:
    import pandas as pd
    from kedro_datasets._typing import TablePreview

_PARTS: Mapping[str, Callable[[RunStore, SourceOptions], Any]] = {
    "policy": RunStore.policy,
    "start": lambda store, source: store.policy(source.model_copy(update={"checkpoint": "start"})),
    "before": RunStore.policy_before,
    "versions": RunStore.versions,
    "prompts": RunStore.trained_on,
    "trajectories": RunStore.trajectory_files,
    "episodes": RunStore.all_trajectory_files,
    "outputs": RunStore.outputs,
    "root": RunStore.data_root,
    "progress": RunStore.progress,
}


class RunsDataset(ReadOnlyDataset[RunStore]):
    """All stored runs below a data root."""

    def load(self) -> RunStore:
        """The store of these runs."""
        return RunStore(self._path)


class FolderDataset(ReadOnlyDataset[Path]):
    """A folder by its place, for tools that take one."""

    def load(self) -> Path:
        """The folder; it need not be there."""
        return self._path


class ResumableDataset(ReadOnlyDataset[Any]):
    """The present content of another entry, with which a node continues from its own output.

    In Kedro's graph no node may read an entry that it writes. So `policy` has a second entry `policy_state` with the
    same dataset; the node reads the second, returns at once where its work is done, and writes the first.

    Args:
        dataset: configuration of the other entry.
        metadata: ignored here; read by kedro-viz.
    """

    def __init__(self, dataset: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
        self._dataset = AbstractDataset.from_config("stored", dataset)
        self.metadata = metadata

    def load(self) -> Any:
        """The stored value, None without one; of checkpoints the newest, see `read_resume_state`.

        Raises:
            DatasetError: caused by a `CorruptFolderError` that names the damaged file.
        """
        if isinstance(self._dataset, CheckpointsDataset):
            return self._dataset.resume_state()
        return self._dataset.load() if self._dataset.exists() else None

    def _describe(self) -> dict[str, Any]:
        return {"dataset": self._dataset._describe()}


class SourceDataset(ReadOnlyDataset[Callable[[], Any]]):
    """A part of the stored run that a pipeline's `source` names, found and verified when the node calls for it.

    Args:
        path: data root.
        part: `policy`; `start`, the policy that GRPO started from; `before`, the policy before the iteration that the
            source names; `versions`, the folders of all its policies; `prompts`, the hash of those it was trained on;
            `trajectories`, number and files of the named iteration; `episodes`, the files of all iterations; `outputs`,
            the folder of all episodes; `root`, the data root of a run that has some; `progress`, rows of metrics and
            whether it is complete.
        run: the pipeline, such as `evaluate_sokoban`.
        sources: `${sources:}`, the source of every pipeline.
        metadata: ignored here; read by kedro-viz.
    """

    def __init__(
        self, path: str, part: str, run: str, sources: Mapping[str, Any], metadata: dict[str, Any] | None = None
    ) -> None:
        if part not in _PARTS:
            raise DatasetError(f"part={part}: must be one of {', '.join(_PARTS)}")
        super().__init__(path, metadata)
        self._part = part
        self._source = SourceOptions.model_validate(sources.get(run, {}))

    def load(self) -> Callable[[], Any]:
        """A function that finds the part; it raises a `SourceError` where nothing of that name is stored."""
        return partial(_PARTS[self._part], RunStore(self._path), self._source)

    def _describe(self) -> dict[str, Any]:
        return {**super()._describe(), "part": self._part, "source": self._source.model_dump()}


Conditions = Sequence[Any]  # triples (column, sign, value), or a list of lists of them

_DEFAULT_COLUMNS = [name for name in TRAJECTORY_SCHEMA.names if name != "images"]
_MEMORY_SHARE = 0.8  # of the free memory that a frame may take
_ROW = "row number"
# Bytes of Python objects: a number in a list with its pointer, a text without its characters, what a struct's dict
# takes for each of its fields, a cell of a plain column.
_NUMBER, _TEXT, _FIELD, _CELL = 36, 60, 45, 16


class EpisodesDataset(ReadOnlyDataset["pa.Table"]):
    """Index of a run's episodes as one table, see `trajectories/index.py`; a read-only view.

    Index files that are missing, torn or of another version are made again on loading.

    Args:
        path: folder of the run's outputs.
        tasks: as in `TrajectoriesDataset`.
        metadata: ignored here; read by kedro-viz.
    """

    def __init__(self, path: str, tasks: str, metadata: dict[str, Any] | None = None) -> None:
        super().__init__(path, metadata)
        self._tasks = tasks

    def load(self) -> pa.Table:
        """One row per stored episode: training, validations, evaluation."""
        return read_index(self._path, load_obj(self._tasks))

    def preview(self, nrows: int = 5) -> TablePreview:
        """The last rows as a table for kedro-viz."""
        table = self.load()
        rows = table.slice(max(table.num_rows - nrows, 0)).to_pylist()
        data = [[preview_cell(value) for value in row.values()] for row in rows]
        return {"index": list(range(len(data))), "columns": table.column_names, "data": data}

    def _exists(self) -> bool:
        return any(self._path.glob("*trajectories/iter=*/part-*.parquet"))


class TrajectoriesFrameDataset(ReadOnlyDataset["pd.DataFrame"]):
    """Stored episodes as one pandas frame: the read-only `@pandas` view.

    Lists are Python lists, structs dicts; the last column `partition` says where a row is stored. A run without
    episodes gives a frame with all columns and no rows. A table that does not fit into memory is refused
    before it is read.

    Args:
        path: folder of the `TrajectoriesDataset`.
        columns: the columns to read, in this order; None: all but `images`.
        iterations: the iterations to read; None reads all.
        filter: conditions on columns with one value per episode, as for `pandas.read_parquet`: triples such as
            `[success, "==", false]`, which all must hold, or a list of such lists, one of which must. Other columns are
            read only of the rows that pass.
        metadata: ignored here; read by kedro-viz.
    """

    def __init__(
        self,
        path: str,
        columns: Sequence[str] | None = None,
        iterations: Collection[int] | None = None,
        filter: Conditions | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        self._parts = TrajectoriesDataset(path)
        super().__init__(path, metadata)
        self._columns, self._iterations, self._filter = columns, iterations, filter

    def load(self) -> pd.DataFrame:
        """Read what the entry names, see `read`."""
        return self.read()

    def read(
        self,
        columns: Sequence[str] | None = None,
        iterations: Collection[int] | None = None,
        filter: Conditions | None = None,
    ) -> pd.DataFrame:
        """Read other columns, iterations or rows than the entry names; None: what it names.

        Raises:
            DatasetError: an unknown column, a condition that cannot be understood, or more than fits into memory.
        """
        import pandas as pd

        iterations = self._iterations if iterations is None else iterations
        names = list(_DEFAULT_COLUMNS if (chosen := columns or self._columns) is None else chosen)
        kept = FrameFilter.of(filter or self._filter)
        self._check_columns([*names, *kept.columns])
        parts = [
            (name, self._parts._place(name))
            for name in self._parts.partitions()
            if iterations is None or read_iteration(name) in iterations
        ]
        rows = [kept.rows(place) for _, place in parts]
        self._check_memory(names, [place for _, place in parts], rows)
        values: dict[str, list[Any]] = {name: [] for name in names}
        partition: list[str] = []
        for (name, place), chosen_rows in zip(parts, rows, strict=True):
            if chosen_rows is not None and not len(chosen_rows):
                continue
            table = read_trajectories(place, names)
            table = table if chosen_rows is None else table.take(chosen_rows)
            partition += [name] * table.num_rows
            for column, cells in values.items():
                cells.extend(table.column(column).to_pylist())
        series = {name: pd.Series(cells, dtype=_frame_dtype(name)) for name, cells in values.items()}
        return pd.DataFrame({**series, "partition": pd.Series(partition, dtype="str")})

    def _check_columns(self, names: Sequence[str]) -> None:
        if unknown := [name for name in names if name not in TRAJECTORY_SCHEMA.names]:
            raise DatasetError(
                f"{self._parts}: there are no columns {unknown}; columns are {', '.join(TRAJECTORY_SCHEMA.names)}"
            )

    def _check_memory(self, names: Sequence[str], places: Sequence[Path], rows: Sequence[Sized | None]) -> None:
        import psutil

        sizes: dict[str, float] = dict.fromkeys(names, 0.0)
        episodes = 0
        for place, chosen in zip(places, rows, strict=True):
            count, taken = object_bytes(place, names)
            number = count if chosen is None else len(chosen)
            episodes += number
            for name, size in taken.items():
                sizes[name] += size * number / max(count, 1)
        needed, free = sum(sizes.values()), psutil.virtual_memory().available
        if needed > _MEMORY_SHARE * free:
            largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
            shares = ", ".join(f"{name} {sizes[name] / 1e9:,.1f} GB" for name in largest)
            raise DatasetError(
                f"{self._parts}: {episodes:,} episodes take about {needed / 1e9:,.1f} GB in a pandas frame ({shares}), "
                f"and {free / 1e9:,.1f} GB of memory are free. Choose columns, iterations or a filter: in the catalog, "
                'or by `catalog["….trajectories@pandas"].read(columns=["reward", "success"])`. `….episodes@pandas` has '
                "one light row per episode; `….trajectories@polars` and `@ibis` read lazily."
            )

    def _exists(self) -> bool:
        return self._parts.exists()

    def _describe(self) -> dict[str, Any]:
        return {
            **self._parts._describe(),
            "columns": self._columns,
            "iterations": self._iterations,
            "filter": self._filter,
        }


@dataclass(frozen=True)
class FrameFilter:
    """Conditions on the rows of a trajectory file: an Arrow expression (None: all rows), and the columns it needs."""

    expression: Any
    columns: list[str]

    @classmethod
    def of(cls, conditions: Conditions | None) -> FrameFilter:
        """From conditions in the form of pandas.

        Raises:
            DatasetError: they have another form, or need a column with several values per episode.
        """
        if not conditions:
            return cls(None, [])
        nested = conditions if isinstance(conditions[0][0], list | tuple) else [conditions]
        try:
            triples = [(str(name), str(sign), value) for group in nested for name, sign, value in group]
            expression = pq.filters_to_expression([[tuple(condition) for condition in group] for group in nested])
        except (ValueError, TypeError) as error:
            raise DatasetError(
                f"filter={conditions!r}: {error}. Give triples such as [success, '==', false], all of which must hold, "
                "or a list of such lists, one of which must."
            ) from error
        columns = list(dict.fromkeys(name for name, _, _ in triples))
        for name in columns:
            if name in TRAJECTORY_SCHEMA.names and pa.types.is_nested(TRAJECTORY_SCHEMA.field(name).type):
                raise DatasetError(f"filter={conditions!r}: {name} has several values per episode")
        return cls(expression, columns)

    def rows(self, place: Path) -> np.ndarray | None:
        """Rows of a file that pass, ascending; None: all."""
        if self.expression is None:
            return None
        table = read_trajectories(place, self.columns)
        return table.append_column(_ROW, [np.arange(table.num_rows)]).filter(self.expression).column(_ROW).to_numpy()


def object_bytes(place: Path, names: Sequence[str]) -> tuple[int, dict[str, float]]:
    """Episodes of a trajectory file, and about how many bytes its columns take as Python objects; reads the footer."""
    footer = pq.read_metadata(place)
    sizes: dict[str, float] = dict.fromkeys(names, 0.0)
    for group in range(footer.num_row_groups):
        for number in range(footer.num_columns):
            leaf = footer.row_group(group).column(number)
            name, *below = leaf.path_in_schema.split(".")
            if name not in sizes:
                continue
            text = leaf.physical_type == "BYTE_ARRAY"
            each = (_NUMBER if below else _CELL) if not text else _TEXT + leaf.total_uncompressed_size / leaf.num_values
            in_struct = bool(below) and below[-1] != "element"
            sizes[name] += leaf.num_values * (each + _FIELD * in_struct)
    return footer.num_rows, sizes


def _frame_dtype(name: str) -> str:
    field = TRAJECTORY_SCHEMA.field(name)
    kind = str(field.type)
    if field.nullable and kind in ("bool", "int32"):
        return {"bool": "boolean", "int32": "Int32"}[kind]  # pandas' types with missing values
    names = {"string": "str", "double": "float64", "int32": "int32", "int64": "int64", "bool": "bool"}
    return names.get(kind, "object")
