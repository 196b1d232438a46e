"""Rows of sokoban.prompts: the published columns, our own, and images that the environment would show."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from geo_sokoban_pipeline.config.base import ParameterError, validate_parameters
from geo_sokoban_pipeline.config.data import ImageLimits
from geo_sokoban_pipeline.envs.images import read_data_uri
from geo_sokoban_pipeline.envs.sokoban.board import Board
from geo_sokoban_pipeline.envs.sokoban.config import SokobanDataOptions
from geo_sokoban_pipeline.envs.sokoban.data import (
    BRIEF,
    FULL,
    PROMPTS,
    RAW_LEVELS,
    level_from_processed,
    level_from_text,
    prompt_row,
    raw_level_row,
)
from geo_sokoban_pipeline.envs.sokoban.drawing import render
from geo_sokoban_pipeline.envs.sokoban.env import build_env

LEVEL = "######\n#@   #\n# $ .#\n######"


def raw(columns=None):
    level = level_from_text(LEVEL, "train_00001", "generate", columns)
    return raw_level_row(replace(level, solution_length=4, seed=9), "eval", "layout")


@pytest.mark.parametrize("cell_px", [8, 16, 64])
def test_row(cell_px):
    given = raw({"difficulty": "hard", "split": "test", "n": [1, {"a": None}]})
    row = prompt_row(given, SokobanDataOptions(max_steps=12, cell_px=cell_px))
    assert set(raw()) == set(RAW_LEVELS.names)
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
    assert prompt_row(raw(), SokobanDataOptions(instruction=instruction))["prompt"] == text
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
    with pytest.raises(ParameterError) as error:
        validate_parameters(parameters, SokobanDataOptions, prefix="sokoban")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("instruction", "begins", "ends"),
    [
        ("brief", "######\n#P___#\n#_X_O#\n######\n<answer>Up", "|Right</answer>"),
        ("full", "You are playing Sokoban.", "with no text besides."),
        ("Where to?\n<image>\nGo:", "Where to?\n######\n#P___#", "######\nGo:"),
    ],
)
def test_boards_as_text(instruction, begins, ends):
    row = prompt_row(raw(), SokobanDataOptions(instruction=instruction, observation="text"))
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
    row = prompt_row({**raw(), "prompt": marked}, SokobanDataOptions(instruction="full", observation="text"))
    assert (row["prompt"], row["images"]) == (text, [])


def test_prompts_of_text_are_a_processed_file_too():
    row = prompt_row(raw(), SokobanDataOptions(observation="text"))
    level = level_from_processed(row, 0, "prompts.parquet", ImageLimits())
    assert (level.board, level.images) == (Board.from_text(LEVEL), ())
    with pytest.raises(ValueError, match="a non-empty list of data: URIs"):
        level_from_processed({**prompt_row(raw(), SokobanDataOptions()), "images": []}, 0, "x", ImageLimits())
