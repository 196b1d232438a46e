"""Data of a run by iteration (episodes, metrics, checkpoints): a partition is written whole and loaded when called for.

A folder that is missing or empty is a run that has not begun, never an error. Saving `{}` does nothing, so a loop may
yield it where nothing is due. Saving a `Rewind` takes a run back to an iteration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from inspect import unwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

import pyarrow.parquet as pq
from kedro.io import AbstractDataset, DatasetError
from kedro.utils import load_obj

from geo_sokoban_pipeline.formats import type_name
from geo_sokoban_pipeline.runs.folders import read_metrics_row
from geo_sokoban_pipeline.runs.storage import (
    COMPLETE_FILE,
    MANIFEST,
    Complete,
    CorruptFolderError,
    NewCheckpoint,
    Rewind,
    Thin,
    explain_storage_errors,
    find_json,
    find_other_sizes,
    read_manifest,
    remove_entry,
    remove_folder,
    write_folder,
    write_json,
)
from geo_sokoban_pipeline.trajectories.index import measure_tokens, tidy_index, write_index
from geo_sokoban_pipeline.trajectories.parquet import (
    OtherVersionError,
    TornFileError,
    check_file,
    read_trajectories,
    write_trajectories,
)
from geo_sokoban_pipeline.trajectories.schema import TrajectoryContract
from geo_sokoban_pipeline.trajectories.thinning import read_thinning, thin_table

if TYPE_CHECKING:
    import pyarrow as pa
    from kedro_datasets._typing import HTMLPreview, PlotlyPreview

_STEP, _FIRST = "iteration", "rollout/raw_reward"
_PARTITION = re.compile(r"iter=(\d{5,})(?:/part-(\d{3,}))?")


def read_iteration(partition: str) -> int:
    """Iteration of a partition id such as `iter=00012` or `iter=00012/part-000`.

    Raises:
        DatasetError: the id has another form.
    """
    if (match := _PARTITION.fullmatch(partition)) is None:
        raise DatasetError(f"partition {partition!r} is not of the form iter=00012 or iter=00012/part-000")
    return int(match[1])


Saved = TypeVar("Saved")
Loaded = TypeVar("Loaded")


class PathDataset(AbstractDataset[Saved, Loaded]):
    """Base of the datasets at one path.

    Args:
        path: file or folder; it need not be there.
        metadata: ignored here; read by kedro-viz.
    """

    def __init__(self, path: str, metadata: dict[str, Any] | None = None) -> None:
        self._path = Path(path)
        self.metadata = metadata

    def __init_subclass__(cls, **options: Any) -> None:
        # Kedro notes the arguments by the signature (`kedro catalog resolve-patterns`), which its own wrapper hides.
        cls.__init__ = unwrap(cls.__init__)  # type: ignore[method-assign]
        super().__init_subclass__(**options)

    def _describe(self) -> dict[str, Any]:
        return {"path": self._path.as_posix()}


class ReadOnlyDataset(PathDataset[None, Loaded]):
    """Base of views on the output of another entry, another run or a hook."""

    def save(self, data: None) -> None:
        """Refused."""
        raise DatasetError(f"{self} is written by another entry or by a hook; this one only reads")

    def _exists(self) -> bool:
        return True


class IterationPartitions(PathDataset[dict[str, Any], Any]):
    """Base of the datasets with one or several partitions per iteration.

    A subclass sets `suffix` and `parted`, and defines `_write` and `_read` for the file or folder of one partition.

    Args:
        path: folder of all partitions.
        metadata: ignored here; read by other tools such as kedro-viz.
    """

    suffix = ""
    parted = False  # whether an iteration has several parts, in a folder of its own

    def _write(self, path: Path, value: Any) -> None:
        raise NotImplementedError

    def _read(self, path: Path) -> Any:
        raise NotImplementedError

    def _bytes_needed(self, value: Any) -> int | None:
        """Estimate of the bytes that one value takes on disk; None: unknown."""
        return None

    def save(self, data: dict[str, Any] | Rewind) -> None:
        """Write partitions in their order, each atomically.

        Args:
            data: {partition id: value}, `{}` does nothing; or a `Rewind`, which deletes every partition of a later
                iteration and what killed processes left half-written.

        Raises:
            DatasetError: an id of the wrong form, before anything is written; or caused by a `StorageError`: disk full,
                read-only folder. Earlier files stay as they are.
        """
        if isinstance(data, Rewind):
            with explain_storage_errors(self._path):
                self.rewind(data.after)
            return
        if not isinstance(data, Mapping):
            raise DatasetError(f"{self._path}: save takes {{partition id: value}}, not {type_name(data)}")
        for name in data:
            read_iteration(name)
            if ("/" in name) != self.parted:
                form = "iter=00012/part-000" if self.parted else "iter=00012"
                raise DatasetError(f"partition {name!r} of {self._path} is not of the form {form}")
        for name, value in data.items():
            with explain_storage_errors(self._place(name), partial(self._bytes_needed, value)):
                self._write(self._place(name), value)

    def _place(self, name: str) -> Path:
        return self._path / f"{name}{self.suffix}"

    def rewind(self, after: int) -> None:
        """Delete the partitions of iterations later than `after` and temporary files of killed processes."""
        for unfinished in [*self._path.glob(".*.tmp"), *self._path.glob("iter=*/.*.tmp")]:
            remove_entry(unfinished)
        for name in reversed(self.partitions()):
            if read_iteration(name) > after:
                self._remove(self._place(name))
        for folder in self._path.glob("iter=*"):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def _remove(self, place: Path) -> None:
        remove_entry(place)

    def load(self) -> Any:
        """{partition id: callable that reads it}, by iteration and part; `{}` where nothing is stored."""
        return {name: partial(self._read, self._place(name)) for name in self.partitions()}

    def partitions(self) -> list[str]:
        """Ids of the stored partitions, by iteration and part."""
        pattern = f"iter=*/part-*{self.suffix}" if self.parted else f"iter=*{self.suffix}"
        found = (path.relative_to(self._path).as_posix() for path in self._path.glob(pattern))
        matches = (_PARTITION.fullmatch(name.removesuffix(self.suffix)) for name in found)
        ordered = sorted(filter(None, matches), key=lambda match: (int(match[1]), int(match[2] or 0)))
        return [match[0] for match in ordered]

    def _exists(self) -> bool:
        return bool(self.partitions())


class TrajectoriesDataset(IterationPartitions):
    """Episodes by iteration and part, `iter=00012/part-000.parquet`.

    Saves {partition: pyarrow.Table or TrajectoryBatch}; loads {partition: callable -> pyarrow.Table}, image bytes
    dictionary-encoded. `name_parts` makes such a dict from an iteration's episodes.

    Each part has rows in the run's index, written and deleted with it (`trajectories/index.py`).

    Args:
        path: folder of all partitions, in the folder of a run's outputs.
        tasks: dotted name of the function that finds a task by its name, for answers and tags in the index; None: no
            index.
        previewer: dotted name of the function that makes the HTML of a preview from a table; None: there is none.
        metadata: ignored here; read by kedro-viz.
    """

    suffix = ".parquet"
    parted = True

    def __init__(
        self,
        path: str,
        tasks: str | None = None,
        previewer: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(path, metadata)
        self._tasks = tasks
        self._previewer = previewer

    def rewind(self, after: int) -> None:
        """As in the base; a run does not continue beside episodes of another schema version.

        Raises:
            OtherVersionError: the oldest partition that stays has another version.
        """
        super().rewind(after)
        if self._tasks is not None:
            tidy_index(self._path)
        for name in self.partitions()[:1]:
            try:
                check_file(self._place(name))
            except OtherVersionError:
                raise
            except TornFileError:
                pass  # reading it names the damaged file; a run that continues need not read it

    def save(self, data: dict[str, Any] | Rewind | Thin) -> None:
        """As in the base; a `Thin` thins stored partitions, each atomically."""
        if not isinstance(data, Thin):
            super().save(data)
            return
        for name in self.partitions():
            if data.first <= read_iteration(name) <= data.last:
                with explain_storage_errors(self._place(name)):
                    self._thin(self._place(name), data)

    def _thin(self, path: Path, order: Thin) -> None:
        if read_thinning(pq.read_schema(path)) is not None:
            return
        table = read_trajectories(path)
        thinned = thin_table(table, order, self._path.parent, measure_tokens(table))
        write_trajectories(path, thinned)
        if self._tasks is not None and order.episodes > 1:  # else the index is as before
            write_index(path, thinned, load_obj(self._tasks))

    def _write(self, path: Path, value: Any) -> None:
        table = TrajectoryContract.to_table(value)
        write_trajectories(path, table)
        if self._tasks is not None:
            write_index(path, table, load_obj(self._tasks))

    def _read(self, path: Path, columns: Sequence[str] | None = None) -> pa.Table:
        """A partition; with `columns` only these are read, without tokens and images where numbers suffice."""
        return read_trajectories(path, columns)

    def _bytes_needed(self, value: Any) -> int | None:
        return int(TrajectoryContract.to_table(value).nbytes)

    def preview(self, nrows: int = 5) -> HTMLPreview:
        """Gallery of the newest episodes for kedro-viz; an empty text without episodes or previewer.

        Args:
            nrows: number of episodes, the last ones of the newest partition.
        """
        names, shown = self.partitions(), ""
        if names and self._previewer is not None:
            table = read_trajectories(self._place(names[-1]))
            shown = load_obj(self._previewer)(table.slice(max(table.num_rows - nrows, 0)))
        return cast("HTMLPreview", shown)


class MetricsDataset(IterationPartitions):
    """Rows `iter=00012.json`; saves {partition: row}, loads the rows as a list in the order of iterations.

    Args:
        path: folder of all rows.
        metadata: ignored here; read by kedro-viz.
    """

    suffix = ".json"

    def _write(self, path: Path, value: Any) -> None:
        if not isinstance(value, Mapping):
            raise DatasetError(f"{path}: a row of metrics is a dict, not {type_name(value)}")
        write_json(path, {name: _plain_number(path, name, number) for name, number in value.items()})

    def _read(self, path: Path) -> dict[str, float | int | None]:
        return read_metrics_row(path)

    def _bytes_needed(self, value: Any) -> int | None:
        return 64 * len(value)

    def load(self) -> list[dict[str, float | int | None]]:
        """All rows, by iteration; `[]` where nothing is stored.

        Raises:
            DatasetError: a row is not readable JSON; the message names the file.
        """
        return [self._read(self._place(name)) for name in self.partitions()]

    def preview(self) -> PlotlyPreview:
        """Curves for kedro-viz: a menu chooses the metric, the mean reward comes first; None without rows."""
        if not (rows := self.load()):
            return cast("PlotlyPreview", None)
        names = sorted({name for row in rows for name in row} - {_STEP}, key=lambda name: (name != _FIRST, name))
        steps = [row.get(_STEP) for row in rows]
        curves = [
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": steps,
                "y": [row.get(name) for row in rows],
                "visible": not number,
            }
            for number, name in enumerate(names)
        ]
        choices = [
            {"label": name, "method": "update", "args": [{"visible": [other == name for other in names]}]}
            for name in names
        ]
        menu = {"buttons": choices, "x": 0, "xanchor": "left", "y": 1.05, "yanchor": "bottom"}  # above the curve
        layout = {"xaxis": {"title": {"text": _STEP}}, "showlegend": False, "updatemenus": [menu]}
        return cast("PlotlyPreview", {"data": curves, "layout": layout})


def _plain_number(path: Path, name: str, value: Any) -> float | int | None:
    if hasattr(value, "item"):
        value = value.item()
    if value is not None and not isinstance(value, bool | int | float):
        raise DatasetError(f"{path}: metric {name} is {value!r}; give a number or None")
    # JSON has no NaN and no infinity; a metric that diverged is stored as null rather than stopping the run.
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Checkpoints of a run: one sealed folder per saved iteration.


class Checkpoint(TypedDict):
    """One stored checkpoint: the state after training on the trajectories of `iteration`."""

    iteration: int
    dir: Path
    manifest: dict[str, Any]


class CheckpointsDataset(IterationPartitions):
    """Checkpoint folders `iter=00012`.

    Saves {partition: NewCheckpoint}: the folder appears once it is sealed, and takes the mark `COMPLETE` away; then the
    checkpoints that it does not keep are deleted. Saving `Complete` marks the run as finished, a `Rewind` deletes later
    checkpoints and the mark.

    Loads {partition: Checkpoint}. Sizes of files are compared with the manifest here, their digests only by
    `storage.read_manifest(checkpoint["dir"])`, since hashing every checkpoint of a large model takes minutes.

    Args:
        path: folder of all checkpoints.
        metadata: ignored here; read by kedro-viz.
    """

    def save(self, data: dict[str, Any] | Rewind | Complete) -> None:
        """Write or take back checkpoints (as the base does), or mark the run as finished."""
        if not isinstance(data, Complete):
            super().save(data)
            return
        with explain_storage_errors(self._mark):
            write_json(self._mark, asdict(data))

    @property
    def _mark(self) -> Path:
        return self._path / COMPLETE_FILE

    def rewind(self, after: int) -> None:
        """As in the base; also deletes half-removed checkpoints and the mark `COMPLETE`."""
        self._mark.unlink(missing_ok=True)
        super().rewind(after)
        for name in super().partitions():
            if not (self._place(name) / MANIFEST).is_file():
                self._remove(self._place(name))

    def _write(self, path: Path, value: Any) -> None:
        if not isinstance(value, NewCheckpoint):
            raise DatasetError(f"{path}: a checkpoint is saved as a NewCheckpoint, not as {type_name(value)}")
        self._mark.unlink(missing_ok=True)
        write_folder(path, value.write)
        for name in self.partitions():
            if value.keep is not None and read_iteration(name) not in value.keep:
                self._remove(self._place(name))

    def _bytes_needed(self, value: Any) -> int | None:
        if not self.partitions():
            return None
        newest = read_manifest(self._place(self.partitions()[-1]), verify=False) or {"files": {}}
        return sum(file["bytes"] for file in newest["files"].values())

    def _remove(self, place: Path) -> None:
        remove_folder(place)

    def partitions(self) -> list[str]:
        """Ids of the sealed checkpoints, by iteration."""
        return [name for name in super().partitions() if (self._place(name) / MANIFEST).is_file()]

    def load(self) -> dict[str, Checkpoint]:
        """All sealed checkpoints; `{}` where there are none.

        Raises:
            DatasetError: caused by a `CorruptFolderError` that names the file and what to delete.
        """
        return {name: self._read(self._place(name)) for name in self.partitions()}

    def resume_state(self) -> ResumeState:
        """State from which a loop continues, see `read_resume_state`."""
        return read_resume_state(self._path)

    def _read(self, path: Path) -> Checkpoint:
        manifest = read_manifest(path, verify=False)
        assert manifest is not None  # partitions() lists sealed folders only
        if damaged := find_other_sizes(path, manifest["files"]):
            raise CorruptFolderError(damaged[0])
        return {"iteration": read_iteration(path.name), "dir": path, "manifest": manifest}

    def _exists(self) -> bool:
        return self._mark.is_file() and bool(self.partitions())


class ResumeState(TypedDict):
    """State of a run: iteration -1 and no `dir` at first; `complete` is set once the run reached its goal.

    `folder` is that of all checkpoints.
    """

    folder: Path
    iteration: int
    dir: Path | None
    manifest: dict[str, Any] | None
    complete: dict[str, Any] | None
    stored: list[int]


def read_resume_state(path: Path) -> ResumeState:
    """State from which a loop continues: the newest checkpoint of a folder, fully verified.

    Returns:
        iteration, folder (`dir`) and manifest of it, and the content of `COMPLETE`; -1 and None where there is none.

    Raises:
        CorruptFolderError: the newest checkpoint is damaged. The message names the file and the iteration from which
            the run continues once the checkpoint is deleted.
    """
    checkpoints = CheckpointsDataset(str(path))
    complete, names = find_json(path / COMPLETE_FILE), checkpoints.partitions()
    newest = path / names[-1] if names else None
    try:
        manifest = None if newest is None else read_manifest(newest)
    except CorruptFolderError as error:
        raise CorruptFolderError(f"{error} {_way_out(path, names)}") from error
    stored = [read_iteration(name) for name in names]
    return {
        "folder": path,
        "iteration": max(stored, default=-1),
        "dir": newest,
        "manifest": manifest,
        "complete": complete,
        "stored": stored,
    }


def _way_out(path: Path, names: list[str]) -> str:
    damaged = [path / names[-1]]
    for name in reversed(names[:-1]):
        try:
            read_manifest(path / name)
        except CorruptFolderError:
            damaged.append(path / name)
        else:
            listed = " and ".join(map(str, damaged))
            return f"The newest intact checkpoint is {name}: delete {listed} to continue from iteration {name[5:]}."
    listed = " and ".join(map(str, damaged))
    return f"No intact checkpoint is left: delete {listed} to begin the run again."
