"""Rows of `sokoban.prompts`: the columns of the published `sokoban_processed`, our own, and others passed through.

The picture of a row is the one that the environment shows at its reset with the same `cell_px`. With
`observation=text` the board stands in the prompt instead, and the environment goes on with text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from geo_sokoban_pipeline.envs.data_uris import png_data_uri
from geo_sokoban_pipeline.envs.sokoban.board import Board
from geo_sokoban_pipeline.envs.sokoban.preprocess import LEGEND, PLACEHOLDER, picture_text, strip_chat_marks
from geo_sokoban_pipeline.envs.sokoban.render import render_png
from geo_sokoban_pipeline.options.sokoban import SokobanDataOptions

BRIEF = f"{PLACEHOLDER}<answer>Up|Down|Left|Right</answer>"

FULL = f"""You are playing Sokoban.

Goal: push every box onto a target.

{LEGEND.format(wall_symbol="")}

Answers:
<answer> Up </answer> | <answer> Down </answer> | <answer> Left </answer> | <answer> Right </answer>

[Current Observation]:
{PLACEHOLDER}
Decide the next action:
Think inside <think> </think>, then give your move inside <answer> </answer>, with no text besides."""

GRID_LEGEND = """Symbols:
# wall | _ floor | O target | X box | √ box on target | P you | S you on target

Rules:
1. Push boxes (can't pull).
2. Avoid walls."""

# Columns that the prompts table sets itself; a source's column of the same name is kept as `source_<name>`.
_OWN = frozenset(
    ("id", "prompt", "images", "extra_info", "data_source", "level_xsb", "level_hash", "layout_hash")
    + ("solution_length", "split", "split_rule")
)


def prompt_row(raw: Mapping[str, Any], options: SokobanDataOptions) -> dict[str, Any]:
    """Processed row of a row of `sokoban.raw_levels`.

    Args:
        raw: one record of the table, None for missing values.
        options: instruction, picture and text rules.
    """
    board = Board.from_text(raw["level_xsb"])
    columns = json.loads(raw["columns"])
    return {
        **{f"source_{name}" if name in _OWN else name: value for name, value in columns.items()},
        "id": raw["row_id"],
        "prompt": instruction_text(raw["prompt"], options, board),
        "images": row_images(board, raw["images"], options),
        "extra_info": {"env_config": env_config(board, options)},
        "data_source": raw["data_source"],
        "level_xsb": raw["level_xsb"],
        "level_hash": raw["level_hash"],
        "layout_hash": raw["layout_hash"],
        "solution_length": raw["solution_length"],
        "split": raw["split"],
        "split_rule": raw["split_rule"],
    }


def instruction_text(own: str | None, options: SokobanDataOptions, board: Board) -> str:
    """The prompt with `<image>` where the board goes, or with the board as text.

    Args:
        own: the row's own text; used for `instruction=full`.
    """
    if options.observation == "text":
        return _text_instruction(own, options, board)
    if options.instruction == "brief":
        return BRIEF
    if options.instruction != "full":
        return options.instruction
    if own is None:
        return FULL
    return picture_text(own, strip_chat_markup=options.strip_chat_markup, consistent_legend=options.consistent_legend)


def _text_instruction(own: str | None, options: SokobanDataOptions, board: Board) -> str:
    if options.instruction == "full" and own is not None and PLACEHOLDER not in own:
        return strip_chat_marks(own) if options.strip_chat_markup else own  # raw rows hold the grid themselves
    if options.instruction == "full":
        return FULL.replace(LEGEND.format(wall_symbol=""), GRID_LEGEND).replace(PLACEHOLDER, board.to_symbols())
    text = BRIEF.replace(PLACEHOLDER, f"{PLACEHOLDER}\n") if options.instruction == "brief" else options.instruction
    return text.replace(PLACEHOLDER, board.to_grid())


def row_images(board: Board, own: list[str] | None, options: SokobanDataOptions) -> list[str]:
    """Data URIs of a row: its own where they are to be kept, else the board drawn at `cell_px`; none for text."""
    if options.observation == "text":
        return []
    if own and options.pictures == "keep":
        return list(own)
    return [png_data_uri(render_png(board, options.cell_px))]


def env_config(board: Board, options: SokobanDataOptions) -> dict[str, Any]:
    """The seed's `env_config` of a level, boxes sorted; `render_mode` tells the environment what to show."""
    render_mode = "text" if options.observation == "text" else "vision"
    return board.to_env_config(max_steps=options.max_steps, render_mode=render_mode, wall_fraction=0.0)
