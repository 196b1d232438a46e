"""The state from which a loop continues: a read-only view of its newest checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

from geo_sokoban_pipeline.datasets.iterations import CheckpointsDataset, read_iteration
from geo_sokoban_pipeline.runs.storage import CorruptFolderError, read_manifest


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
