"""Bases of datasets that are one file or folder."""

from __future__ import annotations

from inspect import unwrap
from pathlib import Path
from typing import Any, TypeVar

from kedro.io import AbstractDataset, DatasetError

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
