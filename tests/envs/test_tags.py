"""Tags of episodes: Sokoban's by hand and on played levels, geometry's from the texts of their responses."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from geo_sokoban_pipeline.envs.geo3k import Geo3kEnv
from geo_sokoban_pipeline.envs.sokoban import Board, SokobanEnv
from geo_sokoban_pipeline.tasks import TASKS
from geo_sokoban_pipeline.trajectories.index import StoredEpisode, StoredResponse

SOKOBAN, GEO3K = TASKS["sokoban"], TASKS["geo3k"]


def play(env: Any, texts: Sequence[str]) -> StoredEpisode:
    """The stored episode of these responses, as far as tags need it."""
    env.reset()
    infos = [env.step(text)[2] for text in texts]
    responses = [
        StoredResponse(text, ",".join(info.get("parsed_actions", [])) or None, info)
        for text, info in zip(texts, infos, strict=True)
    ]
    metrics = env.final_metrics()
    return StoredEpisode("completed", metrics["success"] >= 0.5, getattr(env, "ground_truth", None), metrics, responses)


LEVEL = """
######
#@   #
# $  #
#   .#
######
"""


def level() -> SokobanEnv:
    return SokobanEnv(Board.from_text(LEVEL.strip("\n")), cell_px=16)


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


@pytest.mark.parametrize(
    "info", [{}, {"metrics": None}, {"metrics": {"turn_metrics": 3.0}}, {"metrics": {"reward": 1}}]
)
def test_other_environments_have_only_the_tags_of_texts(info: dict[str, Any]) -> None:
    said = [StoredResponse("<answer>up</answer><answer>down</answer>", "up", info)] * 3
    assert SOKOBAN.tags(StoredEpisode("completed", None, None, {}, said)) == {"hedge": 3}


def answered(*texts: str, label: str | None = "134", success: bool | None = False) -> StoredEpisode:
    metrics = {"has_answer": float(any("\\boxed{" in text for text in texts))}
    return StoredEpisode("completed", success, label, metrics, [StoredResponse(text, None, {}) for text in texts])


TEXTS: list[tuple[str, str | None, dict[str, int]]] = [
    (r"\boxed{12}", "134", {}),
    ("It is 134.", "134", {"no_answer": 1}),
    # Hedges.
    (r"\boxed{12} or \boxed{134}", "134", {"hedge": 1}),
    (r"\boxed{12} so \boxed{ 12 }", "134", {}),
    (r"\boxed{\boxed{12}} or \boxed{x \boxed{12}", "134", {}),
    (r"\{ \boxed{12} \} \boxed{\{12", "134", {}),
    (r"\boxed{12 \text{ or } 134}", "134", {"hedge": 1}),
    (r"\boxed{12, 134}", "134", {"hedge": 1}),
    (r"\boxed{3, 4}", r"3, 5", {}),  # the reference names two values as well
    (r"Is it \boxed{12}?</think>\boxed{134}", "134", {}),
    # The right rule on the right numbers, another result.
    (r"linear pair a=46 180 - a \boxed{144}", "134", {"right_rule_wrong_arithmetic": 1}),
    (r"linear pair a=46 90 - a \boxed{44}", "134", {}),  # another rule
    (r"linear pair a=64 180 - a \boxed{116}", "134", {}),  # misread, then calculated rightly
    (r"linear pair a=46 180 - a \boxed{144}", None, {}),
    (r"vertical angles a=134 a \boxed{143}", "134", {"right_rule_wrong_arithmetic": 1}),
    (r"a=46 b=80 180 - X \boxed{100}", "134", {}),  # no number was given to X
    (r"a=134. This is a known angle. \boxed{143}", "134", {}),  # `a` is a word here
    (r"intercepted arc a=67 2 a \boxed{124}", "134", {"right_rule_wrong_arithmetic": 1}),
    (r"The sum gives 180 - 46 = 144. \boxed{144}", "134", {"right_rule_wrong_arithmetic": 1}),
    (r"$x = \frac{1}{2} ( 88 + 180 )$, so \boxed{268}", "134", {"right_rule_wrong_arithmetic": 1}),
    (r"The sum gives $180 - 46$. \boxed{134^\circ}", "134", {}),  # the answer is right, whatever the verdict was
    (r"$5 \times \sqrt{3}$ gives \boxed{8.5}", r"5 \sqrt { 3 }", {"right_rule_wrong_arithmetic": 1}),
    (r"180 - 46", "134", {"no_answer": 1}),  # no answer to compare
    (r"1/0 and 46 - \boxed{7}", "134", {}),
]


@pytest.mark.parametrize(("text", "label", "tags"), TEXTS)
def test_tags_of_one_response(text: str, label: str | None, tags: dict[str, int]) -> None:
    assert GEO3K.tags(answered(text, label=label)) == tags
    solved = GEO3K.tags(answered(text, label=label, success=True))  # it miscalculates nothing
    assert "right_rule_wrong_arithmetic" not in solved


CALL = '<tool_call>{{"name": "calc_score", "arguments": {{"answer": "{}"}}}}</tool_call>'
CALLS: list[tuple[str, list[str], dict[str, int]]] = [
    ("scored", [CALL.format(12), r"\boxed{134}"], {}),
    ("call and box agree", [CALL.format(12) + r" \boxed{12}"], {}),
    ("call and box differ", [CALL.format(12) + r" \boxed{134}"], {"hedge": 1}),
    ("two calls", [CALL.format(12) + CALL.format(13), r"\boxed{12}"], {"hedge": 1}),
    ("torn call", [r"<tool_call>{calc_score 12} \boxed{12}"], {"malformed_call": 1}),
    ("other tool", [CALL.replace("calc_score", "search").format(12), r"\boxed{12}"], {"malformed_call": 1}),
    (
        "no answer in it",
        ['<tool_call>{"name": "calc_score", "arguments": {}}</tool_call>', r"\boxed{1}"],
        {"malformed_call": 1},
    ),
    (
        "the call miscalculates",
        [f"linear pair a=46 180 - a {CALL.format(144)}", r"\boxed{12}"],
        {"right_rule_wrong_arithmetic": 1},
    ),
    ("nothing", ["I do not know"], {"no_answer": 1}),
]


@pytest.mark.parametrize(
    ("name", "make", "texts", "tags"),
    [(name, level, texts, tags) for name, texts, tags in PLAYED]
    + [(name, lambda: Geo3kEnv("134", 3), texts, tags) for name, texts, tags in CALLS],
    ids=[name for name, _, _ in PLAYED + CALLS],
)
def test_tags_of_played_episodes(name: str, make: Any, texts: list[str], tags: dict[str, int]) -> None:
    task = SOKOBAN if make is level else TASKS["geo3k_multi_turn"]
    assert task.tags(play(make(), texts)) == tags


def test_answers() -> None:
    """All moves; the last box, else the last scored answer."""
    assert SOKOBAN.answer(play(level(), moves("Right, Down", "up") + ["none"])) == "right,down,up"
    assert SOKOBAN.answer(play(level(), ["none"])) is None
    assert GEO3K.answer(play(Geo3kEnv("134", 3), [CALL.format(12), r"\boxed{ 1 3 }"])) == "13"
    assert GEO3K.answer(play(Geo3kEnv("134", 3), [CALL.format(12)])) == "12"
    assert GEO3K.answer(answered("none")) is None


@pytest.mark.parametrize(
    ("task", "text"),
    [(SOKOBAN, piece * (30_000 // len(piece))) for piece in ("<answer>", "<answer>up</answer>", "up,", "<")]
    + [
        (GEO3K, "a=46 " + piece * (30_000 // len(piece)) + r" \boxed{7}")
        for piece in (
            "\\boxed{",
            "\\boxed{1}",
            "{",
            "1",
            "1+",
            "(",
            "a=1 ",
            "a ",
            "\\frac{",
            "9*",
            " ",
            "<tool_call>{",
            "1 or ",
        )
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else value.name,
)
def test_degenerate_texts_take_no_time(task: Any, text: str) -> None:
    said = StoredResponse(text, None, {})
    began = time.process_time()
    task.tags(StoredEpisode("truncated", False, "134", {}, [said]))
    assert time.process_time() - began < 0.5
