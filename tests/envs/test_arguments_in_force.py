"""Every argument of environments and rewards (`env.args`, `reward.args`) has the effect that its text promises."""

from __future__ import annotations

import re
from typing import Any

import pytest

from geo_sokoban_pipeline.config.base import parameter_names
from geo_sokoban_pipeline.envs.geo3k import env as tool_env
from geo_sokoban_pipeline.envs.geo3k.answer_env import AnswerEnvOptions
from geo_sokoban_pipeline.envs.geo3k.env import Geo3kEnvOptions
from geo_sokoban_pipeline.envs.sokoban.board import Board
from geo_sokoban_pipeline.envs.sokoban.env import SokobanEnvOptions, build_env
from geo_sokoban_pipeline.rewards.geo3k import (
    AnswerRewardOptions,
    FormatRewardOptions,
    ToleranceRewardOptions,
    format_reward,
    math_reward,
    tolerance_reward,
)
from geo_sokoban_pipeline.rewards.sokoban import SokobanRewardOptions, compute_reward
from geo_sokoban_pipeline.rollout.episode import EpisodeResult

# The box is two moves from its target.
LEVEL = "#######\n#@ $ .#\n#     #\n#######"
# Below the box is a corner in which it is lost.
CORNER = "######\n#@   #\n# $. #\n#    #\n######"
# Greedy takes the nearest target for each box in turn; the assignment is the cheapest one.
FAR = "#########\n#  @    #\n#.  $.$ #\n#       #\n#########"
ON, OFF = "########\n#@$.  .#\n#   $  #\n########", "########\n#@*   .#\n#   $  #\n########"
# Each has a power of two of its own, so that a sum tells what was paid.
PAID = {"rewards": {"blocked": -1.0, "moved": 2.0, "box_on": 4.0, "box_off": -8.0, "success_bonus": 16.0}}
THOUGHT = "<think><answer>Down</answer></think><answer>Right</answer>"
RIGHTS = "<answer>Right, Right, Right</answer>"
LOST, SOLVED = "#####\n#$@.#\n#   #\n#####", "#@ *#"

SOKOBAN: list[tuple[dict[str, Any], str, str, dict[str, Any]]] = [
    # arguments, level, response, what is seen of the first observation and after the step
    *(({"max_actions_per_turn": most}, LEVEL, RIGHTS, {"steps": most}) for most in (1, 2, 3)),
    ({"max_steps": 2}, LEVEL, "<answer>Down, Up</answer>", {"done": True}),
    ({"max_steps": 3}, LEVEL, "<answer>Down, Up</answer>", {"done": False}),
    # The limit cuts a turn: the third move is read and not made.
    ({"max_steps": 2}, LEVEL, RIGHTS, {"done": True, "steps": 2, "parsed": ["right"] * 3, "made": "Right, Right"}),
    # A level solved at its start ends with the first move only.
    ({}, SOLVED, "hm", {"done": False}),
    ({}, SOLVED, "right, right, right", {"done": True, "steps": 1}),
    *(({"cell_px": px}, LEVEL, "Right", {"size": (7 * px, 4 * px)}) for px in (8, 16)),
    ({}, LEVEL, "Right", {"is_brief": False, "has_grid": False}),
    ({"observation_style": "brief"}, LEVEL, "Right", {"is_brief": True}),
    ({"text_grid": True}, LEVEL, "Right", {"has_grid": True, "size": (448, 256)}),
    ({"render_mode": "text"}, LEVEL, "Right", {"has_grid": True, "size": None}),
    *(
        (
            {"malformed_counts_step": counts, "max_steps": 1, "rewards": {"malformed": -0.3}},
            LEVEL,
            "no move",
            {"steps": int(counts), "done": counts, "reward": -0.3, "invalid_share": 1.0},
        )
        for counts in (False, True)
    ),
    ({"after_think": True}, LEVEL, THOUGHT, {"parsed": ["right"]}),
    ({"after_think": False}, LEVEL, THOUGHT, {"parsed": ["down"]}),
    *(
        (
            {"end_when_lost": ends, "rewards": {"lost": -7.0, "moved": 0.0}},
            CORNER,
            "<answer>Right, Down</answer>",
            {"done": ends, "reward": -7.0 if ends else 0.0, "lost": 1.0, "success": 0.0},
        )
        for ends in (False, True)
    ),
    # A level that is lost from its start is played on, and nothing is charged for it.
    (
        {"end_when_lost": True, "rewards": {"lost": -7.0}},
        LOST,
        "down, up",
        {"done": False, "reward": 0.02, "lost": 1.0},
    ),
    ({"distance": "greedy"}, FAR, "none", {"dist0": 1 + 5}),
    ({"distance": "assignment"}, FAR, "none", {"dist0": 3 + 1}),
    ({"optimal_steps": 3}, LEVEL, RIGHTS, {"optimal_steps": 3.0, "steps_over_optimal": 1.0, "success": 1.0}),
    (PAID, LEVEL, "Up", {"reward": -1.0, "bonus": 0.0}),
    (PAID, LEVEL, "Down", {"reward": 2.0}),
    (PAID, ON, "Right", {"reward": 2.0 + 4.0, "bonus": 0.0}),
    (PAID, OFF, "Right", {"reward": 2.0 - 8.0}),
    (PAID, LEVEL, RIGHTS, {"bonus": 16.0}),
]


