"""Sokoban's data before a run: can the setting or the source give the levels, and do the stored prompts belong to it?

The first levels are really made (or the first rows really read), so what is reported is what the data pipeline does.
"""

from __future__ import annotations

from pathlib import Path

from geo_sokoban_pipeline.envs.inspection import (
    GROUP,
    TABLES,
    Check,
    DataSample,
    compare_stored,
    describe_sample,
    inspect_source,
)
from geo_sokoban_pipeline.envs.rows import SPLITS, HubReader
from geo_sokoban_pipeline.envs.sokoban.board import Board
from geo_sokoban_pipeline.envs.sokoban.config import SokobanDataOptions
from geo_sokoban_pipeline.envs.sokoban.data import LevelRow, data_source_name, prompt_row, raw_level_row
from geo_sokoban_pipeline.envs.sokoban.sources import Reading, read_source, split_yields
from geo_sokoban_pipeline.runs.row_stream import Row, stored_rows

# A stored row without these is no prompt.
_COLUMNS = ("id", "prompt", "images", "data_source", "level_xsb", "level_hash", "layout_hash", "split_rule")


def inspect_levels(options: SokobanDataOptions, rows: int, hub: HubReader | None, stored: Path) -> DataSample:
    """Look at the data of a Sokoban run.

    Args:
        rows: levels made, or rows read, at most.
        hub: reads rows from the hub.
        stored: folder of the prompts tables in 05_model_input.
    """

    def look(sample: DataSample) -> None:
        sample.checks, reading = sample_levels(options, rows, hub)
        sample.rows = sample_prompts(options, reading, stored)
        sample.counts = expected_counts(options, reading, rows)
        lengths = [level.solution_length for level, _ in reading.levels if level.solution_length is not None]
        sample.longest = options.max_solution if options.source == "generate" else max(lengths, default=0)

    return inspect_source(
        look,
        lambda: check_yields(options),
        lambda: check_stored_prompts(options, stored),
        generated=options.source == "generate",
    )


def sample_levels(options: SokobanDataOptions, rows: int, hub: HubReader | None) -> tuple[list[Check], Reading]:
    """Make or read the first levels of the source.

    Args:
        rows: levels made, or rows read, at most.
        hub: reads rows from the hub.

    Raises:
        As `read_source`: the source cannot give levels.
    """
    reading = read_source(_first(options, rows), hub, most=rows)
    kept = f"{len(reading.levels)} levels"
    return describe_sample("sokoban", options.source, reading.rows_read, kept, reading.rejected), reading


def check_yields(options: SokobanDataOptions) -> list[Check]:
    """Whether generated counts are possible; `skipped` for settings too large to count."""
    if (yields := split_yields(options)) is None:
        return [Check(GROUP, "counts", "skipped", "the setting holds too many levels to count them")]
    short = [split for split, there in yields.items() if there < (getattr(options.counts, split) or 0)]
    if not short:
        return [Check(GROUP, "counts", "ok", ", ".join(f"{split} of {yields[split]:,}" for split in SPLITS))]
    asked = (
        f"sokoban.counts.{split}={getattr(options.counts, split)}: its walls yield {yields[split]}" for split in short
    )
    shares = " and ".join(f"sokoban.shares.{split}" for split in short)
    way_out = f"lower it, raise {shares}, or widen solution lengths, inner_walls, height or width"
    return [Check(GROUP, "counts", "failure", "; ".join(asked), way_out)]


def check_stored_prompts(options: SokobanDataOptions, folder: Path) -> list[Check]:
    """Whether the stored prompts are those of the options; `skipped` if there are none yet, or it is unknown.

    Args:
        folder: of the prompts tables in 05_model_input.
    """

    return compare_stored(
        folder,
        lambda path, split: _differences(list(stored_rows(path)), split, options),
        generated=options.source == "generate",
    )


def sample_prompts(options: SokobanDataOptions, reading: Reading, stored: Path) -> list[Row]:
    """Training prompts for trials: the stored ones if they are known to fit, else those of the first levels.

    Args:
        stored: folder of the prompts tables in 05_model_input.
    """
    path = stored / f"{TABLES['train']}.parquet"
    if options.source == "generate" and path.is_file():
        try:
            rows = list(stored_rows(path))
        except (OSError, ValueError):  # torn; the data nodes of the run make it again
            rows = []
        if rows and not _differences(rows, "train", options):
            return rows
    return [prompt_row(raw_level_row(level, split, reading.split_rule), options) for level, split in reading.levels]


