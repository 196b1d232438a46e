"""Sokoban data: the schemas of the tables, and how a raw row becomes a level, a split and a prompt.

Text, grid and images of a row are checked here and nowhere later.
"""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import pyarrow as pa

from geo_sokoban_pipeline.config.data import ImageLimits, SplitCounts, SplitShares
from geo_sokoban_pipeline.envs.images import png_data_uri, read_data_uri
from geo_sokoban_pipeline.envs.rows import SPLITS, check_unicode, json_columns, share_out, wanted_splits
from geo_sokoban_pipeline.envs.sokoban.board import Board
from geo_sokoban_pipeline.envs.sokoban.collection import classic_rows
from geo_sokoban_pipeline.envs.sokoban.config import SokobanDataOptions
from geo_sokoban_pipeline.envs.sokoban.drawing import render_png
from geo_sokoban_pipeline.envs.sokoban.solver import SearchLimitError, solve
from geo_sokoban_pipeline.formats import type_name
from geo_sokoban_pipeline.seeding import python_generator

ENV_CONFIG = pa.struct(
    [
        ("grid_size", pa.list_(pa.int64())),
        ("num_boxes", pa.int64()),
        ("render_mode", pa.string()),
        ("max_steps", pa.int64()),
        ("wall_fraction", pa.float64()),
        ("initial_base_grid", pa.list_(pa.list_(pa.int64()))),
        ("initial_boxes", pa.list_(pa.list_(pa.int64()))),
        ("initial_player", pa.list_(pa.int64())),
    ]
)

RAW_LEVELS = pa.schema(
    [
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),  # generate, a hub id, or a file's name
        pa.field("data_source", pa.string(), nullable=False),  # name of the dataset, as in the published rows
        pa.field("level_xsb", pa.string(), nullable=False),
        pa.field("prompt", pa.string()),  # the row's own text; null for levels without one
        pa.field("images", pa.list_(pa.string())),  # the row's own images; null for levels without
        pa.field("columns", pa.string(), nullable=False),  # JSON object of all other columns
        pa.field("seed", pa.int64()),  # null for levels of a file or the hub
        pa.field("solution_length", pa.int32()),  # optimal length; null if the solver did not finish
        pa.field("level_hash", pa.string(), nullable=False),
        pa.field("layout_hash", pa.string(), nullable=False),
        pa.field("copies", pa.int32(), nullable=False),  # rows of this level in the source
        pa.field("split", pa.string(), nullable=False),
        pa.field("split_rule", pa.string(), nullable=False),  # layout or level: no two splits share one
    ]
)

PROMPTS = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("images", pa.list_(pa.string()), nullable=False),
        pa.field("extra_info", pa.struct([("env_config", ENV_CONFIG)]), nullable=False),
        pa.field("data_source", pa.string(), nullable=False),
        pa.field("level_xsb", pa.string(), nullable=False),
        pa.field("level_hash", pa.string(), nullable=False),
        pa.field("layout_hash", pa.string(), nullable=False),
        pa.field("solution_length", pa.int32()),
        pa.field("split", pa.string(), nullable=False),
        pa.field("split_rule", pa.string(), nullable=False),
    ]
)

