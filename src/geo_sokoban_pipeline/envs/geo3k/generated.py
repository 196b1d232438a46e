"""Generated problems as raw rows: question behind `<image>`, drawing, label, and what the generator knows besides."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from geo_sokoban_pipeline.envs.geo3k.problems.generation import ProblemsExhaustedError, generate_splits
from geo_sokoban_pipeline.envs.geo3k.problems.problem import Problem
from geo_sokoban_pipeline.envs.geo3k.problems.render import render_layout_png
from geo_sokoban_pipeline.envs.geo3k.texts import PLACEHOLDER
from geo_sokoban_pipeline.envs.splits import SPLITS
from geo_sokoban_pipeline.options.geo3k import Geo3kDataOptions
from geo_sokoban_pipeline.row_stream import Row


def draw_problems(options: Geo3kDataOptions, section: str) -> Callable[[], Iterator[Row]]:
    """Draw the problems of all splits; their pictures are made when the rows are walked through.

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
        raise ProblemsExhaustedError(f"{section}.counts={counts}: {error}", error.problems) from error

    def rows() -> Iterator[Row]:
        for split in SPLITS:
            for number, problem in enumerate(drawn[split]):
                yield _raw_row(problem, split, number)

    return rows


def _raw_row(problem: Problem, split: str, number: int) -> Row:
    known = {
        "family": problem.family,
        "difficulty": problem.difficulty,
        "numbers": dict(problem.numbers),
        "candidates": [{"rule": one.rule, "label": one.label} for one in problem.candidates],
        "seed": problem.seed,
    }
    return {
        "row_id": f"{split}_{number:05d}",
        "source": "generate",
        "source_split": split,
        # Not `problem.png`, which the problem would keep.
        "images": [{"bytes": render_layout_png(problem.layout), "path": None}],
        "problem": f"{PLACEHOLDER}{problem.question}",
        "answer": problem.label,
        "columns": json.dumps(known),
        "error": None,
    }