def first_prompt(options: SokobanDataOptions, rows: int) -> Row | None:
    """A prompt of a source that is read, from its first rows; None if none of them is a valid level.

    Raises:
        As `read_source`: the source cannot give levels.
    """
    _, reading = sample_levels(options, rows, None)
    return next(iter(sample_prompts(options, reading, Path())), None)


def expected_counts(options: SokobanDataOptions, reading: Reading, rows: int) -> dict[str, int | None]:
    """Number of levels of each split in a run; None if only the whole source determines it.

    Args:
        rows: that were looked at, at most; a source that has fewer is known as a whole.
    """
    asked = {split: getattr(options.counts, split) for split in SPLITS}
    if options.source == "generate" or reading.rows_read >= rows:
        return asked
    return {split: sum(1 for _, name in reading.levels if name == split) for split in SPLITS}


def _first(options: SokobanDataOptions, rows: int) -> SokobanDataOptions:
    """The options with fewer generated levels."""
    wanted = {split: getattr(options.counts, split) for split in SPLITS}
    if options.source != "generate" or None in wanted.values():
        return options
    # Held-out splits need few; a split with as many levels as there are lengths has all lengths.
    lengths = options.max_solution - options.min_solution + 1
    few = {"train": rows, "validation": max(lengths, rows // 10), "eval": max(lengths, rows // 10)}
    counts = options.counts.model_copy(update={split: min(count, few[split]) for split, count in wanted.items()})
    return options.model_copy(update={"counts": counts})


def _differences(rows: list[Row], split: str, options: SokobanDataOptions) -> list[str]:
    """Differences of stored rows from these options, whose source generates."""
    differs: list[str] = []
    asked = getattr(options.counts, split)
    if asked != len(rows):
        differs.append(f"{len(rows)} rows, {asked} asked for")
    if not rows:
        return differs
    first = rows[0]
    if missing := [name for name in _COLUMNS if first.get(name) is None]:
        return [*differs, f"no {', '.join(missing)} in its rows"]
    lengths = (row.get("solution_length") for row in rows)
    known = [length for length in lengths if isinstance(length, int)]
    if known and (min(known) < options.min_solution or max(known) > options.max_solution):
        differs.append(f"solution lengths {min(known)} to {max(known)}")
    size = f"sokoban_{options.height}x{options.width}_{options.boxes}box"
    if first["data_source"] != size:
        differs.append(f"{first['data_source']}, {size} asked for")
    raw = {"columns": "{}", "row_id": first["id"], "prompt": None, "images": None, "split": split}
    try:
        made = prompt_row({**first, **raw}, options)
    except (AttributeError, TypeError, ValueError) as error:  # a foreign table's columns may hold anything
        return [*differs, f"its first row is no level ({error})"]
    names = {"prompt": "another instruction", "images": "images of another size"}
    return differs + [what for name, what in names.items() if first[name] != made[name]]


def sample_level(options: SokobanDataOptions) -> Row:
    """A prompts row of a level of the size that a run with these options generates, which at most two moves solve."""
    board = Board.from_text(_draw_level(options.height, options.width, options.boxes))
    level = LevelRow("a small level", "generate", data_source_name(board), board, solution_length=2)
    return prompt_row(raw_level_row(level, "train", "layout"), options)


def _draw_level(height: int, width: int, boxes: int) -> str:
    """A room with its player beside a box beside a target; all other boxes stand on targets, from the far end."""
    tall = height > width
    long, short = (height, width) if tall else (width, height)
    cells = [[" "] * (long - 2) for _ in range(short - 2)]
    cells[0][:4] = "@ $." if long >= 6 else "@$."
    free = [(row, column) for row in range(short - 3, -1, -1) for column in range(long - 3, -1, -1)]
    for row, column in [place for place in free if place[0] > 0][: boxes - 1]:
        cells[row][column] = "*"
    drawn = ["#" * long, *("#" + "".join(row)[: long - 2] + "#" for row in cells), "#" * long]
    return "\n".join("".join(row) for row in zip(*drawn, strict=True)) if tall else "\n".join(drawn)
