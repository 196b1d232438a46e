"""Every argument of environments and rewards (`env.args`, `reward.args`) has the effect that its text promises."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from geo_sokoban_pipeline.envs.geo3k import answer_env
from geo_sokoban_pipeline.envs.geo3k import env as tool_env
from geo_sokoban_pipeline.envs.geo3k.answer_env import AnswerEnvOptions
from geo_sokoban_pipeline.envs.geo3k.env import Geo3kEnvOptions
from geo_sokoban_pipeline.envs.sokoban.board import Board, MoveRewards
from geo_sokoban_pipeline.envs.sokoban.env import SokobanEnv, build_env
from geo_sokoban_pipeline.rewards.geo3k import (
    AnswerRewardOptions,
    FormatRewardOptions,
    ToleranceRewardOptions,
    format_reward,
    math_reward,
    tolerance_reward,
)
from geo_sokoban_pipeline.rewards.sokoban import compute_reward, sokoban_reward
from geo_sokoban_pipeline.rollout.episode import EpisodeResult

# The box is two moves from its target; below it a corner in which it is lost.
LEVEL = "#######\n#@ $ .#\n#     #\n#######"
TABLES: dict[str, dict[str, Callable[[], None]]] = {"sokoban": {}, "geometry": {}, "rewards": {}}


def shows(table: str, *names: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(check: Callable[[], None]) -> Callable[[], None]:
        TABLES[table].update(dict.fromkeys(names, check))
        return check

    return register


def test_every_argument_is_shown_to_have_an_effect() -> None:
    own = set(inspect.signature(SokobanEnv).parameters) - {"board", "rewards"}
    assert set(TABLES["sokoban"]) == own | {f"rewards.{field.name}" for field in fields(MoveRewards)}
    assert set(TABLES["geometry"]) == {*Geo3kEnvOptions.model_fields, *AnswerEnvOptions.model_fields}
    named = set(inspect.signature(sokoban_reward).parameters) - {"turn_rewards", "final_bonus", "dist0", "dist1"}
    models = (AnswerRewardOptions, ToleranceRewardOptions, FormatRewardOptions)
    assert set(TABLES["rewards"]) == named | {name for model in models for name in model.model_fields}


# Sokoban


def level(text: str = LEVEL, **args: Any) -> SokobanEnv:
    env = build_env({"extra_info": {"env_config": Board.from_text(text).to_env_config()}}, args)
    env.reset()
    return env


def response(*moves: str) -> str:
    return f"<answer>{', '.join(moves)}</answer>"


@shows("sokoban", "max_actions_per_turn")
def _actions() -> None:
    for most in (1, 2, 3):
        env = level(max_actions_per_turn=most)
        env.step(response("Right", "Right", "Right", "Right"))
        assert env.steps == most


@shows("sokoban", "max_steps")
def _steps() -> None:
    for most, done in ((2, True), (3, False)):
        assert level(max_steps=most, max_actions_per_turn=2).step(response("Down", "Up"))[1] == done


@shows("sokoban", "cell_px")
def _cells() -> None:
    for px in (8, 16):
        observation, _ = level(cell_px=px).reset()
        assert observation["multi_modal_data"]["<image>"][0].size == (7 * px, 4 * px)


@shows("sokoban", "observation_style", "text_grid", "render_mode")
def _observations() -> None:
    full, brief, grid, text = (
        level(**args).reset()[0]
        for args in ({}, {"observation_style": "brief"}, {"text_grid": True}, {"render_mode": "text"})
    )
    assert 2 * len(brief["obs_str"]) < len(full["obs_str"])
    grids = [observation["obs_str"].count("\t") > 20 for observation in (full, brief, grid, text)]
    assert grids == [False, False, True, True]
    assert "multi_modal_data" not in text and "multi_modal_data" in grid


@shows("sokoban", "malformed_counts_step", "rewards.malformed")
def _malformed() -> None:
    for counts, steps in ((False, 0), (True, 1)):
        env = level(malformed_counts_step=counts, rewards={"malformed": -0.3})
        env.step("no move")
        assert (env.steps, env.turn_rewards, env.invalid_turns) == (steps, [-0.3], 1)


@shows("sokoban", "after_think")
def _thoughts() -> None:
    text = f"<think>{response('Down')}</think>{response('Right')}"
    for after in (True, False):
        parsed = [move.lower() for move in level(after_think=after).step(text)[2]["parsed_actions"]]
        assert (parsed == ["right"]) == after, parsed


@shows("sokoban", "end_when_lost", "rewards.lost")
def _lost() -> None:
    corner = "######\n#@   #\n# $. #\n#    #\n######"
    for ends in (False, True):
        env = level(corner, end_when_lost=ends, rewards={"lost": -7.0, "moved": 0.0})
        _, done, info = env.step(response("Right", "Down"))
        assert env.board.is_lost and done == ends
        assert info["turn_reward"] == (-7.0 if ends else 0.0)


@shows("sokoban", "distance")
def _distance() -> None:
    """Greedy takes the nearest target for each box in turn; the assignment is the cheapest one."""
    text = "#########\n#  @    #\n#.  $.$ #\n#       #\n#########"
    far = {how: level(text, distance=how).box_target_distance() for how in ("greedy", "assignment")}
    assert far == {"assignment": 3 + 1, "greedy": 1 + 5}


@shows("sokoban", "optimal_steps")
def _optimum() -> None:
    env = level(optimal_steps=3)
    env.step(response("Right", "Right", "Right"))
    metrics = env.final_metrics()
    assert (metrics["optimal_steps"], metrics["steps_over_optimal"], metrics["success"]) == (3.0, 1.0, 1.0)
    assert "optimal_steps" not in level().final_metrics()


@shows("sokoban", "rewards.blocked", "rewards.moved", "rewards.box_on", "rewards.box_off", "rewards.success_bonus")
def _rewards() -> None:
    """Each has a power of two of its own, so that a sum tells what was paid."""
    paid = {"blocked": -1.0, "moved": 2.0, "box_on": 4.0, "box_off": -8.0, "success_bonus": 16.0}
    two = "########\n#@$.  .#\n#   $  #\n########"
    for text, move, reward in (
        (LEVEL, ["Up"], -1.0),
        (LEVEL, ["Down"], 2.0),
        (two, ["Right"], 2.0 + 4.0),
        (two.replace("@$.", "@* "), ["Right"], 2.0 - 8.0),
    ):
        env = level(text, rewards=paid)
        assert env.step(response(*move))[2]["turn_reward"] == reward
        assert env.final_bonus == 0.0
    env = level(rewards=paid)
    env.step(response("Right", "Right", "Right"))
    assert env.final_bonus == 16.0


# Geometry


def call(answer: str, arguments: str = "") -> str:
    given = arguments or f'{{"answer": "{answer}"}}'
    return f'<tool_call>{{"name": "calc_score", "arguments": {given}}}</tool_call>'


def problem(answer: str = "5", **args: Any) -> Any:
    env = tool_env.build_env({"id": "p", "answer": answer}, {"max_turns": 3} | args)
    env.reset()
    return env


@shows("geometry", "max_turns")
def _announced() -> None:
    """Before the last turn the feedback warns."""
    said = [problem(max_turns=turns).step(call("4"))[0]["obs_str"] for turns in (2, 5)]
    assert said[0] != said[1]


@shows("geometry", "preset", "end_on_correct")
def _ends() -> None:
    for args, done in (({}, True), ({"end_on_correct": False}, False), ({"preset": "slime_exact"}, False)):
        assert problem(**args).step(call("5"))[1] == done
    assert problem(preset="slime_exact", end_on_correct=True).step(call("5"))[1]


@shows("geometry", "after_think")
def _calls_in_thoughts() -> None:
    for after in (True, False):
        info = problem(after_think=after).step(f"<think>{call('5')}</think>So it is.")[2]
        assert info.get("tool_executed", False) != after


@shows("geometry", "tolerate_list_arguments")
def _lists() -> None:
    assert problem().step(call("", '["5"]'))[2].get("answer_missing")
    with pytest.raises(Exception, match="list"):
        problem(tolerate_list_arguments=False).step(call("", '["5"]'))


@shows("geometry", "tolerate_latex")
def _latex() -> None:
    for tolerate in (True, False):
        info = problem(tolerate_latex=tolerate).step(call("", '{"answer": "\\frac{10}{2}"}'))[2]
        assert (info["score"] == 1.0) == tolerate


@shows("geometry", "earlier_call_counts")
def _earlier() -> None:
    text = f"{call('5')}<tool_call>{{5}}</tool_call>"
    for counts in (True, False):
        assert problem(earlier_call_counts=counts).step(text)[2].get("tool_executed", False) == counts


@shows("geometry", "feedback", "quote")
def _feedback() -> None:
    full, brief = (problem(feedback=style).step(call("4"))[0]["obs_str"] for style in ("full", "brief"))
    assert len(brief) < len(full)
    short, raw = (problem(quote=how).step(call("4" * 300))[0]["obs_str"] for how in ("short", "raw"))
    assert "4" * 300 in raw and "4" * 101 not in short


@shows("geometry", "grader", "tolerance")
def _graders() -> None:
    """In both environments, whether asked by a call or told at the end."""
    for args, score in (
        ({"grader": "geo3k", "tolerance": 0.05}, 1.0),
        ({"grader": "geo3k", "tolerance": 0.001}, 0.0),
        ({}, 0.0),
    ):
        assert problem("0.53", **args).step(call("0.55"))[2]["score"] == score
        env = answer_env.build_env({"id": "p", "answer": "0.53"}, args)
        env.reset()
        env.step("\\boxed{0.55}")
        assert env.final_metrics()["success"] == score


# Rewards


def outcome(*responses: str, truth: str = "5", response: str = "", **env: Any) -> EpisodeResult:
    return EpisodeResult(
        {"id": "r", "answer": truth}, "completed", list(responses), response or "".join(responses), [], env
    )


@shows("rewards", "aggregate", "distance_weight")
def _sums() -> None:
    env = {"turn_rewards": [1.0, 3.0], "final_bonus": 10.0, "dist0": 5, "dist1": 3}
    for args, reward in (
        ({}, 2.0 + 10.0 + 2.0),
        ({"aggregate": "sum"}, 4.0 + 10.0 + 2.0),
        ({"distance_weight": 0.25}, 2.0 + 10.0 + 0.5),
        ({"distance_weight": 0.0, "aggregate": "sum"}, 14.0),
    ):
        assert compute_reward(outcome(**env), args)["reward"] == reward


@shows("rewards", "preset", "grade_scope")
def _scope() -> None:
    """An answer that feedback repeats is in the response, but nobody's response."""
    one = outcome("\\boxed{4}", response="\\boxed{4} no, \\boxed{5}")
    for args, reward in (({}, 0.0), ({"grade_scope": "response"}, 1.0), ({"preset": "slime_exact"}, 1.0)):
        assert math_reward(one, args)["reward"] == reward
    assert math_reward(one, {"preset": "slime_exact", "grade_scope": "assistant"})["reward"] == 0.0


@shows("rewards", "grader", "tolerance")
def _tolerance() -> None:
    near = outcome("\\boxed{0.55}", truth="0.53")
    assert [reward(near, {})["reward"] for reward in (math_reward, tolerance_reward)] == [0.0, 1.0]
    assert tolerance_reward(near, {"tolerance": 0.01})["reward"] == 0.0
    assert math_reward(near, {"grader": "geo3k", "tolerance": 0.05})["reward"] == 1.0


@shows("rewards", "format_weight")
def _form() -> None:
    right, formed = outcome("\\boxed{5}"), outcome("<think>so</think>\\boxed{4}")
    for weight in (0.0, 0.3, 1.0):
        rewards = [format_reward(one, {"format_weight": weight})["reward"] for one in (right, formed)]
        assert rewards == pytest.approx([1 - weight, weight])


@pytest.mark.parametrize(
    "check",
    dict.fromkeys(check for table in TABLES.values() for check in table.values()),
    ids=lambda check: check.__name__.strip("_"),
)
def test_effects(check: Callable[[], None]) -> None:
    check()
