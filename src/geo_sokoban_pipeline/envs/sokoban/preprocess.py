"""Raw rows become levels: text, grid and pictures are checked here, and nowhere later.

A row either gives a `LevelRow` whose board is playable, or a `ValueError` whose message is the reason kept in
`sokoban.rejected`. The rules are the seed's converter; its traps (chat markup inside the prompt, legends of symbols
that a picture does not show, boxes in set order) are removed unless an option asks for the original.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from geo_sokoban_pipeline.envs.data_uris import read_data_uri
from geo_sokoban_pipeline.envs.row_values import check_unicode, json_columns
from geo_sokoban_pipeline.envs.sokoban.board import Board
from geo_sokoban_pipeline.envs.sokoban.collection import classic_rows
from geo_sokoban_pipeline.envs.sokoban.level_rows import LevelRow, data_source_name
from geo_sokoban_pipeline.envs.sokoban.solver import SearchLimitError, solve
from geo_sokoban_pipeline.options.data import ImageLimits

PLACEHOLDER = "<image>"
OBSERVATION = re.compile(r"\[Current Observation\]:[ \t]*\n(?P<grid>.*?)\nDecide the next action:", re.DOTALL)
SYMBOLS_BLOCK = re.compile(r"Symbols:.*?[Aa]void walls[^\n]*", re.DOTALL)
_SYMBOL_NOTE = re.compile(r"[ \t]*\([#_OX√PS]\)")
_USER_TURN = re.compile(r"<\|im_start\|>user\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)
_CHAT_MARK = re.compile(r"<\|im_start\|>\w*\n?|<\|im_end\|>")
_OPEN_THINK = re.compile(r"<\|im_start\|>assistant\s*<think>\s*\Z")

LEGEND = """Picture:
Wall: red brick with light mortar | Floor: black tile | Target: red-outlined square with a red diamond | \
Box: yellow crate with an orange X | You: bright green alien

