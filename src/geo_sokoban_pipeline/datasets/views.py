"""A read-only view of stored files: a node reads what its run has stored before, or what hooks have written.

In Kedro's graph no node may read an entry that it writes. The view is another entry on the same path, so that a node
finds out whether its work is done, and the loop after which iteration it continues.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kedro.io import AbstractDataset, DatasetError
from kedro.utils import load_obj


class ViewDataset(AbstractDataset[None, Any]):
    """What a function reads at a path, at the moment when it is loaded.

    Args:
        path: file or folder; it need not be there.
        read: dotted name of a function of the path, also called where nothing is stored yet; it needs no Kedro.
        metadata: ignored here; read by kedro-viz.
    """

    def __init__(self, path: str, read: str, metadata: dict[str, Any] | None = None) -> None:
        self._path = Path(path)
        self._read = read
        self.metadata = metadata

    def load(self) -> Any:
        """What is stored now.

        Raises:
            DatasetError: caused by a `CorruptFolderError` that names the damaged file.
        """
        return load_obj(self._read)(self._path)

    def save(self, data: None) -> None:
        """Refused: this is a view."""
        raise DatasetError(f"{self._path} is saved by another entry or by a hook; this one only reads")

    def _exists(self) -> bool:
        return True

    def _describe(self) -> dict[str, Any]:
        return {"path": self._path.as_posix(), "read": self._read}
