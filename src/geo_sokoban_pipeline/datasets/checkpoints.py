"""Checkpoints of a run: one sealed folder per saved iteration, and a read-only view of the newest one.

The manifest of a checkpoint is the commit record of its iteration. `COMPLETE.json` says that the run reached its
goal; without it the entry does not exist for Kedro, so `--only-missing-outputs` continues a half-finished run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

from kedro.io import AbstractDataset, DatasetError

from geo_sokoban_pipeline.datasets.partitions import IterationPartitions, read_iteration
from geo_sokoban_pipeline.datasets.storage_errors import explain_storage_errors
from geo_sokoban_pipeline.schemas import COMPLETE, RETAIN
from geo_sokoban_pipeline.storage import (
    MANIFEST,
    CorruptFolderError,
    read_json,
    read_manifest,
    remove_folder,
    write_folder,
    write_json,
)

CheckpointWriter = Callable[[Path], dict[str, Any]]


class Checkpoint(TypedDict):
    """One stored checkpoint: the state after training on the trajectories of `iteration`."""

    iteration: int
    dir: Path
    manifest: dict[str, Any]


class ResumeState(TypedDict):
    """Where a run stands: iteration -1 and no folder at first; `complete` is set once the run reached its goal."""

    iteration: int
    dir: Path | None
    manifest: dict[str, Any] | None
    complete: dict[str, Any] | None
    stored: list[int]


class CheckpointsDataset(IterationPartitions):
    """Checkpoint folders `iter=00012`.

    Saves, in this order, whatever of these a dict holds:

    - `"PRUNE": after` deletes checkpoints later than `after` and the mark `COMPLETE`;
    - `"iter=00012": writer` calls `writer(folder) -> manifest entries` on a folder that appears once it is sealed
      (a writer may have an attribute `bytes_needed`); a new checkpoint takes the mark `COMPLETE` away;
    - `"COMPLETE": {"iterations": n, …}` marks the run as finished;
    - `"RETAIN": [iterations]` deletes all other checkpoints.

    Loads {partition: Checkpoint}. Sizes of files are compared with the manifest here, their digests only by
    `storage.read_manifest(checkpoint["dir"])`, since hashing every checkpoint of a large model takes minutes.

    Args:
        path: folder of all checkpoints.
        metadata: ignored here; read by kedro-viz.
    """

    def _is_control(self, name: str) -> bool:
        return name in (COMPLETE, RETAIN) or super()._is_control(name)

    def _save_controls(self, data: dict[str, Any]) -> None:
        if COMPLETE in data:
            with explain_storage_errors(self._mark):
                write_json(self._mark, data[COMPLETE])
        if RETAIN in data:
            keep = set(data[RETAIN])
            for name in self.partitions():
                if read_iteration(name) not in keep:
                    self._remove(self._place(name))

    @property
    def _mark(self) -> Path:
        return self._path / f"{COMPLETE}.json"

    def prune(self, after: int) -> None:
        """As in the base, and what is left of checkpoints that were being removed; the run is no longer complete."""
        self._mark.unlink(missing_ok=True)
        super().prune(after)
        for name in super().partitions():
            if not (self._place(name) / MANIFEST).is_file():
                self._remove(self._place(name))

    def _write(self, path: Path, value: CheckpointWriter) -> None:
        if not callable(value):
            raise DatasetError(f"{path}: a checkpoint is a callable writer(folder), not a {type(value).__name__}")
        self._mark.unlink(missing_ok=True)
        write_folder(path, value)

    def _bytes_needed(self, value: Any) -> int | None:
        stated: int | None = getattr(value, "bytes_needed", None)
        if stated is not None or not self.partitions():
            return stated
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


class ResumeStateDataset(AbstractDataset[None, ResumeState]):
    """The newest checkpoint of a run, fully verified, as a read-only view: what a loop starts from.

    Args:
        path: folder of the `CheckpointsDataset`.
        metadata: ignored here; read by kedro-viz.
    """

    def __init__(self, path: str, metadata: dict[str, Any] | None = None) -> None:
        self._checkpoints = CheckpointsDataset(path)
        self._path = Path(path)
        self.metadata = metadata

    def load(self) -> ResumeState:
        """The newest checkpoint.

        Returns:
            iteration, folder and manifest of it, and the content of `COMPLETE`; -1 and None where there is none.

        Raises:
            DatasetError: caused by a `CorruptFolderError`: the newest checkpoint is damaged. The message names the
                file and the iteration from which the run continues once the checkpoint is deleted.
        """
        complete = self._checkpoints.read_complete()
        names = self._checkpoints.partitions()
        if not names:
            return {"iteration": -1, "dir": None, "manifest": None, "complete": complete, "stored": []}
        newest = self._path / names[-1]
        try:
            manifest = read_manifest(newest)
        except CorruptFolderError as error:
            raise CorruptFolderError(f"{error} {self._way_out(names)}") from error
        stored = [read_iteration(name) for name in names]
        return {"iteration": stored[-1], "dir": newest, "manifest": manifest, "complete": complete, "stored": stored}

    def _way_out(self, names: list[str]) -> str:
        damaged = [self._path / names[-1]]
        for name in reversed(names[:-1]):
            try:
                read_manifest(self._path / name)
            except CorruptFolderError:
                damaged.append(self._path / name)
            else:
                listed = " and ".join(map(str, damaged))
                return f"The newest intact checkpoint is {name}: delete {listed} to continue from iteration {name[5:]}."
        listed = " and ".join(map(str, damaged))
        return f"No intact checkpoint is left: delete {listed} to begin the run again."

    def save(self, data: None) -> None:
        """Refused: this is a view."""
        raise DatasetError(f"{self._path} is saved by the checkpoints entry; resume_state only reads")

    def _exists(self) -> bool:
        return True

    def _describe(self) -> dict[str, Any]:
        return {"path": self._path.as_posix()}
