"""Stored files of a run at a glance: a torn one is named before hours are spent, not when the report reads it.

Only sizes, first and last bytes, and small JSON files are read, so a run of a thousand iterations costs a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from geo_sokoban_pipeline.preflight.fingerprints import newest_checkpoints
from geo_sokoban_pipeline.storage import MANIFEST, CorruptFolderError, read_json, read_manifest

_MARK = b"PAR1"  # a parquet file begins and ends with it


def find_damage(models: Path, outputs: Path) -> list[str]:
    """What is torn among a run's checkpoints, policies, metrics and trajectories: one text each, with the way out.

    Args:
        models: folder of the run id in 06_models.
        outputs: folder of the run id in 07_model_output.
    """
    folders = [models / "base_policy", models / "policy", *newest_checkpoints(models / "checkpoints")[-1:]]
    damaged = [text for folder in folders for text in find_damaged_files(folder)]
    return [*damaged, *find_damaged_rows(models, outputs)]


def find_damaged_rows(models: Path, outputs: Path) -> list[str]:
    """What is torn among committed metrics and trajectories, as in `find_damage`.

    What is later than the newest checkpoint is not looked at: a continued run deletes it and makes it again.
    """
    newest = newest_checkpoints(models / "checkpoints")[-1:]
    last = _number(newest[0].name) if newest else -1
    return [*_damaged_metrics(outputs, last), *_damaged_trajectories(outputs, last)]


def find_damaged_files(folder: Path) -> list[str]:
    """What is torn in a sealed folder, as in `find_damage`; only sizes are compared."""
    try:
        manifest = read_manifest(folder, verify=False) or {"files": {}}
    except CorruptFolderError as error:
        return [str(error)]
    found = []
    for name, expected in manifest["files"].items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != expected["bytes"]:
            said = "is missing" if size is None else f"has {size} bytes, {expected['bytes']} recorded"
            found.append(f"{path} {said} in {MANIFEST}. Delete {folder} to have it made again.")
    return found


def _damaged_metrics(outputs: Path, last: int) -> Iterator[str]:
    for path in sorted((outputs / "metrics").glob("iter=*.json")):
        if not 0 <= _number(path.stem) <= last:
            continue
        try:
            row = read_json(path)
        except CorruptFolderError as error:
            yield str(error)
            continue
        if not isinstance(row, dict):
            yield f"{path} holds a {type(row).__name__}, not a row of metrics. Restore it or delete it."


def _damaged_trajectories(outputs: Path, last: int) -> Iterator[str]:
    # Version v is validated before checkpoint v − 1 is committed.
    for kind, newest in (("trajectories", last), ("eval_trajectories", last + 1 if last >= 0 else -1)):
        for path in sorted((outputs / kind).glob("iter=*/part-*.parquet")):
            if 0 <= _number(path.parent.name) <= newest and not _is_whole(path):
                yield f"{path} is no whole parquet file. Restore it, or delete it to go on without these episodes."


def _number(name: str) -> int:
    """Iteration of a name such as `iter=00012`; -1 for what is not ours."""
    number = name.removeprefix("iter=")
    return int(number) if number.isdigit() else -1


def _is_whole(path: Path) -> bool:
    with path.open("rb") as file:
        first = file.read(len(_MARK))
        if path.stat().st_size < 3 * len(_MARK):
            return False
        file.seek(-len(_MARK), 2)
        return first == file.read() == _MARK
