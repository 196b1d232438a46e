"""JSON files that appear whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kedro.io import AbstractDataset

from geo_sokoban_pipeline.datasets.tables import under_id
from geo_sokoban_pipeline.runs.storage import explain_storage_errors, read_json, write_json


class JsonFileDataset(AbstractDataset[Any, Any]):
    """One JSON value.

    Args:
        path: the file.
        metadata: ignored here; read by kedro-viz.
    """

    def __init__(self, path: str, metadata: dict[str, Any] | None = None) -> None:
        self._path = Path(path)
        self.metadata = metadata

    def use_data(self, data_id: str) -> None:
        """From now on the file of the same name under another data id."""
        self._path = under_id(self._path, data_id)

    def load(self) -> Any:
        """The stored value.

        Raises:
            DatasetError: caused by a `CorruptFolderError`: the file is no JSON; the message names it.
        """
        return read_json(self._path)

    def save(self, data: Any) -> None:
        """Store a value.

        Raises:
            DatasetError: caused by the system's refusal; the message names the file.
        """
        with explain_storage_errors(self._path):
            write_json(self._path, data)

    def _exists(self) -> bool:
        return self._path.is_file()

    def _describe(self) -> dict[str, Any]:
        return {"path": self._path.as_posix()}
