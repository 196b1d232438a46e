"""Data of a run by iteration: one partition per file or folder, each written whole, loaded when it is called for.

A folder that is missing or empty is a run that has not begun, never an error. Saving `{}` does nothing, so a loop may
yield it where nothing is due. The key `PRUNE` takes a run back to an iteration before anything new is written.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kedro.io import AbstractDataset, DatasetError

from geo_sokoban_pipeline.datasets.storage_errors import explain_storage_errors
from geo_sokoban_pipeline.schemas import PRUNE

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
        """Estimate of the bytes that one value takes on disk; None where nobody can say."""
        return None

    def save(self, data: dict[str, Any]) -> None:
        """Write partitions in their order, each atomically.

        Args:
            data: {partition id: value}. `{}` does nothing. `{"PRUNE": after}` first deletes every partition whose
                iteration is later than `after` (-1: all) and what killed processes left half-written.

        Raises:
            DatasetError: an id of the wrong form, before anything is deleted or written; or caused by a
                `StorageError`: disk full, read-only folder. What was written before stays as it is.
        """
        if not isinstance(data, Mapping):
            raise DatasetError(f"{self._path}: save takes {{partition id: value}}, not a {type(data).__name__}")
        partitions = {name: value for name, value in data.items() if not self._is_control(name)}
        for name in partitions:
            self._check_id(name)
        if PRUNE in data:
            with explain_storage_errors(self._path):
                self.prune(int(data[PRUNE]))
        for name, value in partitions.items():
            with explain_storage_errors(self._place(name), partial(self._bytes_needed, value)):
                self._write(self._place(name), value)
        self._save_controls(data)

    def _is_control(self, name: str) -> bool:
        return name == PRUNE

    def _save_controls(self, data: dict[str, Any]) -> None:
        """Act on control keys other than `PRUNE`, after all partitions are written."""

    def _check_id(self, name: str) -> None:
        read_iteration(name)
        if ("/" in name) != self.parted:
            form = "iter=00012/part-000" if self.parted else "iter=00012"
            raise DatasetError(f"partition {name!r} of {self._path} is not of the form {form}")

    def _place(self, name: str) -> Path:
        return self._path / f"{name}{self.suffix}"

    def prune(self, after: int) -> None:
        """Delete the partitions of iterations later than `after` and temporary files of killed processes."""
        for leftover in [*self._path.glob(".*.tmp"), *self._path.glob("iter=*/.*.tmp")]:
            _remove(leftover)
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
