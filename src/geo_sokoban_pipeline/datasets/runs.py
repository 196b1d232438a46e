"""All stored runs as one read-only entry, for the pipelines that work on another run's data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kedro.io import AbstractDataset, DatasetError

from geo_sokoban_pipeline.runs.folders import RunStore


class RunsDataset(AbstractDataset[None, RunStore]):
    """The data root as a `RunStore`.

    Args:
        path: data root.
        metadata: ignored here; read by kedro-viz.
    """

    def __init__(self, path: str, metadata: dict[str, Any] | None = None) -> None:
        self._path = Path(path)
        self.metadata = metadata

    def load(self) -> RunStore:
        """The store; nothing is read yet."""
        return RunStore(self._path)

    def save(self, data: None) -> None:
        """Refused: runs are written by their own pipelines."""
        raise DatasetError(f"{self._path}: the entry `runs` only reads; pipelines write into their own namespaces")

    def _exists(self) -> bool:
        return self._path.is_dir()

    def _describe(self) -> dict[str, Any]:
        return {"path": self._path.as_posix()}
