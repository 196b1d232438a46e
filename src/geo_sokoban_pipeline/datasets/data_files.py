"""Files of a task's data: they lie in a folder that is the id of their settings, and are never changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kedro.io import DatasetError

from geo_sokoban_pipeline.storage import write_once


def under_id(path: Path, data_id: str) -> Path:
    """The file of the same name in the folder of another data id."""
    return path.parent.parent / data_id / path.name


def save_once(path: Path, write: Callable[[Path], Any], holds: Callable[[Path], bool | None]) -> None:
    """Write a file of an id as `storage.write_once` does.

    Raises:
        DatasetError: the stored file holds something else; the message says why that may be, and the way out.
        OSError: no space, read-only folder; what was stored is unchanged.
    """
    if not write_once(path, write, holds):
        raise DatasetError(
            f"{path} holds other rows than the same settings give now. Data are written once, because runs rely on "
            "them. Either the source has changed behind its name (the main branch of a hub dataset: name a commit in "
            "hub.revision; images below image_folder), or the code that makes the rows has changed. "
            f"To make them again, delete {path.parent} and the folders of the same name in 01_raw and 02_intermediate; "
            "runs that were made with the old rows can then no longer be evaluated on them."
        )
