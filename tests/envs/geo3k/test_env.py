"""The geometry environments: slime's worked examples, its rules behind arguments, numbers of an episode."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_sokoban_pipeline.config.base import ParameterError
from geo_sokoban_pipeline.envs.base import InteractionEnv
from geo_sokoban_pipeline.envs.geo3k import Geo3kEnv, answer_env
from geo_sokoban_pipeline.envs.geo3k import env as tool_env


def scored(answer: str, name: str = "calc_score") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{"answer": {answer}}}}}</tool_call>'


RIGHT, WRONG = scored('"5"'), scored('"4"')
OPENAI = r'<tool_call>{"function": {"name": "calc_score", "arguments": "{\"answer\": \"5\"}"}}</tool_call>'
LIST = '<tool_call>{"name": "calc_score", "arguments": ["5"]}</tool_call>'


def play(env, *responses):
    """Reset and give all responses; the steps."""
    env.reset()
    return [env.step(response) for response in responses]


@pytest.mark.parametrize(
    ("response", "done", "info"),
    [
        (RIGHT, False, {"tool_executed": True, "score": 1.0, "name": "calc_score", "answer": "5"}),
        (OPENAI, False, {"tool_executed": True, "score": 1.0, "name": "calc_score", "answer": "5"}),
        (scored("0"), False, {"tool_executed": True, "score": 0.0, "answer": "0"}),
        (scored('"5"', "calc_geo3k_reward"), False, {"tool_executed": True, "score": 1.0}),
        (scored(r'"Answer: \\boxed{5}"'), False, {"tool_executed": True, "score": 1.0}),
        (scored('""'), False, {"tool_executed": False, "answer_missing": True}),
        (scored("null"), False, {"tool_executed": False, "answer_missing": True}),
        ('<tool_call>{"name": "calc_score", "arguments": {}}</tool_call>', False, {"answer_missing": True}),
        ('<tool_call>{"name": "calc_score"}</tool_call>', False, {"answer_missing": True}),
        (scored('"5"', "other"), False, {"tool_executed": False}),
        ("Answer: \\boxed{5}", True, {"tool_executed": False}),
        (f"<TOOL_CALL>{RIGHT[11:]}", True, {"tool_executed": False}),
        (RIGHT[:-12], True, {"tool_executed": False}),
        ("<tool_call>['calc_score', '5']</tool_call>", True, {"tool_executed": False}),
        ("<tool_call>{'name': 'calc_score'}</tool_call>", True, {"tool_executed": False}),
        ('<tool_call>{"name": "calc_score",}</tool_call>', True, {"tool_executed": False}),
        ('<tool_call>{"arguments": {"answer": "5"}}</tool_call>', True, {"tool_executed": False}),
        ('<tool_call>{"name": "calc_score", "arguments": "five"}</tool_call>', True, {"tool_executed": False}),
    ],
)
@pytest.mark.parametrize("preset", ["default", "slime_exact"])
def test_worked_examples(response, done, info, preset):
    """Gold 5, three turns; the default ends after a correct answer, which the original does not."""
    ((observation, ended, given),) = play(Geo3kEnv("5", 3, preset=preset), response)
    assert info.items() <= given.items()
    assert observation.get("tool_score") == info.get("score")
    assert ended is (done or (preset == "default" and info.get("score") == 1.0))
    json.dumps(given, allow_nan=False)


@pytest.mark.parametrize(
    ("label", "answer"),
    [("5 \\sqrt { 3 }", r'"5\sqrt{3}"'), ("\\frac { 1 } { 2 }", r'"\frac{1}{2}"'), ("0.00001", "0.00001")],
)
def test_answers_with_single_backslashes_and_small_numbers_are_right(label, answer):
    ((_, done, info),) = play(Geo3kEnv(label, 3), scored(answer))
    assert (info["tool_executed"], info["score"], done) == (True, 1.0, True)


def test_the_original_finds_no_call_in_json_that_is_none():
    ((_, done, info),) = play(Geo3kEnv("5 \\sqrt { 3 }", 3, preset="slime_exact"), scored(r'"5\sqrt{3}"'))
    assert (info["tool_executed"], done) == (False, True)


@pytest.mark.parametrize(
    ("max_turns", "kinds"),
    [
        (1, ["warning"]),
        (2, ["warning", "warning"]),
        (3, ["plain", "warning", "warning"]),
        (5, ["plain", "plain", "plain", "warning", "warning"]),
    ],
)
@pytest.mark.parametrize("style", ["full", "brief"])
def test_worked_examples_of_feedback_to_wrong_answers(max_turns, kinds, style):
    steps = play(Geo3kEnv("5", max_turns, feedback=style), *[WRONG] * max_turns)
    marks = (
        {"plain": "try again", "warning": "last chance"}
        if style == "brief"
        else {"plain": "do not repeat this answer.", "warning": "One chance is left"}
    )
    for (observation, done, _), kind, turn in zip(steps, kinds, range(1, 9), strict=False):
        assert observation["obs_str"].count(marks["warning"]) == (kind == "warning")
        assert marks[kind] in observation["obs_str"]
        assert done is (turn == max_turns)


def test_feedback_texts():
    env = Geo3kEnv("5", 5, end_on_correct=False)
    wrong, right = (observation["obs_str"] for observation, _, _ in play(env, WRONG, RIGHT))
    assert "0.0" in wrong and "'4'" in wrong
    assert "1.0" in right and "\\boxed{}" in right and "last" not in right
    other = env.step(scored('"5"', "calc"))[0]["obs_str"]
    assert '"calc"' in other and '<tool_call>{"name": "calc_score"' in other
    assert "answer" in env.step(scored("null"))[0]["obs_str"]
    ((observation, _, _),) = play(Geo3kEnv("5", 1), RIGHT)  # after a correct answer nothing warns
    assert "chance" not in observation["obs_str"]
    assert env.format_observation(observation) == {
        "role": "user",
        "content": [{"type": "text", "text": observation["obs_str"]}],
    }
    assert env.format_observation({}) == {"role": "user", "content": [{"type": "text", "text": ""}]}


def test_reset_says_whether_there_is_a_reference():
    env = Geo3kEnv("5", 3)
    assert env.reset() == ({}, {"ground_truth_available": True})
    play(env, RIGHT)
    assert (env.turn, env.tool_calls, env.last_tool_score) == (1, 1, 1.0)
    env.reset()
    assert (env.turn, env.tool_calls, env.last_tool_score) == (0, 0, None)
    assert isinstance(env, InteractionEnv)
    assert isinstance(answer_env.AnswerEnv("5"), InteractionEnv)


@pytest.mark.parametrize("module", [tool_env, answer_env])
def test_rows_without_a_reference_are_warned_of_and_score_nothing(module, caplog):
    args = {"max_turns": 3} if module is tool_env else {}
    env = module.build_env({"id": f"row of {module.__name__}", "answer": None}, args)
    assert env.reset()[1] == {"ground_truth_available": False}
    with caplog.at_level(logging.WARNING):
        env = module.build_env({"id": f"another row of {module.__name__}", "answer": None}, args)
    assert "another row" in caplog.text and "no answer" in caplog.text
    assert play(env, RIGHT + "\\boxed{None}")[0][2]["score"] == 0.0
    assert env.final_metrics()["success"] == 0.0
    assert module.build_env({"answer": 5}, args).ground_truth == "5"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "env.args.max_turns"),
        ({"max_turns": 0}, "env.args.max_turns=0"),
        (
            {"max_turns": 3, "end_on_corect": True},
            "env.args.end_on_corect=true: unknown name. Did you mean env.args.end_on_correct",
        ),
        ({"max_turns": 3, "grader": "slime"}, 'env.args.grader="slime".*slime_exact'),
        ({"max_turns": 3, "preset": "exact"}, 'env.args.preset="exact"'),
    ],
)
def test_arguments_that_cannot_be_used(arguments, message):
    with pytest.raises(ParameterError, match=message):
        tool_env.build_env({"answer": "5"}, arguments)


def metrics(env, *responses, status="completed", stepped=None):
    play(env, *responses[:stepped])
    env.finalize(list(responses), status)
    return env.final_metrics()


BOXED = "Answer: \\boxed{5}"


@pytest.mark.parametrize(
    ("responses", "expected"),
    [
        # (success, first attempt, calls, valid calls, invalid turns)
        ([BOXED], (1, 1, 0, 0, 0)),
        ([RIGHT + BOXED], (1, 1, 1, 1, 0)),
        ([RIGHT], (0, 1, 1, 1, 0)),
        ([WRONG + "\\boxed{4}", RIGHT + BOXED], (1, 0, 2, 2, 0)),
        ([WRONG, BOXED], (1, 0, 1, 1, 0)),
        ([WRONG, "I give up"], (0, 0, 1, 1, 1)),
        ([WRONG + BOXED, "final: 5"], (1, 0, 1, 1, 1)),
        ([scored("null"), "\\boxed{4}"], (0, 0, 1, 0, 1)),
        (["<tool_call>{oops}</tool_call>"], (0, 0, 1, 0, 1)),
        ([scored("null") + BOXED, "\\boxed{4}"], (0, 1, 1, 0, 0)),
        ([], (0, 0, 0, 0, 0)),
        # Thoughts of one response do not hide the answer of another.
        ([WRONG + BOXED, "<think>hm</think> I am done"], (1, 0, 1, 1, 1)),
    ],
)
def test_numbers_of_an_episode(responses, expected):
    numbers = metrics(Geo3kEnv("5", 3, end_on_correct=False), *responses)
    names = ("success", "first_attempt_correct", "tool_calls", "valid_tool_calls", "invalid_turns")
    assert tuple(numbers[name] for name in names) == expected
    assert numbers["tool_correct"] == float(RIGHT in "".join(responses))
    assert (numbers["form_integer"], numbers["truncated"], numbers["repetition"]) == (1.0, 0.0, 0.0)


def test_a_response_that_was_cut_off_counts_though_no_step_was_made_with_it():
    env = Geo3kEnv("5", 3)
    numbers = metrics(env, WRONG, RIGHT + BOXED, status="truncated", stepped=1)
    assert (numbers["success"], numbers["truncated"], numbers["valid_tool_calls"]) == (1.0, 1.0, 1.0)
    numbers = metrics(env, BOXED, status="truncated", stepped=0)
    assert (numbers["success"], numbers["first_attempt_correct"]) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("row", "response", "expected"),
    [
        ({"answer": "5"}, "?", {"form_integer": 1.0}),
        ({"answer": 5}, "\\boxed{5}", {"form_integer": 1.0, "success": 1.0}),
        ({"answer": "- 8"}, "?", {"form_integer": 1.0}),
        ({"answer": "17.02"}, "?", {"form_decimal": 1.0}),
        ({"answer": "5 \\sqrt { 3 }"}, "?", {"form_surd": 1.0}),
        ({"answer": "\\frac { 50 } { 3 }"}, "?", {"form_fraction": 1.0}),
        ({"answer": "\\frac { \\pi } { 4 }"}, "?", {"form_pi": 1.0}),
        ({"answer": "a + b = 90"}, "?", {"form_other": 1.0}),
        ({"answer": "5", "family": "linear_pair"}, "?", {"form_integer": 1.0, "family_linear_pair": 1.0}),
        pytest.param({"answer": "5"}, "a" * 10_001, {"form_integer": 1.0, "repetition": 1.0}, id="repetition"),
    ],
)
@pytest.mark.parametrize("module", [tool_env, answer_env])
def test_numbers_of_a_problem(module, row, response, expected):
    numbers = metrics(module.build_env(row, {"max_turns": 3} if module is tool_env else {}), response)
    assert {
        n: v for n, v in numbers.items() if n.startswith(("form_", "family")) or n in ("repetition", "success") and v
    } == expected


@pytest.mark.parametrize(
    ("label", "args", "response", "score", "answer"),
    [
        ("5", {}, BOXED, 1.0, "5"),
        ("5", {}, "\\boxed{4}", 0.0, "4"),
        ("5", {}, "5", 0.0, None),
        ("5", {}, "<think>\\boxed{4}</think>" + BOXED, 1.0, "5"),
        ("0.53", {"grader": "geo3k", "tolerance": 0.05}, "\\boxed{0.55}", 1.0, "0.55"),
        ("0.53", {"grader": "geo3k", "tolerance": 0.001}, "\\boxed{0.55}", 0.0, "0.55"),
    ],
)
def test_one_response_is_graded(label, args, response, score, answer):
    env = answer_env.build_env({"id": "p", "answer": label}, args)
    env.reset()
    env.prepare(response)
    observation, done, info = env.step(response)
    assert (observation, done, info["score"], info["answer"]) == ({}, True, score, answer)
    assert info["parsed_actions"] == ([answer] if answer else [])
    numbers = env.final_metrics()
    assert (numbers["success"], numbers["first_attempt_correct"]) == (score, score)
    assert numbers["invalid_turns"] == float(answer is None)


PIECES = st.sampled_from(
    [RIGHT, WRONG, LIST, OPENAI, BOXED, "<tool_call>", "</tool_call>", "{", "}", "</think>", "\\boxed{", "5", "\ud800"]
)
RESPONSES = st.lists(PIECES | st.text(max_size=8), max_size=6).map("".join)


@given(st.lists(RESPONSES, min_size=1, max_size=4), st.integers(1, 4), st.sampled_from(["full", "brief"]))
@settings(max_examples=300, deadline=None)
def test_no_response_stops_an_episode(responses, max_turns, style):
    env = Geo3kEnv("5", max_turns, feedback=style)
    env.reset()
    for response in responses:
        env.prepare(response)
        observation, done, info = env.step(response)
        json.dumps(info, allow_nan=False)
        assert "<|" not in env.format_observation(observation)["content"][0]["text"]
        if done:
            break
    assert done or len(responses) < max_turns
    env.finalize(responses, "completed")
    numbers = env.final_metrics()
    assert all(0 <= value <= len(responses) for value in numbers.values())
    assert numbers["valid_tool_calls"] <= numbers["tool_calls"]
    env.close()
    env.close()
