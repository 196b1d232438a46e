"""Rows of levels and of prompts: slime's worked examples, its traps, and every kind of row that is no level."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from PIL import Image

from geo_sokoban_pipeline.config.base import ParameterError, validate_parameters
from geo_sokoban_pipeline.config.data import ImageLimits
from geo_sokoban_pipeline.envs.images import png_data_uri, read_data_uri
from geo_sokoban_pipeline.envs.rows import read_rows
from geo_sokoban_pipeline.envs.sokoban.board import Board
from geo_sokoban_pipeline.envs.sokoban.config import SokobanDataOptions
from geo_sokoban_pipeline.envs.sokoban.data import (
    BRIEF,
    FULL,
    LEGEND,
    PROMPTS,
    RAW_LEVELS,
    level_from_processed,
    level_from_raw,
    level_from_text,
    prompt_row,
    raw_level_row,
    strip_chat_marks,
    with_solution_length,
)
from geo_sokoban_pipeline.envs.sokoban.drawing import render
from geo_sokoban_pipeline.envs.sokoban.env import build_env

GRID = " # \t # \t # \t # \t # \n # \t P \t X \t O \t # \n # \t _ \t _ \t _ \t # \n # \t # \t # \t # \t # "
RAW = (
    "<|im_start|>user\nYou are a Sokoban solver.\nGoal: Push all boxes (X) onto targets (O).\n\n"
    "Symbols:\n# Wall | _ Floor | O Target | X Box | P You\n\n"
    "Rules:\n1. Push boxes (can't pull).\n2. Avoid walls (#).\n\n"
    f"[Current Observation]:\n{GRID}\nDecide the next action:\n"
    "Always output: <think> [Your thoughts] </think>. <|im_end|>\n"
    "<|im_start|>assistant\n<think>"
)
EXACT = SokobanDataOptions.slime_exact()
PUBLISHED = SokobanDataOptions(instruction="full", cell_px=64)


def raw_row(**changes):
    return {"id": "train_0", "prompt": [{"role": "user", "content": RAW}], "ability": "bfs", **changes}


def with_grid(grid):
    return raw_row(prompt=RAW.replace(GRID, grid))


def image(size=(8, 8), form="PNG"):
    buffer = io.BytesIO()
    Image.new("RGB", size).save(buffer, format=form)
    return buffer.getvalue()


def processed_row(**changes):
    config = Board.from_text(GRID).to_env_config()
    row = {"prompt": "see <image>", "images": [png_data_uri(image())], "extra_info": {"env_config": config}}
    return {**row, **changes}


def convert(row, options):
    return prompt_row(raw_level_row(level_from_raw(row, row["id"], "test"), "train", "layout"), options)


def test_text_of_the_original_and_ours():
    rows = [convert(raw_row(), options) for options in (EXACT, PUBLISHED)]
    assert [(row["id"], row["ability"]) for row in rows] == [("train_0", "bfs")] * 2
    exact, ours = (row["prompt"] for row in rows)
    assert exact.startswith("<|im_start|>user\n") and exact.endswith("<think>")
    assert LEGEND.format(wall_symbol=" (#)") in exact
    assert "boxes (X)" in exact and "Symbols:" not in exact
    assert ours.startswith("You are a Sokoban solver.\nGoal: Push all boxes onto targets.")
    assert ours.endswith(
        "[Current Observation]:\n<image>\nDecide the next action:\nAlways output: <think> [Your thoughts] </think>."
    )
    assert LEGEND.format(wall_symbol="") in ours
    assert "#" not in ours and "<|im" not in ours


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("plain <think> [t] </think>", "plain <think> [t] </think>"),
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>", "hi"),
        ("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi\n<|im_end|>\n", "hi"),
        ("<|im_start|>user\nno end", "no end"),
        ("no start<|im_end|>\n<|im_start|>assistant\n<think>\n", "no start"),
    ],
)
def test_chat_marks(text, said):
    assert strip_chat_marks(text) == said
    assert strip_chat_marks(said) == said


NO_RAW_LEVELS = [
    (raw_row(prompt=None), "prompt is None; a text"),
    (raw_row(prompt=[]), "prompt is a list"),
    (raw_row(prompt=7), "prompt is an int"),
    (raw_row(prompt=[{"role": "user"}]), "prompt is a list"),
    (raw_row(prompt="Push the boxes."), "no observation block"),
    (with_grid(""), "empty"),
    (with_grid("# # #\n# P"), "ragged"),
    (with_grid("# # #\n# P ?\n# # #"), "unknown symbol '?'"),
    (with_grid("# # #\n# _ #\n# X #"), "no player"),
    (with_grid("# P P #"), "2 players"),
    (raw_row(prompt=RAW + "<image>"), "beside a text grid"),
    (raw_row(prompt=RAW + "\ud800"), "surrogates"),
    (raw_row(note="\ud800"), "surrogates"),
]
NO_PROCESSED_LEVELS = [
    (processed_row(prompt=None), "prompt is None; a text"),
    (processed_row(extra_info=None), "env_config is missing"),
    (processed_row(extra_info={"env_config": {"grid_size": [4, 5]}}), "initial_base_grid"),
    (
        processed_row(extra_info={"env_config": {"initial_base_grid": 5, "initial_boxes": [], "initial_player": []}}),
        "malformed",
    ),
    (processed_row(images=None), "images is None"),
    (processed_row(images=[]), "images is a list"),
    (processed_row(images=[{"bytes": b"", "path": None}]), "image is a dict"),
    (processed_row(images=["http://example.com/a.png"]), "remote and local images are not read"),
    (processed_row(images=["/etc/passwd"]), "remote and local images are not read"),
    (processed_row(images=["data:image/png,raw"]), "not base64"),
    (processed_row(images=["data:image/png;base64,@@@@"]), "not valid base64"),
    (processed_row(images=[png_data_uri(b"nonsense")]), "cannot be decoded"),
    (processed_row(images=[png_data_uri(image()[:45])]), "cannot be decoded"),
    (
        processed_row(images=[png_data_uri(image((300, 400)))]),
        "300×400 pixels, more than limits.max_pixels=100000",
    ),
    (processed_row(images=[png_data_uri(image() + bytes(30_000))]), "more than limits.max_bytes=20000"),
    (processed_row(images=processed_row()["images"] * 2), "2 images, but prompt holds <image> 1 times"),
]
LIMITS = ImageLimits(max_bytes=20_000, max_pixels=100_000)


@pytest.mark.parametrize(
    ("read", "row", "reason"),
    [(partial(level_from_raw, row_id="a", source="test"), *case) for case in NO_RAW_LEVELS]
    + [
        (partial(level_from_processed, row_id="a", source="test", limits=LIMITS), *case) for case in NO_PROCESSED_LEVELS
    ],
)
def test_rows_that_are_no_level(read, row, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        read(row)


@pytest.mark.parametrize("media", ["image/png", "image/None", "image/jpeg"])
def test_processed_rows_are_levels(media):
    own = f"data:{media};base64," + base64.b64encode(image(form="JPEG" if "jpeg" in media else "PNG")).decode()
    level = level_from_processed(processed_row(images=[own], weight=3), "row_4", "test", ImageLimits())
    assert (level.board, level.row_id, level.columns) == (Board.from_text(GRID), "row_4", {"weight": 3})
    raw = raw_level_row(level, "train", "layout")
    kept = prompt_row(raw, SokobanDataOptions(pictures="keep", instruction="full"))
    assert (kept["images"], kept["prompt"], kept["weight"]) == ([own], "see <image>", 3)
    assert prompt_row(raw, SokobanDataOptions())["images"] != [own]


@pytest.mark.parametrize(
    ("grid", "states", "length"),
    [
        ("# # # # #\n# P X O #\n# # # # #", 100, 1),
        ("# # # # #\n# P X O #\n# # # # #", 0, None),
        ("########\n#@$   .#\n#  $ . #\n#      #\n########", 2, None),  # beyond the solver, and kept
    ],
)
def test_solution_length(grid, states, length):
    assert with_solution_length(level_from_text(grid, "a", "t"), states).solution_length == length


@pytest.mark.parametrize(
    ("grid", "reason"), [("#####\n#@*##\n#####", "solved at its start"), ("######\n#$ @.#\n######", "no solution")]
)
def test_nothing_to_play(grid, reason):
    with pytest.raises(ValueError, match=reason):
        with_solution_length(level_from_text(grid, "a", "t"), 100)


@pytest.mark.parametrize("options", [EXACT, PUBLISHED])
def test_all_real_rows_convert(shared_data, options):
    rows = [convert(row, options) for _, row in read_rows(str(shared_data / "sokoban_raw_sample.parquet"))]
    assert len(rows) == 400
    assert {row["prompt"].count("<image>") for row in rows} == {1}
    assert {row["prompt"] for row in rows} == {rows[0]["prompt"]}
    assert all(row["images"][0].startswith("data:image/png;base64,iVBOR") for row in rows)
    assert all(Board.from_env_config(row["extra_info"]["env_config"]).to_xsb() == row["level_xsb"] for row in rows)
    assert {row["ability"] for row in rows} == {"bfs"}


# Rows of sokoban.prompts: the published columns, our own, and images that the environment would show.

LEVEL = "######\n#@   #\n# $ .#\n######"


def raw_level(columns=None):
    level = level_from_text(LEVEL, "train_00001", "generate", columns)
    return raw_level_row(replace(level, solution_length=4, seed=9), "eval", "layout")


@pytest.mark.parametrize("cell_px", [8, 16, 64])
def test_row(cell_px):
    given = raw_level({"difficulty": "hard", "split": "test", "n": [1, {"a": None}]})
    row = prompt_row(given, SokobanDataOptions(max_steps=12, cell_px=cell_px))
    assert set(raw_level()) == set(RAW_LEVELS.names)
    assert set(row) == {*PROMPTS.names, "difficulty", "source_split", "n"}
    board = Board.from_text(LEVEL)
    assert row["level_xsb"] == LEVEL
    assert (row["level_hash"], row["layout_hash"]) == (board.canonical_hash, board.layout_hash)
    assert (row["id"], row["split"], row["split_rule"], row["solution_length"]) == ("train_00001", "eval", "layout", 4)
    assert row["data_source"] == "sokoban_4x6_1box"
    assert row["extra_info"]["env_config"]["max_steps"] == 12
    assert Board.from_env_config(row["extra_info"]["env_config"]) == board
    # Other columns pass through, and those of our names are renamed.
    assert (row["difficulty"], row["source_split"], row["n"]) == ("hard", "test", [1, {"a": None}])
    image = read_data_uri(row["images"][0], max_bytes=1 << 20, max_pixels=1 << 20)
    assert np.array_equal(np.asarray(image), np.asarray(render(board, cell_px)))


@pytest.mark.parametrize(
    ("instruction", "text"), [("brief", BRIEF), ("full", FULL), ("Where to? <image> Go:", "Where to? <image> Go:")]
)
def test_instruction(instruction, text):
    assert prompt_row(raw_level(), SokobanDataOptions(instruction=instruction))["prompt"] == text
    assert text.count("<image>") == 1


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"instruction": "short"}, "sokoban.instruction=\"short\": 'short' is neither brief nor full"),
        ({"instruction": "<image><image>"}, "must hold <image> once"),
        ({"inner_walls": [3, 1]}, "inner_walls: the lower bound 3 is above the upper bound 1"),
        ({"min_solution": 9}, "solution: the lower bound 9 is above the upper bound 8"),
        ({"source": "file"}, "source=file needs file.path"),
        ({"source": "gnerate"}, "Did you mean generate?"),
        ({"counts": {"test": 4}}, "sokoban.counts.test=4: unknown name"),
        ({"shares": {"train": 0.5}}, "shares add up to 0.83"),
        ({"cell_px": 4}, "sokoban.cell_px=4"),
    ],
)
def test_parameters_that_cannot_be_used(parameters, message):
    with pytest.raises(ParameterError, match=re.escape(message)):
        validate_parameters(parameters, SokobanDataOptions, prefix="sokoban")


@pytest.mark.parametrize(
    ("instruction", "begins", "ends"),
    [
        ("brief", "######\n#P___#\n#_X_O#\n######\n<answer>Up", "|Right</answer>"),
        ("full", "You are playing Sokoban.", "with no text besides."),
        ("Where to?\n<image>\nGo:", "Where to?\n######\n#P___#", "######\nGo:"),
    ],
)
def test_boards_as_text(instruction, begins, ends):
    row = prompt_row(raw_level(), SokobanDataOptions(instruction=instruction, observation="text"))
    assert row["images"] == [] and "<image>" not in row["prompt"]
    assert row["prompt"].startswith(begins) and row["prompt"].endswith(ends)
    assert "red brick" not in row["prompt"]
    env = build_env(row, {"observation_style": "brief"})
    assert env.reset()[0] == {"obs_str": "######\n#P___#\n#_X_O#\n######\nNext?"}
    assert env.step("<answer>Right</answer>")[0] == {"obs_str": "######\n#_P__#\n#_X_O#\n######\nNext?"}
    if instruction == "full":
        assert "[Current Observation]:\n" + Board.from_text(LEVEL).to_symbols() in row["prompt"]
        assert "# wall | _ floor | O target" in row["prompt"]


def test_raw_rows_keep_the_grid_of_their_own_text():
    grid = Board.from_text(LEVEL).to_symbols()
    text = f"Symbols: # wall, avoid walls.\n[Current Observation]:\n{grid}\nDecide the next action:\nGo."
    marked = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n<think>"
    row = prompt_row({**raw_level(), "prompt": marked}, SokobanDataOptions(instruction="full", observation="text"))
    assert (row["prompt"], row["images"]) == (text, [])


def test_prompts_of_text_are_a_processed_file_too():
    row = prompt_row(raw_level(), SokobanDataOptions(observation="text"))
    level = level_from_processed(row, "a", "prompts.parquet", ImageLimits())
    assert (level.board, level.images) == (Board.from_text(LEVEL), ())
    with pytest.raises(ValueError, match="a non-empty list of data: URIs"):
        level_from_processed({**prompt_row(raw_level(), SokobanDataOptions()), "images": []}, "a", "x", ImageLimits())