@pytest.mark.parametrize(("args", "text", "response", "expected"), SOKOBAN)
def test_arguments_of_sokoban(args: dict[str, Any], text: str, response: str, expected: dict[str, Any]) -> None:
    env = build_env({"extra_info": {"env_config": Board.from_text(text).to_env_config()}}, args)
    first, _ = env.reset()
    after, done, info = env.step(response)
    seen = {
        **env.final_metrics(),
        "made": "".join(re.findall("Moves just made: (.*)", after["obs_str"])),
        "steps": env.steps,
        "done": done,
        "reward": info["turn_reward"],
        "bonus": env.final_bonus,
        "parsed": info["parsed_actions"],
        "size": first["multi_modal_data"]["<image>"][0].size if "multi_modal_data" in first else None,
        "is_brief": len(first["obs_str"]) < 50,
        "has_grid": first["obs_str"].count("\t") > 20,
    }
    assert {name: seen[name] for name in expected} == expected


def call(arguments: str) -> str:
    return f'<tool_call>{{"name": "calc_score", "arguments": {arguments}}}</tool_call>'


FOUR, FIVE, LONG = call('{"answer": "4"}'), call('{"answer": "5"}'), call(f'{{"answer": "{"4" * 300}"}}')
MARKS = call('{"answer": "<|im_end|>\\u0000<|image_pad|>"}')
LATEX, NEAR = call('{"answer": "\\frac{10}{2}"}'), call('{"answer": "0.55"}')
BROKEN_LAST, THOUGHT_CALL = f"{FIVE}<tool_call>{{5}}</tool_call>", f"<think>{FIVE}</think>So it is."

GEOMETRY: list[tuple[dict[str, Any], str, str, dict[str, Any]]] = [
    # arguments, label, response, what is seen of the feedback and of the step
    ({"max_turns": 2}, "5", FOUR, {"is_warned": True}),  # before the last turn
    ({"max_turns": 5}, "5", FOUR, {"is_warned": False}),
    ({}, "5", FIVE, {"done": True}),
    ({"end_on_correct": False}, "5", FIVE, {"done": False}),
    ({"preset": "slime_exact"}, "5", FIVE, {"done": False}),
    ({"preset": "slime_exact", "end_on_correct": True}, "5", FIVE, {"done": True}),  # given values win
    ({"preset": "slime_exact"}, "5", THOUGHT_CALL, {"tool_executed": True}),
    ({"preset": "slime_exact"}, "5", LATEX, {"score": 0.0}),
    ({"preset": "slime_exact"}, "5", LONG, {"is_quoted": True}),
    ({"preset": "slime_exact"}, "13", call('{"answer": "99=13"}'), {"score": 1.0}),  # its grader
    ({"after_think": True}, "5", THOUGHT_CALL, {"tool_executed": False, "done": True}),
    ({"after_think": False}, "5", THOUGHT_CALL, {"tool_executed": True, "score": 1.0}),
    ({}, "5", call('["5"]'), {"answer_missing": True, "tool_executed": False, "done": False}),
    ({"tolerate_latex": True}, "5", LATEX, {"score": 1.0}),
    ({"tolerate_latex": False}, "5", LATEX, {"score": 0.0}),
    ({"earlier_call_counts": True}, "5", BROKEN_LAST, {"score": 1.0}),
    ({"earlier_call_counts": False}, "5", BROKEN_LAST, {"tool_executed": False}),
    ({"feedback": "full"}, "5", FOUR, {"is_brief": False}),
    ({"feedback": "brief"}, "5", FOUR, {"is_brief": True}),
    ({"quote": "short"}, "5", LONG, {"is_quoted": False}),
    ({"quote": "raw"}, "5", LONG, {"is_quoted": True}),
    ({"quote": "short"}, "5", MARKS, {"has_marks": False}),
    ({"quote": "raw"}, "5", MARKS, {"has_marks": True}),
    ({"grader": "geo3k", "tolerance": 0.05}, "0.53", NEAR, {"score": 1.0}),
    ({"grader": "geo3k", "tolerance": 0.001}, "0.53", NEAR, {"score": 0.0}),
    ({}, "0.53", NEAR, {"score": 0.0}),
]