Rules:
1. Push boxes (can't pull).
2. Avoid walls{wall_symbol}."""


def level_from_raw(row: Mapping[str, Any], number: int, source: str) -> LevelRow:
    """Level of a row in the schema of `Xiaofeng77/sokoban`: the grid stands in the prompt.

    Args:
        row: prompt (a text or a non-empty list of chat messages), any other columns.
        number: place of the row in its source, its id where it has none.
        source: for the record.

    Raises:
        ValueError: prompt of another shape, no observation block, or a grid that `Board.from_text` refuses.
    """
    text = extract_text(row.get("prompt"))
    board = Board.from_text(find_grid(text))
    return _level_row(row, number, source, board, text, None)


def level_from_processed(row: Mapping[str, Any], number: int, source: str, limits: ImageLimits) -> LevelRow:
    """Level of a row in the schema of `sokoban_processed`: the grid stands in `extra_info.env_config`.

    Raises:
        ValueError: no env_config or one that `Board.from_env_config` refuses, a picture that is remote, too large or
            unreadable, or as many `<image>` in the text as there are not pictures.
    """
    text = extract_text(row.get("prompt"))
    info = row.get("extra_info")
    config = info.get("env_config") if isinstance(info, Mapping) else None
    if not isinstance(config, Mapping):
        raise ValueError("extra_info.env_config is missing; it holds the level")
    board = _board_of_config(config)
    images = row.get("images")
    shown = config.get("render_mode") != "text"
    if not isinstance(images, Sequence) or isinstance(images, str) or (shown and not images):
        raise ValueError(f"images is {type(images).__name__}; a non-empty list of data: URIs is expected")
    for uri in images:
        read_data_uri(uri, max_bytes=limits.max_bytes, max_pixels=limits.max_pixels)
    if text.count(PLACEHOLDER) != len(images):
        raise ValueError(f"{len(images)} images, but prompt holds {PLACEHOLDER} {text.count(PLACEHOLDER)} times")
    return _level_row(row, number, source, board, text, tuple(images))


def level_from_text(text: str, row_id: str, source: str, columns: Mapping[str, Any] | None = None) -> LevelRow:
    """Level of a text in XSB, its forms of `classic_rows` included, or in the data set's symbols.

    Raises:
        ValueError: as `classic_rows` and `Board.from_text`.
    """
    board = Board.from_text(classic_rows(text))
    return LevelRow(row_id, source, data_source_name(board), board, columns=json_columns(columns or {}))


def with_solution_length(level: LevelRow, max_states: int) -> LevelRow:
    """The level with the length of its shortest solution; unknown where the search meets its limit.

    Args:
        max_states: limit of the search; 0 leaves the length unknown.

    Raises:
        ValueError: the level is solved already, or proven to have no solution.
    """
    if level.board.is_solved:
        raise ValueError("level is solved at its start; nothing is left to play")
    if max_states == 0:
        return level
    try:
        actions = solve(level.board, max_states)
    except SearchLimitError:
        return level
    if actions is None:
        raise ValueError("level has no solution")
    return replace(level, solution_length=len(actions))


def extract_text(prompt: Any) -> str:
    """Text of a prompt: the text itself, or the content of the first of its chat messages.

    Raises:
        ValueError: any other shape.
    """
    if isinstance(prompt, str):
        return check_unicode(prompt)
    if (
        isinstance(prompt, Sequence)
        and prompt
        and isinstance(prompt[0], Mapping)
        and isinstance(prompt[0].get("content"), str)
    ):
        return check_unicode(prompt[0]["content"])
    raise ValueError(f"prompt is {_shape(prompt)}; a text or a non-empty list of chat messages with text is expected")


def find_grid(text: str) -> str:
    """Text grid between `[Current Observation]:` and `Decide the next action:`.

    Raises:
        ValueError: there is no such block, or the text holds `<image>` already.
    """
    found = OBSERVATION.search(text)
    if found is None:
        raise ValueError("prompt has no observation block ('[Current Observation]:', grid, 'Decide the next action:')")
    if PLACEHOLDER in text:
        raise ValueError(f"prompt holds {PLACEHOLDER} beside a text grid; it must be one or the other")
    return found["grid"]


def picture_text(text: str, *, strip_chat_markup: bool = True, consistent_legend: bool = True) -> str:
    """The prompt for a picture: grid and symbol legend make way for `<image>` and a legend of the picture.

    Args:
        text: a raw prompt, or one that has been through here before, which then only loses what the options remove.
        strip_chat_markup: keep only what the user says, without chat marks and the open think tag behind it.
        consistent_legend: remove `(#)` and the like, which name symbols that the picture does not show.
    """
    if strip_chat_markup:
        text = strip_chat_marks(text)
    legend = LEGEND.format(wall_symbol="" if consistent_legend else " (#)")
    text = SYMBOLS_BLOCK.sub(lambda _: legend, text, count=1)
    if PLACEHOLDER not in text:
        text = OBSERVATION.sub(f"[Current Observation]:\n{PLACEHOLDER}\nDecide the next action:", text, count=1)
    return _SYMBOL_NOTE.sub("", text) if consistent_legend else text


def strip_chat_marks(text: str) -> str:
    """What the user says in a prompt that holds its own chat markup; other texts come back unchanged."""
    if "<|im_start|>" not in text and "<|im_end|>" not in text:
        return text
    turn = _USER_TURN.search(text)
    said = turn[1] if turn else _CHAT_MARK.sub("", _OPEN_THINK.sub("", text))
    return said.strip()


def _level_row(
    row: Mapping[str, Any], number: int, source: str, board: Board, text: str, images: tuple[str, ...] | None
) -> LevelRow:
    known = ("id", "data_source", "prompt", "images", "extra_info")
    columns = json_columns({name: value for name, value in row.items() if name not in known})
    row_id = f"row_{number}" if row.get("id") is None else str(row["id"])
    return LevelRow(
        row_id, source, str(row.get("data_source") or data_source_name(board)), board, text, images, columns
    )


def _board_of_config(config: Mapping[str, Any]) -> Board:
    try:
        return Board.from_env_config(dict(config))
    except (TypeError, OverflowError) as error:
        raise ValueError(f"extra_info.env_config is malformed: {error}") from error


def _shape(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:60]!r}"
