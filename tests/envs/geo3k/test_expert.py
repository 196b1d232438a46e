"""Experts of geometry: how often they are right, what they write, when they call the tool."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from geo_sokoban_pipeline.envs.base import describe_expert, make_expert
from geo_sokoban_pipeline.envs.geo3k.answer_env import build_env as build_answer_env
from geo_sokoban_pipeline.envs.geo3k.env import build_env as build_tool_env
from geo_sokoban_pipeline.envs.geo3k.expert import build_teacher
from geo_sokoban_pipeline.envs.geo3k.tool_call import parse_tool_call
from geo_sokoban_pipeline.rewards.math_answer.default import extract_answer
from task_options import ExpertOptions, GeometryExpertOptions

RULES = [("a", "46"), ("180 - a", "134"), ("90 - a", "44"), ("a / 2", "23"), ("2 a", "92")]
ROW = {
    "id": "r",
    "answer": "134",
    "candidates": [{"rule": rule, "label": label} for rule, label in RULES],
    "columns": json.dumps({"numbers": {"a": 46, "length": 12}}),
}
BARE = {"id": "b", "answer": "5 \\sqrt { 3 }", "candidates": [], "columns": "{}"}


def play(row, turns=1, seed=0, name="plausible", patience=None, noise=0.0, **arguments):
    """Responses and the environment after them; with more than one turn there is a tool."""
    env = build_answer_env(row, {}) if turns == 1 else build_tool_env(row, {"max_turns": turns})
    env.reset()
    expert = build_teacher(name, patience, noise, **arguments)
    expert.begin(row)
    generator, responses, done = random.Random(seed), [], False
    while not done and len(responses) < turns:
        responses.append(expert.respond(env, generator))
        _, done, _ = env.step(responses[-1])
    env.finalize(responses, "completed")
    return responses, env


def test_rules_at_random():
    answers = Counter(extract_answer(play(ROW, seed=seed)[0][0]) for seed in range(500))
    assert set(answers) == {label for _, label in RULES}
    assert all(70 < times < 130 for times in answers.values())  # 100 each, standard deviation 9
    right = sum(play(ROW, seed=seed, name="solver", noise=0.5)[1].final_metrics()["success"] for seed in range(400))
    assert 200 < right < 280  # 0.5 + 0.5 / 5 of them


@pytest.mark.parametrize(
    ("row", "arguments", "response"),
    [
        (ROW, {"name": "solver"}, "\\boxed{134}"),
        (BARE, {"name": "solver"}, "\\boxed{5 \\sqrt { 3 }}"),
        (BARE, {"name": "plausible"}, "\\boxed{5 \\sqrt { 3 }}"),  # without rules it knows the label alone
        (ROW, {"name": "constant", "answer": "60"}, "\\boxed{60}"),
        (ROW, {"name": "solver", "working": True}, "a=46 180 - a \\boxed{134}"),
        (
            ROW | {"family": "linear_pair"},
            {"name": "solver", "working": True},
            "linear pair a=46 180 - a \\boxed{134}",
        ),
        (BARE, {"name": "solver", "working": True}, "\\boxed{5 \\sqrt { 3 }}"),
    ],
)
def test_one_response(row, arguments, response):
    assert play(row, **arguments)[0] == [response]


def test_it_calls_the_tool_with_another_rule_each_time_and_ends_without_it():
    for seed in range(40):
        responses, env = play(ROW, turns=3, seed=seed)
        answers = [extract_answer(response) for response in responses]
        assert len(set(answers)) == len(answers)
        calls = [parse_tool_call(response) for response in responses]
        assert [call.answer if call else None for call in calls] == [*answers[:2], None][: len(answers)]
        # It goes on only while it is wrong, so an early end is a right one.
        assert len(responses) == 3 or env.final_metrics()["success"] == 1.0
        assert env.final_metrics()["success"] == float(answers[-1] == "134")


@pytest.mark.parametrize(
    ("arguments", "calls"), [({"tool_share": 0.0}, 0), ({"tool_share": 1.0, "patience": 1}, 1), ({"patience": 0}, 0)]
)
def test_when_it_answers_without_the_tool(arguments, calls):
    responses, env = play({**ROW, "answer": "7"}, turns=4, **arguments)
    assert env.final_metrics()["tool_calls"] == calls
    assert len(responses) == calls + 1 and responses[-1].startswith("\\boxed{")
    (response, *_), env = play(BARE, turns=2, name="solver")  # LaTeX survives the call
    assert parse_tool_call(response).answer == "5 \\sqrt { 3 }" and env.final_metrics()["tool_correct"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "direct"}, "teacher.name='direct': must be one of plausible, solver, constant"),
        ({"name": "constant"}, "args.answer is needed"),
        ({"name": "solver", "tool_share": 1.5}, "args.tool_share=1.5: must be in"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_teacher(**arguments)


@pytest.mark.parametrize(
    ("options", "rows", "sentence"),
    [
        ({}, [ROW, ROW], "an expert that takes one of each row's candidates at random"),
        ({}, [ROW, BARE], "the answers of 1 of 2 rows, because these have no candidates"),
        ({}, [BARE, {"answer": "4"}], "the answers of 2 of 2 rows, because these have no candidates"),
        ({"name": "solver"}, [ROW, ROW], "the answers of all 2 rows (expert `solver`)"),
        ({"name": "solver", "noise": 0.25}, [ROW], "one of each row's candidates at random in 25% of its answers"),
        ({"name": "constant", "args": {"answer": "7"}}, [ROW], "an expert that always answers 7"),
    ],
)
def test_what_is_imitated_is_said(options, rows, sentence):
    assert sentence in describe_expert(GeometryExpertOptions.model_validate(options), rows)


def test_an_expert_of_ones_own_is_named(tmp_path):
    file = tmp_path / "expert.py"
    file.write_text("def build_teacher(name, patience, noise):\n    return None\n")
    options = GeometryExpertOptions(factory=str(file))
    assert describe_expert(options, [ROW]) == f"SFT on the expert {file}"
    assert (
        describe_expert(options.model_copy(update={"name": "solver"}), [ROW]) == f"SFT on the expert solver of {file}"
    )
    said = describe_expert(ExpertOptions(noise=0.1), [{}])
    assert said == "SFT on the expert `direct` on 1 levels, 10% of its moves replaced by random ones"
    made = make_expert(GeometryExpertOptions(name="constant", args={"answer": "9", "working": True}), ROW)
    assert made.respond(build_answer_env(ROW, {}), random.Random(0)) == "\\boxed{9}"
