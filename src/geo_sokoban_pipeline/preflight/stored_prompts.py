"""Stored prompts before a run: whether the tables of an earlier one are those that these options would make.

What makes rows differ is a world's own affair; when that can be told at all, and how it is put, is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from geo_sokoban_pipeline.preflight.checks import Check

TABLES = {"train": "prompts", "validation": "validation_prompts", "eval": "eval_prompts"}
_NAME = "stored prompts"


def compare_stored(
    group: str, folder: Path, differences: Callable[[Path, str], list[str]], *, generated: bool
) -> list[Check]:
    """Whether the stored prompts are those of the options; `skipped` where there are none yet, or it cannot be told.

    Args:
        group: of the checks.
        folder: of the prompts tables in 05_model_input, under the id of the data.
        differences: what in a table, of a split, cannot be of the options; raises OSError or ValueError for a file that
            cannot be read.
        generated: the source generates, so that rows can be made and compared; of others the id alone tells.
    """
    paths = {split: folder / f"{name}.parquet" for split, name in TABLES.items()}
    if not all(path.is_file() for path in paths.values()):
        return [Check(group, _NAME, "skipped", "none yet; the data nodes of the run make them")]
    if not generated:
        return [Check(group, _NAME, "ok", f"made with these settings and source: {folder.name}")]
    found: list[Check] = []
    for split, path in paths.items():
        try:
            differs = differences(path, split)
        except (OSError, ValueError) as error:
            differs = [f"not readable ({' '.join(str(error).split())})"]
        if differs:
            way_out = f"delete {folder}; the data nodes of the run make them again"
            found.append(Check(group, _NAME, "warning", f"{path}: {'; '.join(differs)}", way_out))
    return found or [Check(group, _NAME, "ok", f"made with these settings: {folder.name}")]