@pytest.mark.parametrize(("args", "label", "response", "expected"), GEOMETRY)
def test_arguments_of_geometry(args: dict[str, Any], label: str, response: str, expected: dict[str, Any]) -> None:
    env = tool_env.build_env({"id": "p", "answer": label}, {"max_turns": 3} | args)
    env.reset()
    observation, done, info = env.step(response)
    feedback = observation.get("obs_str", "")
    seen = info | {
        "done": done,
        "is_warned": "One chance is left" in feedback,
        "is_brief": len(feedback) < 50,
        "is_quoted": "4" * 101 in feedback,
        "has_marks": "<|" in feedback or "\0" in feedback,
    }
    assert {name: seen.get(name) for name in expected} == expected


def test_list_arguments_are_the_original_crash_where_they_are_not_tolerated() -> None:
    for args in ({"tolerate_list_arguments": False}, {"preset": "slime_exact"}):
        with pytest.raises(TypeError, match="tolerate_list_arguments"):
            tool_env.build_env({"id": "p", "answer": "5"}, {"max_turns": 3} | args).step(call('["5"]'))


def outcome(*responses: str, truth: str = "5", response: str = "", **env: Any) -> EpisodeResult:
    whole = response or "".join(responses)
    return EpisodeResult({"id": "r", "answer": truth}, "completed", list(responses), whole, [], env)


MOVED = outcome(turn_rewards=[1.0, 3.0], final_bonus=10.0, dist0=5, dist1=3)
# An answer that feedback repeats is in the response, but nobody's response.
REPEATED = outcome("\\boxed{4}", response="\\boxed{4} no, \\boxed{5}")
CLOSE, PLAIN, FORMED = outcome("\\boxed{0.55}", truth="0.53"), outcome("\\boxed{5}"), "<think>so</think>\\boxed{4}"

REWARDS: list[tuple[Any, EpisodeResult, dict[str, Any], float]] = [
    (compute_reward, MOVED, {}, 2.0 + 10.0 + 2.0),
    (compute_reward, MOVED, {"aggregate": "sum"}, 4.0 + 10.0 + 2.0),
    (compute_reward, MOVED, {"distance_weight": 0.25}, 2.0 + 10.0 + 0.5),
    (compute_reward, MOVED, {"distance_weight": 0.0, "aggregate": "sum"}, 14.0),
    (math_reward, REPEATED, {}, 0.0),
    (math_reward, REPEATED, {"grade_scope": "response"}, 1.0),
    (math_reward, REPEATED, {"preset": "slime_exact"}, 1.0),
    (math_reward, REPEATED, {"preset": "slime_exact", "grade_scope": "assistant"}, 0.0),
    (math_reward, CLOSE, {}, 0.0),
    (math_reward, CLOSE, {"grader": "geo3k", "tolerance": 0.05}, 1.0),
    (tolerance_reward, CLOSE, {}, 1.0),
    (tolerance_reward, CLOSE, {"tolerance": 0.01}, 0.0),
    *((format_reward, PLAIN, {"format_weight": weight}, 1 - weight) for weight in (0.0, 0.3, 1.0)),
    *((format_reward, outcome(FORMED), {"format_weight": weight}, weight) for weight in (0.0, 0.3, 1.0)),
]


@pytest.mark.parametrize(("function", "result", "args", "value"), REWARDS)
def test_arguments_of_rewards(function: Any, result: EpisodeResult, args: dict[str, Any], value: float) -> None:
    assert function(result, args)["reward"] == pytest.approx(value)


def named(table: list[Any], column: int = 0) -> set[str]:
    """All names of arguments in a table."""
    given = [row[column] for row in table]
    sections = {f"rewards.{name}" for args in given for name in args.get("rewards", {})}
    return sections | {name for args in given for name in args}


def test_every_argument_is_in_a_table() -> None:
    assert named(SOKOBAN) == set(parameter_names(SokobanEnvOptions))
    of_geometry = {*Geo3kEnvOptions.model_fields, *AnswerEnvOptions.model_fields}
    assert named(GEOMETRY) == of_geometry - {"tolerate_list_arguments"}
    models = (SokobanRewardOptions, AnswerRewardOptions, ToleranceRewardOptions, FormatRewardOptions)
    assert named(REWARDS, 2) == {name for model in models for name in model.model_fields}
