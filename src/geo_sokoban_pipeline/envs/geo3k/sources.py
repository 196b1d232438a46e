"""Sources of geometry problems: the generator, a dataset of the hub, or files.

All three give one stream of raw rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from geo_sokoban_pipeline.envs.geo3k.config import Geo3kDataOptions, GeometryHubOptions
from geo_sokoban_pipeline.envs.geo3k.data import PLACEHOLDER, raw_rows
from geo_sokoban_pipeline.envs.geo3k.figures.drawing import render_layout_png
from geo_sokoban_pipeline.envs.geo3k.figures.generation import ProblemsExhaustedError, generate_splits
from geo_sokoban_pipeline.envs.geo3k.figures.problem import Problem
from geo_sokoban_pipeline.envs.rows import SPLITS, BadRow, HubReader, read_rows, split_slice
from geo_sokoban_pipeline.runs.row_stream import BATCH_ROWS, Row, RowStream


def draw_problems(options: Geo3kDataOptions, section: str) -> Callable[[], Iterator[Row]]:
    """Generate the problems of all splits; their images are made during iteration over the rows.

    Held-out splits are drawn first, so they do not change with the number of training problems.

    Args:
        section: name of the parameters, for messages.

    Raises:
        ProblemsExhaustedError: the families hold fewer problems than the counts ask for.
    """
    counts = {split: getattr(options.counts, split) for split in reversed(SPLITS)}
    try:
        drawn = generate_splits(counts, options.seed, options.problems)
    except ProblemsExhaustedError as error:
        raise ProblemsExhaustedError(f"{section}.counts={counts}: {error}") from error

    def rows() -> Iterator[Row]:
        for split in SPLITS:
            for number, problem in enumerate(drawn[split]):
                yield _raw_row(problem, split, number)

    return rows


def _raw_row(problem: Problem, split: str, number: int) -> Row:
    sketch = problem.sketch
    known = {
        "family": problem.family,
        "difficulty": problem.difficulty,
        "numbers": dict(sketch.numbers),
        "candidates": [{"rule": one.rule, "label": one.label} for one in sketch.candidates],
        "seed": problem.seed,
    }
    return {
        "row_id": f"{split}_{number:05d}",
        "source": "generate",
        "source_split": split,
        "images": [{"bytes": render_layout_png(problem.layout), "path": None}],
        "problem": f"{PLACEHOLDER}{sketch.question}",
        "answer": sketch.label,
        "columns": json.dumps(known),
        "error": None,
    }


# Where problems come from: the generator, a data set of the hub, or files. All three give one stream of raw rows.


NumberedRows = Iterable[tuple[int, Mapping[str, Any] | BadRow]]


def open_source(options: Geo3kDataOptions, section: str, hub: HubReader | None = None) -> RowStream:
    """Open the chosen source: raw rows of all its splits.

    Args:
        section: name of the parameters, `geo3k` or `geo3k_multi_turn`, for messages.
        hub: needed for `source=hub`.

    Raises:
        FileNotFoundError, ValueError: a file is missing, of another format or torn; no reader of the hub.
        ProblemsExhaustedError: the generator's families hold too few problems.
    """
    if options.source == "generate":
        return RowStream(draw_problems(options, section))
    if options.source == "hub":
        if hub is None:
            raise ValueError(f"{section}.source=hub: no reader was given; run it through the pipeline data_{section}.")
        return _of_parts(_hub_parts(options.hub, hub))
    return _of_parts(_file_parts(options))


_Part = tuple[str, str, Callable[[], NumberedRows]]  # a split of a source: its name, that of the source, and its rows


def _of_parts(parts: Sequence[_Part]) -> RowStream:
    def rows() -> Iterator[Row]:
        taken: set[str] = set()
        for split, source, start in parts:
            yield from raw_rows(start(), source, split, taken)

    return RowStream(rows)


def _hub_parts(options: GeometryHubOptions, hub: HubReader) -> list[_Part]:
    names = {"train": options.train, "validation": options.validation, "eval": options.eval}
    if names["validation"] == "auto":
        names["validation"] = "validation" if "validation" in hub.names(options) else None
    opened = {split: hub.rows(options, name) for split, name in names.items() if name is not None}
    return [(split, options.dataset, partial(enumerate, rows)) for split, rows in opened.items()]


def _file_parts(options: Geo3kDataOptions) -> list[_Part]:
    files = options.file
    paths = {"train": files.path, "validation": files.validation_path, "eval": files.eval_path}
    given = {split: path for split, path in paths.items() if path is not None}
    for path in given.values():
        read_rows(path)  # opens the file, so that a missing one is an error here
    return [(split, split_slice(path)[0].name, partial(read_rows, path, BATCH_ROWS)) for split, path in given.items()]
