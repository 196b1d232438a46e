"""Steps of data_sokoban: frames in and out.

Frames are built with object columns, so that a missing solution length stays None and never becomes NaN.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from geo_sokoban_pipeline.config.base import validate_parameters
from geo_sokoban_pipeline.envs.rows import SPLITS, HubReader, as_frame, overlaps, unique_ids
from geo_sokoban_pipeline.envs.sokoban.config import SokobanDataOptions

if TYPE_CHECKING:
    import pandas as pd

    from geo_sokoban_pipeline.envs.sokoban.data import LevelRow

logger = logging.getLogger(__name__)
Track = Callable[[str, int], AbstractContextManager[Any]]


def read_levels(
    parameters: Mapping[str, Any] | SokobanDataOptions, hub: HubReader | None = None, track: Track | None = None
) -> tuple[pd.DataFrame, pd.DataFrame, dict[str, Any]]:
    """Levels of the chosen source with their splits, the rejected rows, and the counts of the reading.

    Args:
        parameters: `params:sokoban`, see `SokobanDataOptions`.
        hub: reads rows from the hub; needed for `source=hub`.
        track: shows the progress of the solver.
    """
    from geo_sokoban_pipeline.envs.sokoban.data import RAW_LEVELS, REJECTED, raw_level_row
    from geo_sokoban_pipeline.envs.sokoban.sources import read_source

    options = as_options(parameters)
    reading = read_source(options, hub, iter if track is None else partial(_count, track))
    rows = [raw_level_row(level, split, reading.split_rule) for level, split in reading.levels]
    for row, row_id in zip(rows, unique_ids([row["row_id"] for row in rows]), strict=True):
        row["row_id"] = row_id
    if reading.rejected:
        logger.warning("%d of %d entries rejected (see sokoban.rejected)", len(reading.rejected), reading.rows_read)
    if reading.rows_collapsed:
        logger.info(
            "%d of %d entries repeat a level, as it is or turned or mirrored, or go on with its path; "
            "each level is kept once",
            reading.rows_collapsed,
            reading.rows_read,
        )
    if reading.split_rule == "level":
        logger.warning("fewer wall layouts than splits: the splits share layouts, but no level (up to symmetry)")
    numbers = {
        "rows_read": reading.rows_read,
        "rows_collapsed": reading.rows_collapsed,
        "rows_left_out": reading.rows_left_out,
        "split_rule": reading.split_rule,
    }
    rejected = as_frame([asdict(row) for row in reading.rejected], REJECTED.names)
    return as_frame(rows, RAW_LEVELS.names), rejected, numbers


def make_prompts(
    raw_levels: pd.DataFrame, parameters: Mapping[str, Any] | SokobanDataOptions
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Processed rows for training, validation and evaluation, in the order of the raw levels."""
    from geo_sokoban_pipeline.envs.sokoban.data import PROMPTS, prompt_row

    options = as_options(parameters)
    rows: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    for raw in raw_levels.to_dict("records"):
        rows[raw["split"]].append(prompt_row(raw, options))
    train, validation, evaluation = (as_frame(rows[split], PROMPTS.names) for split in SPLITS)
    return train, validation, evaluation


def report_data(
    raw_levels: pd.DataFrame,
    rejected: pd.DataFrame,
    reading: dict[str, Any],
    prompts: pd.DataFrame,
    validation_prompts: pd.DataFrame,
    eval_prompts: pd.DataFrame,
    parameters: Mapping[str, Any] | SokobanDataOptions,
) -> dict[str, Any]:
    """Data report: rows read and rejected, levels and layouts by split and length, overlaps (0 by rule)."""
    from geo_sokoban_pipeline.envs.sokoban.sources import setting_yield

    options = as_options(parameters)
    tables = {"train": prompts, "validation": validation_prompts, "eval": eval_prompts}
    rule = reading["split_rule"]
    known = raw_levels["solution_length"].dropna()
    longest = int(known.max()) if len(known) else None
    report = {
        "source": options.source,
        "rows_read": reading["rows_read"],
        "rows_rejected": len(rejected),
        "rejected_reasons": dict(Counter(rejected["reason"]).most_common(20)),
        "levels": len(raw_levels),
        "rows_collapsed": reading["rows_collapsed"],
        "rows_left_out": reading["rows_left_out"],
        "unsolved_within_limit": int(raw_levels["solution_length"].isna().sum()),
        "longest_solution": longest,
        "move_limit": options.max_steps,
        "move_limit_note": limit_note(raw_levels, options.max_steps),
        "setting_yields": setting_yield(options) if options.source == "generate" else None,
        "split_rule": rule,
        "split_note": split_note(rule),
        "splits": {split: describe_split(frame) for split, frame in tables.items()},
        "overlaps": {
            "layouts": overlaps({split: frame["layout_hash"] for split, frame in tables.items()}),
            "levels": overlaps({split: frame["level_hash"] for split, frame in tables.items()}),
        },
    }
    if report["move_limit_note"]:
        logger.warning("%s", report["move_limit_note"])
    sizes = ", ".join(
        f"{split} {found['levels']} ({found['repeated']} copies) on {found['layouts']} wall layouts"
        for split, found in report["splits"].items()
        if found["levels"]
    )
    logger.info("levels: %s; split by %s", sizes, rule)
    return report


def describe_split(frame: pd.DataFrame) -> dict[str, Any]:
    """Levels, distinct ones, rows that repeat one, wall layouts, and levels by solution length of one split."""
    # Null lengths are NaN if pandas made the column a float column.
    known = frame["solution_length"].dropna()
    lengths = Counter(str(int(length)) for length in known)
    if len(known) < len(frame):
        lengths["unknown"] = len(frame) - len(known)
    distinct = len(set(frame["level_hash"]))
    return {
        "levels": len(frame),
        "distinct_levels": distinct,
        "repeated": len(frame) - distinct,
        "layouts": len(set(frame["layout_hash"])),
        "by_length": {key: lengths[key] for key in sorted(lengths, key=lambda key: (not key.isdigit(), key.zfill(9)))},
    }


def _count(track: Track, levels: list[LevelRow]) -> Iterator[LevelRow]:
    with track("solve levels", len(levels)) as progress:
        for level in levels:
            yield level
            progress.advance()


def limit_note(raw_levels: pd.DataFrame, max_steps: int) -> str | None:
    """Levels that no policy can solve within the move limit; None if there are none."""
    known = raw_levels["solution_length"].dropna()
    if not (beyond := int((known > max_steps).sum())):
        return None
    return (
        f"sokoban.max_steps={max_steps}: {beyond} of {len(raw_levels)} levels need more moves, the longest "
        f"{int(known.max())}; no policy can solve them. Raise sokoban.max_steps, or leave these levels out."
    )


def split_note(rule: str) -> str:
    """The rule of the split in words, for the report."""
    if rule == "layout":
        return "No wall layout (up to symmetry) occurs in two splits."
    return "Fewer wall layouts than splits: no level (up to symmetry) occurs in two splits, but layouts do."


def as_options(parameters: Mapping[str, Any] | SokobanDataOptions) -> SokobanDataOptions:
    """Checked options; errors name the full parameter path."""
    return validate_parameters(dict(parameters), SokobanDataOptions, prefix="sokoban")
