"""Geometry's data before a run: can the source give the problems, and do the stored prompts belong to it?

The first problems are really drawn (or the first rows really read), so what is reported is what the data pipeline does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.envs.geo3k.config import Geo3kDataOptions
from geo_sokoban_pipeline.envs.geo3k.data import index_problems, prompt_row
from geo_sokoban_pipeline.envs.geo3k.sources import draw_problems, open_source
from geo_sokoban_pipeline.envs.inspection import (
    GROUP,
    Check,
    DataSample,
    compare_stored,
    describe_sample,
    inspect_source,
)
from geo_sokoban_pipeline.envs.rows import SPLITS, HubReader
from geo_sokoban_pipeline.runs.row_stream import open_parquet, stored_rows

Row = dict[str, Any]


def inspect_problems(
    options: Geo3kDataOptions, section: str, rows: int, hub: HubReader | None, stored: Path
) -> DataSample:
    """Look at the data of a geometry run.

    Args:
        section: name of the data's parameters.
        rows: problems drawn, or rows read, at most.
        hub: reads rows from the hub.
        stored: folder of the prompts tables in 05_model_input.
    """

    def look(sample: DataSample) -> None:
        sample.checks, prompts, read = sample_problems(options, section, rows, hub)
        sample.counts = expected_counts(options, prompts, whole=read < rows)
        sample.rows = [row for row in prompts if row["split"] == "train"] or prompts

    return inspect_source(
        look,
        lambda: check_counts_drawn(options, section),
        lambda: check_stored_prompts(options, section, stored),
        generated=options.source == "generate",
    )


def sample_problems(
    options: Geo3kDataOptions, section: str, rows: int, hub: HubReader | None
) -> tuple[list[Check], list[Row], int]:
    """Generate the first problems of the source, or read its first rows.

    Args:
        section: name of the data's parameters.
        rows: problems drawn, or rows read, at most.

    Returns:
        Findings, prompts of all splits, and how many rows were read.

    Raises:
        As `open_source` and `index_problems`: the source cannot give problems.
    """
    raw = list(islice(iter(open_source(_first(options, rows), section, hub)), rows))
    index, rejected = index_problems(raw, options, section)
    settled = {row["row_id"]: row for row in index}
    kept = [row for row in raw if settled[row["row_id"]]["status"] == "kept"]
    prompts = [prompt_row(row, settled[row["row_id"]], options) for row in kept]
    found = f"{len(index) - len(rejected)} problems"
    return describe_sample(section, options.source, len(raw), found, rejected), prompts, len(raw)


def check_counts_drawn(options: Geo3kDataOptions, section: str) -> list[Check]:
    """Whether generated counts are possible; this draws all tiny problems, without their images.

    Raises:
        ProblemsExhaustedError: the families hold too few problems.
    """
    if options.problems.difficulty != "tiny":
        text = f"problems of difficulty {options.problems.difficulty} are too many to run out, and take long to draw"
        return [Check(GROUP, "counts", "skipped", text)]
    draw_problems(options, section)
    return [Check(GROUP, "counts", "ok", ", ".join(f"{name} of {getattr(options.counts, name):,}" for name in SPLITS))]


def expected_counts(options: Geo3kDataOptions, prompts: Sequence[Row], *, whole: bool) -> dict[str, int | None]:
    """Number of problems of each split in a run; None if only the whole source determines it.

    Args:
        whole: the prompts are those of the whole source.
    """
    if options.source == "generate":
        return {split: getattr(options.counts, split) for split in SPLITS}
    return {split: sum(row["split"] == split for row in prompts) if whole else None for split in SPLITS}


def check_stored_prompts(options: Geo3kDataOptions, section: str, folder: Path) -> list[Check]:
    """Whether the stored prompts are those of the options; `skipped` if there are none yet, or it is unknown.

    Args:
        folder: of the prompts tables in 05_model_input.
    """

    return compare_stored(
        folder,
        lambda path, split: _differences(path, split, options, section),
        generated=options.source == "generate",
    )


def _first(options: Geo3kDataOptions, rows: int) -> Geo3kDataOptions:
    """The options with another number of problems, nearly all of them for training."""
    if options.source != "generate":
        return options
    few = {"train": rows, "validation": 1, "eval": 1}
    counts = {split: min(few[split], getattr(options.counts, split)) for split in SPLITS}
    return options.model_copy(update={"counts": options.counts.model_copy(update=counts)})


def _differences(path: Path, split: str, options: Geo3kDataOptions, section: str) -> list[str]:
    """Differences of stored rows from these options, whose source generates."""
    with open_parquet(path) as file:
        stored = file.metadata.num_rows
    asked = getattr(options.counts, split)
    differs = [] if stored == asked else [f"{stored} rows, {asked} asked for"]
    if split != "eval" or not stored:
        return differs
    # Evaluation problems are drawn first, so its first one does not depend on the counts.
    few = options.counts.model_copy(update={"train": 0, "validation": 0, "eval": 1})
    _, made, _ = sample_problems(options.model_copy(update={"counts": few}), section, 1, None)
    first = next(iter(stored_rows(path)))
    names = {"prompt": "another instruction", "images": "other images", "answer": "other answers"}
    return differs + [what for name, what in names.items() if first.get(name) != made[0][name]]
