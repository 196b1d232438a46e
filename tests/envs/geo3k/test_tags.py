"""Tags of geometry's episodes, from the texts of their responses."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from geo_sokoban_pipeline.envs.geo3k.env import Geo3kEnv
from geo_sokoban_pipeline.envs.geo3k.task import GEO3K, GEO3K_MULTI_TURN
from geo_sokoban_pipeline.trajectories.index import StoredEpisode, StoredResponse


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


@pytest.mark.parametrize(
    "piece",
    ["\\boxed{", "\\boxed{1}", "{", "1", "1+", "(", "a=1 ", "a ", "\\frac{", "9*", " ", "<tool_call>{", "1 or "],
)
def test_degenerate_texts_take_no_time(piece: str) -> None:
    text = "a=46 " + piece * (30_000 // len(piece)) + r" \boxed{7}"
    began = time.process_time()
    GEO3K.tags(answered(text))
    assert time.process_time() - began < 0.5


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


def play(texts: Sequence[str]) -> StoredEpisode:
    """The stored episode of these responses to a problem whose answer is 134."""
    env = Geo3kEnv("134", 3)
    env.reset()
    responses = []
    for text in texts:
        _, _, info = env.step(text)
        responses.append(StoredResponse(text, ",".join(info.get("parsed_actions", [])) or None, info))
    env.finalize(texts, "completed")
    metrics = env.final_metrics()
    return StoredEpisode("completed", False, "134", metrics, responses)


@pytest.mark.parametrize(("name", "texts", "tags"), CALLS, ids=[name for name, _, _ in CALLS])
def test_tags_of_episodes_with_the_tool(name: str, texts: list[str], tags: dict[str, int]) -> None:
    assert GEO3K_MULTI_TURN.tags(play(texts)) == tags


def test_the_answer_is_the_last_box_else_the_last_scored_answer() -> None:
    assert GEO3K_MULTI_TURN.answer(play([CALL.format(12), r"\boxed{ 1 3 }"])) == "13"
    assert GEO3K_MULTI_TURN.answer(play([CALL.format(12)])) == "12"
    assert GEO3K.answer(answered("none")) is None
