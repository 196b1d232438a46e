"""Data of a run by iteration, its checkpoints among them: a partition is written whole and loaded when called for.

A folder that is missing or empty is a run that has not begun, never an error. Saving `{}` does nothing, so a loop may
yield it where nothing is due. Saving a `Rewind` takes a run back to an iteration.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from kedro.io import AbstractDataset, DatasetError

from geo_sokoban_pipeline.formats import type_name
from geo_sokoban_pipeline.runs.storage import (
    COMPLETE_FILE,
    MANIFEST,
    Complete,
    CorruptFolderError,
    NewCheckpoint,
    Rewind,
    explain_storage_errors,
    read_json,
    read_manifest,
    remove_folder,
    write_folder,
    write_json,
)

_PARTITION = re.compile(r"iter=(\d{5,})(?:/part-(\d{3,}))?")


def read_iteration(partition: str) -> int:
    """Iteration of a partition id such as `iter=00012` or `iter=00012/part-000`.

    Raises:
        DatasetError: the id has another form.
    """
    match = _PARTITION.fullmatch(partition)
    if match is None:
        raise DatasetError(f"partition {partition!r} is not of the form iter=00012 or iter=00012/part-000")
    return int(match[1])


def partition_order(partition: str) -> tuple[int, int]:
    """Sort key of a partition id: iteration, then part."""
    match = _PARTITION.fullmatch(partition)
    return (int(match[1]), int(match[2] or 0)) if match else (-1, 0)


class IterationPartitions(AbstractDataset[dict[str, Any], Any]):
    """Base of the datasets with one or several partitions per iteration.

    A subclass sets `suffix` and `parted`, and defines `_write` and `_read` for the file or folder of one partition.

    Args:
        path: folder of all partitions.
        metadata: ignored here; read by other tools such as kedro-viz.
    """

    suffix = ""
    parted = False  # whether an iteration has several parts, in a folder of its own

    def __init__(self, path: str, metadata: dict[str, Any] | None = None) -> None:
        self._path = Path(path)
        self.metadata = metadata

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
            self._check_id(name)
        for name, value in data.items():
            with explain_storage_errors(self._place(name), partial(self._bytes_needed, value)):
                self._write(self._place(name), value)

    def _check_id(self, name: str) -> None:
        read_iteration(name)
        if ("/" in name) != self.parted:
            form = "iter=00012/part-000" if self.parted else "iter=00012"
            raise DatasetError(f"partition {name!r} of {self._path} is not of the form {form}")

    def _place(self, name: str) -> Path:
        return self._path / f"{name}{self.suffix}"

    def rewind(self, after: int) -> None:
        """Delete the partitions of iterations later than `after` and temporary files of killed processes."""
        for unfinished in [*self._path.glob(".*.tmp"), *self._path.glob("iter=*/.*.tmp")]:
            _remove(unfinished)
        for name in reversed(self.partitions()):
            if read_iteration(name) > after:
                self._remove(self._place(name))
        for folder in self._path.glob("iter=*"):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def _remove(self, place: Path) -> None:
        _remove(place)

    def load(self) -> Any:
        """{partition id: callable that reads it}, by iteration and part; `{}` where nothing is stored."""
        return {name: partial(self._read, self._place(name)) for name in self.partitions()}

    def partitions(self) -> list[str]:
        """Ids of the stored partitions, by iteration and part."""
        pattern = f"iter=*/part-*{self.suffix}" if self.parted else f"iter=*{self.suffix}"
        found = (path.relative_to(self._path).as_posix() for path in self._path.glob(pattern))
        names = (name.removesuffix(self.suffix) for name in found)
        return sorted((name for name in names if _PARTITION.fullmatch(name)), key=partition_order)

    def _exists(self) -> bool:
        return bool(self.partitions())

    def _describe(self) -> dict[str, Any]:
        return {"path": self._path.as_posix()}

    def _release(self) -> None:
        """Nothing is cached."""


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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

    def _read(self, path: Path) -> Checkpoint:
        manifest = read_manifest(path, verify=False)
        assert manifest is not None  # partitions() lists sealed folders only
        for name, expected in manifest["files"].items():
            file = path / name
            size = file.stat().st_size if file.is_file() else None
            if size != expected["bytes"]:
                found = "is missing" if size is None else f"has {size} bytes"
                raise CorruptFolderError(f"{file} {found}, {expected['bytes']} recorded. Delete {path}.")
        return {"iteration": read_iteration(path.name), "dir": path, "manifest": manifest}

    def read_complete(self) -> dict[str, Any] | None:
        """Content of the mark `COMPLETE`, None where the run has not reached its goal."""
        if not self._mark.is_file():
            return None
        mark: dict[str, Any] = read_json(self._mark)
        return mark

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
    complete, names = checkpoints.read_complete(), checkpoints.partitions()
    if not names:
        return {"folder": path, "iteration": -1, "dir": None, "manifest": None, "complete": complete, "stored": []}
    newest = path / names[-1]
    try:
        manifest = read_manifest(newest)
    except CorruptFolderError as error:
        raise CorruptFolderError(f"{error} {_way_out(path, names)}") from error
    stored = [read_iteration(name) for name in names]
    return {
        "folder": path,
        "iteration": stored[-1],
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
