"""Policies in the catalog: Hugging Face folders that are stored whole and opened only if every file is as written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kedro.io import AbstractDataset, DatasetError

from geo_sokoban_pipeline.runs.policy_folder import FolderWriter, PolicyFolder, open_policy, write_policy
from geo_sokoban_pipeline.runs.storage import MANIFEST, explain_storage_errors


class PolicyDataset(AbstractDataset[PolicyFolder | FolderWriter, PolicyFolder]):
    """One policy folder.

    Args:
        path: the folder.
        metadata: ignored here; read by kedro-viz.
    """

    def __init__(self, path: str, metadata: dict[str, Any] | None = None) -> None:
        self._path = Path(path)
        self.metadata = metadata

    def save(self, data: PolicyFolder | FolderWriter) -> None:
        """Store a policy in place of the one before, atomically.

        Args:
            data: a sealed folder (linked or copied; nothing happens if it lies here already) or a callable
                `writer(folder) -> manifest entries`.

        Raises:
            DatasetError: neither of the two; or caused by a `StorageError` or a `CorruptFolderError`.
        """
        if not isinstance(data, PolicyFolder) and not callable(data):
            raise DatasetError(f"{self._path}: a policy is a PolicyFolder or a writer, not a {type(data).__name__}")
        with explain_storage_errors(self._path, lambda: _bytes_needed(data)):
            write_policy(self._path, data)

    def load(self) -> PolicyFolder:
        """The policy, its files verified.

        Raises:
            DatasetError: no policy here, or a damaged one; the message names the file.
        """
        return open_policy(self._path)

    def _exists(self) -> bool:
        return (self._path / MANIFEST).is_file()

    def _describe(self) -> dict[str, Any]:
        return {"path": self._path.as_posix()}


def _bytes_needed(data: PolicyFolder | FolderWriter) -> int | None:
    if isinstance(data, PolicyFolder):
        return sum(file["bytes"] for file in data.manifest["files"].values())
    return None
