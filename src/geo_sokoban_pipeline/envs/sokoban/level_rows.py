"""A level with all that its source told about it.

Whatever a row holds beside the level is kept as JSON values, so a table of levels can always be saved and read again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from geo_sokoban_pipeline.envs.sokoban.board import Board


@dataclass(frozen=True)
class LevelRow:
    """A level with all that its source told about it.

    Attributes:
        row_id: the row's own id, or its place in the source.
        source: generate, a hub id, or a file's name.
        data_source: name of the data set as published rows give it.
        board: the start position.
        prompt: the row's own text with the grid or `<image>`; None for a level without one.
        images: the row's own pictures; None for a level without.
        columns: all other columns, JSON values.
        seed: what a generated level was drawn from; None for levels that were read.
        solution_length: fewest moves; None where the solver met its limit or was not asked.
        copies: rows that this level stands for.
    """

    row_id: str
    source: str
    data_source: str
    board: Board
    prompt: str | None = None
    images: tuple[str, ...] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    solution_length: int | None = None
    copies: int = 1


def raw_level_row(level: LevelRow, split: str, split_rule: str) -> dict[str, Any]:
    """Row of `sokoban.raw_levels`."""
    return {
        "row_id": level.row_id,
        "source": level.source,
        "data_source": level.data_source,
        "level_xsb": level.board.to_xsb(),
        "prompt": level.prompt,
        "images": None if level.images is None else list(level.images),
        "columns": json.dumps(level.columns, ensure_ascii=False),
        "seed": level.seed,
        "solution_length": level.solution_length,
        "level_hash": level.board.canonical_hash,
        "layout_hash": level.board.layout_hash,
        "copies": level.copies,
        "split": split,
        "split_rule": split_rule,
    }


def data_source_name(board: Board) -> str:
    """Name in the manner of the published rows, such as `sokoban_6x6_1box`."""
    return f"sokoban_{board.height}x{board.width}_{len(board.boxes)}box"