REJECTED = pa.schema(
    [
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("raw", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
    ]
)

# Levels.


@dataclass(frozen=True)
class LevelRow:
    """A level with all columns of its source.

    Attributes:
        row_id: the row's own id, or its place in the source.
        source: generate, a hub id, or a file's name.
        data_source: name of the data set as published rows give it.
        board: the start position.
        prompt: the row's own text with the grid or `<image>`; None for a level without one.
        images: the row's own images; None for a level without.
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


# Raw rows become levels: text, grid and images are checked here, and nowhere later.


PLACEHOLDER = "<image>"
OBSERVATION = re.compile(r"\[Current Observation\]:[ \t]*\n(?P<grid>.*?)\nDecide the next action:", re.DOTALL)
SYMBOLS_BLOCK = re.compile(r"Symbols:.*?[Aa]void walls[^\n]*", re.DOTALL)
_SYMBOL_NOTE = re.compile(r"[ \t]*\([#_OX√PS]\)")
_USER_TURN = re.compile(r"<\|im_start\|>user\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)
_CHAT_MARK = re.compile(r"<\|im_start\|>\w*\n?|<\|im_end\|>")
_OPEN_THINK = re.compile(r"<\|im_start\|>assistant\s*<think>\s*\Z")

LEGEND = """Image:
Wall: red brick with light mortar | Floor: black tile | Target: red-outlined square with a red diamond | \
Box: yellow crate with an orange X | You: bright green alien

Rules:
1. Push boxes (can't pull).
2. Avoid walls{wall_symbol}."""


def level_from_raw(row: Mapping[str, Any], row_id: str, source: str) -> LevelRow:
    """Level of a row in the schema of `Xiaofeng77/sokoban`: the grid stands in the prompt.

    Args:
        row: prompt (a text or a non-empty list of chat messages), any other columns.
        row_id: of the row.
        source: for the record.

    Raises:
        ValueError: prompt of another shape, no observation block, or a grid that `Board.from_text` refuses.
    """
    text = extract_text(row.get("prompt"))
    return _level_row(row, row_id, source, Board.from_text(find_grid(text)), text, None)


def level_from_processed(row: Mapping[str, Any], row_id: str, source: str, limits: ImageLimits) -> LevelRow:
    """Level of a row in the schema of `sokoban_processed`: the grid stands in `extra_info.env_config`.

    Raises:
        ValueError: no env_config or one that `Board.from_env_config` refuses, an image that is remote, too large or
            unreadable, or as many `<image>` in the text as there are not images.
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
        raise ValueError(f"images is {type_name(images)}; a non-empty list of data: URIs is expected")
    for uri in images:
        read_data_uri(uri, max_bytes=limits.max_bytes, max_pixels=limits.max_pixels)
    if text.count(PLACEHOLDER) != len(images):
        raise ValueError(f"{len(images)} images, but prompt holds {PLACEHOLDER} {text.count(PLACEHOLDER)} times")
    return _level_row(row, row_id, source, board, text, tuple(images))


def level_from_text(text: str, row_id: str, source: str, columns: Mapping[str, Any] | None = None) -> LevelRow:
    """Level of a text in XSB, its forms of `classic_rows` included, or in the dataset's symbols.

    Raises:
        ValueError: as `classic_rows` and `Board.from_text`.
    """
    board = Board.from_text(classic_rows(text))
    return LevelRow(row_id, source, data_source_name(board), board, columns=json_columns(columns or {}))


def with_solution_length(level: LevelRow, max_states: int) -> LevelRow:
    """The level with the length of its shortest solution; unknown if the search reaches its limit.

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
    shown = type_name(prompt) if prompt is None else f"{type_name(prompt)} {str(prompt)[:60]!r}"
    raise ValueError(f"prompt is {shown}; a text or a non-empty list of chat messages with text is expected")


def find_grid(text: str) -> str:
    """Text grid between `[Current Observation]:` and `Decide the next action:`.

    Raises:
        ValueError: there is no such block, or the text holds `<image>` already.
    """
    if (found := OBSERVATION.search(text)) is None:
        raise ValueError("prompt has no observation block ('[Current Observation]:', grid, 'Decide the next action:')")
    if PLACEHOLDER in text:
        raise ValueError(f"prompt holds {PLACEHOLDER} beside a text grid; it must be one or the other")
    return found["grid"]


def image_text(text: str, *, strip_chat_markup: bool = True, consistent_legend: bool = True) -> str:
    """The prompt for an image: grid and symbol legend make way for `<image>` and a legend of the image.

    Args:
        text: a raw prompt, or one that has been through here before, which then only loses what the options remove.
        strip_chat_markup: keep only what the user says, without chat marks and the open think tag behind it.
        consistent_legend: remove `(#)` and the like, which name symbols that the image does not show.
    """
    if strip_chat_markup:
        text = strip_chat_marks(text)
    legend = LEGEND.format(wall_symbol="" if consistent_legend else " (#)")
    text = SYMBOLS_BLOCK.sub(lambda _: legend, text, count=1)
    if PLACEHOLDER not in text:
        text = OBSERVATION.sub(f"[Current Observation]:\n{PLACEHOLDER}\nDecide the next action:", text, count=1)
    return _SYMBOL_NOTE.sub("", text) if consistent_legend else text


def strip_chat_marks(text: str) -> str:
    """The user's message in a prompt with chat markup; other texts are returned unchanged."""
    if "<|im_start|>" not in text and "<|im_end|>" not in text:
        return text
    turn = _USER_TURN.search(text)
    return (turn[1] if turn else _CHAT_MARK.sub("", _OPEN_THINK.sub("", text))).strip()


def _level_row(
    row: Mapping[str, Any], row_id: str, source: str, board: Board, text: str, images: tuple[str, ...] | None
) -> LevelRow:
    known = ("id", "data_source", "prompt", "images", "extra_info")
    columns = json_columns({name: value for name, value in row.items() if name not in known})
    return LevelRow(
        row_id, source, str(row.get("data_source") or data_source_name(board)), board, text, images, columns
    )


def _board_of_config(config: Mapping[str, Any]) -> Board:
    try:
        return Board.from_env_config(dict(config))
    except (TypeError, OverflowError) as error:
        raise ValueError(f"extra_info.env_config is malformed: {error}") from error


# Rows of `sokoban.prompts`: the columns of the published `sokoban_processed`, our own, and others passed through.


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

# Columns that the prompts table sets itself; a source's column of the same name is stored as `source_<name>`.
_OWN = frozenset(
    ("id", "prompt", "images", "extra_info", "data_source", "level_xsb", "level_hash", "layout_hash")
    + ("solution_length", "split", "split_rule")
)


def prompt_row(raw: Mapping[str, Any], options: SokobanDataOptions) -> dict[str, Any]:
    """Processed row of a row of `sokoban.raw_levels`.

    Args:
        raw: one record of the table, None for missing values.
        options: instruction, image and text rules.
    """
    board = Board.from_text(raw["level_xsb"])
    columns = json.loads(raw["columns"])
    return {
        **{f"source_{name}" if name in _OWN else name: value for name, value in columns.items()},
        "id": raw["row_id"],
        "prompt": instruction_text(raw["prompt"], options, board),
        "images": row_images(board, raw["images"], options),
        "extra_info": {
            "env_config": board.to_env_config(
                max_steps=options.max_steps, render_mode="text" if options.observation == "text" else "vision"
            )
        },
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
    return image_text(own, strip_chat_markup=options.strip_chat_markup, consistent_legend=options.consistent_legend)


def _text_instruction(own: str | None, options: SokobanDataOptions, board: Board) -> str:
    if options.instruction == "full" and own is not None and PLACEHOLDER not in own:
        return strip_chat_marks(own) if options.strip_chat_markup else own  # raw rows hold the grid themselves
    if options.instruction == "full":
        return FULL.replace(LEGEND.format(wall_symbol=""), GRID_LEGEND).replace(PLACEHOLDER, board.to_symbols())
    text = BRIEF.replace(PLACEHOLDER, f"{PLACEHOLDER}\n") if options.instruction == "brief" else options.instruction
    return text.replace(PLACEHOLDER, board.to_grid())


def row_images(board: Board, own: list[str] | None, options: SokobanDataOptions) -> list[str]:
    """Data URIs of a row: its own with `pictures=keep`, else the board drawn at `cell_px`; none for text."""
    if options.observation == "text":
        return []
    if own and options.pictures == "keep":
        return list(own)
    return [png_data_uri(render_png(board, options.cell_px))]


# Splits: no wall layout (up to symmetry) is ever in two of them.


SplitRule = Literal["layout", "level"]
T = TypeVar("T")


def split_levels(
    levels: Sequence[LevelRow], shares: SplitShares, counts: SplitCounts, seed: int
) -> tuple[list[tuple[LevelRow, str]], SplitRule]:
    """Splits of levels that were read from a file or the hub.

    Args:
        levels: any levels; equal ones (`collapse=rows`) stay together.
        shares: parts of the layouts, or of the levels where there are fewer layouts than splits.
        counts: most levels of each split; the ones left out are chosen so that solution lengths stay spread.
        seed: of the data.

    Returns:
        (level, split) in the order of the levels, and the rule that was used.
    """
    rule: SplitRule = (
        "layout" if len({level.board.layout_hash for level in levels}) >= len(wanted_splits(shares)) else "level"
    )
    keys = [level.board.layout_hash if rule == "layout" else level.board.canonical_hash for level in levels]
    assigned = share_out(sorted(set(keys)), shares, python_generator(seed, "sokoban", "splits", rule))
    split_of = {key: split for split, members in assigned.items() for key in members}
    kept: set[int] = set()
    for split in SPLITS:
        members = [index for index, key in enumerate(keys) if split_of[key] == split]
        generator = python_generator(seed, "sokoban", "pick", split)
        kept.update(
            spread_by_length(members, [levels[i].solution_length for i in members], getattr(counts, split), generator)
        )
    return [(level, split_of[keys[index]]) for index, level in enumerate(levels) if index in kept], rule


def spread_by_length(
    items: Sequence[T], lengths: Sequence[int | None], count: int | None, generator: random.Random
) -> list[T]:
    """Choose items so that the numbers of each solution length are as equal as the items allow.

    Args:
        items: to choose from.
        lengths: solution length of each item; unknown ones form a class of their own.
        count: how many; None or more than there are: all.
    """
    if count is None or count >= len(items):
        return list(items)
    pools: dict[int, list[T]] = defaultdict(list)
    for item, length in zip(items, lengths, strict=True):
        pools[-1 if length is None else length].append(item)
    for length in sorted(pools):
        generator.shuffle(pools[length])
    chosen: list[T] = []
    while len(chosen) < count:
        for length in sorted(pools):
            if pools[length] and len(chosen) < count:
                chosen.append(pools[length].pop())
    return chosen


def collapse_rows(levels: Iterable[LevelRow], mode: str) -> list[LevelRow]:
    """Rows (state, next action) become levels.

    Args:
        levels: in the order of the source.
        mode: `levels` keeps the first state of each path (a row that the row before it leads to is part of its path),
            each once; `states` keeps every distinct state; `rows` keeps all.

    Returns:
        Levels, different under all symmetries but for `rows`; `copies` says how many rows each stands for.
    """
    if mode == "rows":
        return list(levels)
    counts: dict[str, int] = {}
    first: dict[str, LevelRow] = {}
    start, previous = "", None
    for level in levels:
        follows = mode == "levels" and previous is not None and leads_to(previous, level)
        if not follows:
            start = level.board.canonical_hash
            first.setdefault(start, level)
        counts[start] = counts.get(start, 0) + level.copies
        previous = level
    return [replace(level, copies=counts[key]) for key, level in first.items()]


def leads_to(before: LevelRow, after: LevelRow) -> bool:
    """Whether the labelled action of a row gives the board of the next one."""
    action = labelled_action(before.columns)
    return action is not None and before.board.move(action).board == after.board


def labelled_action(columns: Mapping[str, Any]) -> str | None:
    """The next action in `reward_model.ground_truth` (1 up, 2 down, 3 left, 4 right), None without such a label."""
    model = columns.get("reward_model")
    label = model.get("ground_truth") if isinstance(model, Mapping) else None
    number = label[0] if isinstance(label, list) and len(label) == 1 else label
    return {1: "up", 2: "down", 3: "left", 4: "right"}.get(number) if isinstance(number, int) else None
