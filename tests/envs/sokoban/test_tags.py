"""Tags of Sokoban's episodes, by hand and on played levels."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from geo_sokoban_pipeline.envs.sokoban import Board, SokobanEnv
from geo_sokoban_pipeline.envs.sokoban.task import SOKOBAN
from geo_sokoban_pipeline.trajectories.index import StoredEpisode, StoredResponse

LEVEL = """
######
#@   #
# $  #
#   .#
######
"""


def play(texts: Sequence[str], level: str = LEVEL) -> StoredEpisode:
    """The stored episode of these responses, as far as tags need it."""
    env = SokobanEnv(Board.from_text(level.strip("\n")), cell_px=16)
    env.reset()
    responses = []
    for text in texts:
        _, _, info = env.step(text)
        responses.append(StoredResponse(text, ",".join(info["parsed_actions"]) or None, info))
    metrics = env.final_metrics()
    return StoredEpisode("completed", metrics["success"] >= 0.5, None, metrics, responses)


def moves(*names: str) -> list[str]:
    return [f"<answer>{name}</answer>" for name in names]


PLAYED: list[tuple[str, list[str], dict[str, int]]] = [
    ("solved", moves("Right", "Down", "Left, Down, Right") + moves("Right"), {}),
    ("back and forth", moves("Right", "Left", "Right", "Left", "Right"), {"oscillation": 5}),
    ("three moves are none yet", moves("Right", "Left", "Right"), {}),
    ("within a response", moves("Right, Left, Right", "Left"), {"oscillation": 4}),
    ("a way back is none", moves("Right", "Right", "Left", "Left"), {}),
    ("into walls", moves("Up", "Left", "Up"), {"walking_into_walls": 3}),
    ("one bump is none", moves("Up", "Right"), {}),
    ("a bump between does not end it", moves("Right", "Left", "Up", "Right", "Left"), {"oscillation": 4}),
    ("no move", ["I do not know", "<answer>fly</answer>", *moves("Right")], {"no_move": 2}),
    ("several blocks", ["<answer>Right</answer> or <answer>Down</answer>"], {"hedge": 1}),
    ("the same block twice", ["<answer>Right</answer> <answer>right</answer>"], {}),
    ("thoughts are no hedge", ["<answer>Down</answer></think><answer>Right</answer>"], {}),
    # Pushed down into the lower left corner region: two cells left of the target's column, against the wall.
    ("deadlock", moves("Right", "Down", "Down")[:1] + moves("Right", "Down", "Left"), {"deadlock": 1}),
]


@pytest.mark.parametrize(("name", "texts", "tags"), PLAYED, ids=[name for name, _, _ in PLAYED])
def test_tags_of_played_levels(name: str, texts: list[str], tags: dict[str, int]) -> None:
    assert SOKOBAN.tags(play(texts)) == tags


def test_the_answer_is_all_moves() -> None:
    assert SOKOBAN.answer(play(moves("Right, Down", "up") + ["none"])) == "right,down,up"
    assert SOKOBAN.answer(play(["none"])) is None


@pytest.mark.parametrize(
    "info", [{}, {"metrics": None}, {"metrics": {"turn_metrics": 3.0}}, {"metrics": {"reward": 1}}]
)
def test_other_environments_have_only_the_tags_of_texts(info: dict[str, Any]) -> None:
    said = [StoredResponse("<answer>up</answer><answer>down</answer>", "up", info)] * 3
    assert SOKOBAN.tags(StoredEpisode("completed", None, None, {}, said)) == {"hedge": 3}


@pytest.mark.parametrize("piece", ["<answer>", "<answer>up</answer>", "up,", "<"])
def test_degenerate_texts_take_no_time(piece: str) -> None:
    said = StoredResponse(piece * (30_000 // len(piece)), None, {})
    began = time.process_time()
    SOKOBAN.tags(StoredEpisode("truncated", False, None, {}, [said]))
    assert time.process_time() - began < 0.5
