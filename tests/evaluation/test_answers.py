"""Evaluation of geometry: records, rows, what cannot be measured, other problems' images, other players."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_sokoban_pipeline.envs.geo3k.evaluation import (
    AnswerRecord,
    record_answer,
)
from geo_sokoban_pipeline.envs.geo3k.task import GEO3K
from geo_sokoban_pipeline.envs.metrics import FinishedEpisode, cluster_interval
from geo_sokoban_pipeline.evaluation.rollouts import summary_row
from geo_sokoban_pipeline.evaluation.summary import evaluate_baselines, image_ablations, shuffle_images
from geo_sokoban_pipeline.formats import write_rate
from geo_sokoban_pipeline.reporting.report_tables import columns_of, read_evaluation
from task_options import Geo3kMultiTurnTrainOptions, Geo3kTrainOptions

answer_numbers = GEO3K.validation_numbers


def summarise_answers(records: Any, policy: str = "final", mode: str = "sampled") -> dict[str, Any]:
    return summary_row(GEO3K, records, policy=policy, mode=mode)


ROW = {
    "id": "p",
    "family": "linear_pair",
    "answer_form": "integer",
    "difficulty": "tiny",
    "candidates": [{"rule": "a", "label": "46"}, {"rule": "180 - a", "label": "134"}],
}
LABELS = {"family": "linear_pair", "answer_form": "integer", "difficulty": "tiny"}


def record(prompt_id: str = "p", success: bool = True, **changes: Any) -> AnswerRecord:
    values: dict[str, Any] = {
        "first_attempt": success,
        "ret": float(success),
        "turns": 1,
        "invalid_turns": 0,
        "answered": True,
        "tool_calls": 0,
        "valid_tool_calls": 0,
        "plausible": None,
        "tokens": 5,
        "truncated": False,
        "repetition": False,
        "labels": LABELS,
    }
    return AnswerRecord(prompt_id=prompt_id, success=success, **(values | changes))


@pytest.mark.parametrize(
    ("metrics", "responses", "changes"),
    [
        ({"success": 1.0, "has_answer": 1.0}, ["\\boxed{134}"], {"plausible": True, "tokens": None}),
        (
            {"success": 0.0, "has_answer": 1.0, "first_attempt_correct": 1.0}
            | {"tool_calls": 2.0, "valid_tool_calls": 1.0},
            ["\\boxed{134}", "no \\boxed{ 4 6 }"],  # the last one counts, whatever blanks it has
            {"success": False, "first_attempt": True, "plausible": True, "tokens": None, "turns": 2}
            | {"ret": 1.0, "tool_calls": 2, "valid_tool_calls": 1},
        ),
        (
            {"success": 0.0, "invalid_turns": 1.0, "repetition": 1.0, "turns": 1.0},
            ["90"],
            {"success": False, "first_attempt": False, "answered": False, "plausible": False, "tokens": None}
            | {"ret": 1.0, "invalid_turns": 1, "repetition": True},
        ),
        # Two responses, and the environment does not say whether the first was right; a wrong end says enough.
        (
            {"success": 1.0, "has_answer": 1.0},
            ["\\boxed{1}", "\\boxed{134}"],
            {"first_attempt": None, "plausible": True, "tokens": None, "turns": 2},
        ),
        (
            {"success": 0.0, "has_answer": 1.0},
            ["\\boxed{1}", "\\boxed{134}"],
            {"success": False, "first_attempt": False, "plausible": True, "tokens": None, "turns": 2, "ret": 1.0},
        ),
        ({}, [], {"success": False, "first_attempt": False, "answered": False, "plausible": False, "turns": 0}
         | {"ret": 1.0, "tokens": None}),
    ],
)  # fmt: skip
def test_record(metrics, responses, changes):
    assert record_answer(FinishedEpisode(ROW, metrics, 1.0, responses)) == record(**changes)


def test_a_row_that_says_little():
    found = record_answer(FinishedEpisode({"id": 3, "candidates": []}, {"success": 1.0}, None, ["\\boxed{1}"], 4, True))
    assert (found.prompt_id, found.plausible, found.tokens, found.truncated) == ("3", None, 4, True)
    assert set(found.labels.values()) == {"unknown"}


RECORDS = [
    record("a", first_attempt=False, tool_calls=2, valid_tool_calls=2, turns=2, tokens=24, plausible=True),
    record("a", False, tool_calls=1, truncated=True, tokens=30, plausible=False, invalid_turns=1),
    record("b", True, ret=None, tokens=6, labels={**LABELS, "family": "arc"}),
    record("b", False, answered=False, repetition=True, tokens=40, labels={**LABELS, "family": "arc"}),
]


def test_row():
    row = summarise_answers(RECORDS, policy="final", mode="greedy")
    # Two prompts of two episodes each, one of which is solved.
    own = dict(zip(("low", "high"), cluster_interval([1, 1], [2, 2]), strict=True))
    first = dict(zip(("low", "high"), cluster_interval([1, 0], [2, 2]), strict=True))
    half = dict(zip(("low", "high"), cluster_interval([1], [2]), strict=True))
    counts = {"episodes": 2, "clusters": 1, "solved": 1, "solve_rate": 0.5, **half}
    assert row == {
        "policy": "final",
        "mode": "greedy",
        "episodes": 4,
        "clusters": 2,
        "solved": 2,
        "solve_rate": 0.5,
        **own,
        "mean_return": pytest.approx(1 / 3),
        "invalid_share": pytest.approx(1 / 5),
        "pass_at_k": pytest.approx({"1": 0.5, "2": 1.0}),
        "first_attempt": {"episodes": 4, "clusters": 2, "solved": 1, "solve_rate": 0.25, **first},
        "answered_share": 0.75,
        "plausible_share": 0.5,
        "tools": {"called_share": 0.5, "calls": 0.75, "valid_share": pytest.approx(2 / 3)},
        "responses": {
            "tokens_mean": 25.0,
            "tokens_median": 27.0,
            "tokens_max": 40.0,
            "truncated_share": 0.25,
            "repetition_share": 0.25,
        },
        "breakdowns": {
            "family": [
                {"label": "arc", **counts, "first_attempts": 1},
                {"label": "linear_pair", **counts, "first_attempts": 0},
            ],
            "answer_form": [
                {"label": "integer", "episodes": 4, "clusters": 2, "solved": 2, "solve_rate": 0.5, **own}
                | {"first_attempts": 1}
            ],
            "difficulty": [
                {"label": "tiny", "episodes": 4, "clusters": 2, "solved": 2, "solve_rate": 0.5, **own}
                | {"first_attempts": 1}
            ],
        },
    }
    json.dumps(row, allow_nan=False)
    assert answer_numbers(row)["first_attempt_rate"] == 0.25
    # First attempts are unknown where one is.
    row = summarise_answers([*RECORDS, record("c", first_attempt=None)])
    assert row["first_attempt"] is None and row["solved"] == 3
    assert answer_numbers(row)["first_attempt_rate"] is None
    # Numbers of nothing that was played are None, not 0.
    row = summarise_answers([], policy="constant", mode="-")
    assert (row["episodes"], row["low"], row["high"], row["breakdowns"]) == (0, 0.0, 1.0, {})
    assert {name for name, value in answer_numbers(row).items() if value is not None} == {"low", "high"}


OUTCOMES = st.builds(
    record,
    prompt_id=st.sampled_from("abc"),
    success=st.booleans(),
    first_attempt=st.booleans(),
    plausible=st.none() | st.booleans(),
    tokens=st.none() | st.integers(0, 9),
    turns=st.integers(0, 3),
    labels=st.fixed_dictionaries({"family": st.sampled_from(["x", "y"]), "answer_form": st.just("pi")}),
)


@given(st.lists(OUTCOMES, max_size=15))
def test_breakdowns_add_up_and_every_number_is_json(records):
    row = summarise_answers(records)
    json.dumps(row, allow_nan=False)
    for cells in row["breakdowns"].values():
        assert sum(cell["episodes"] for cell in cells) == row["episodes"]
        assert sum(cell["solved"] for cell in cells) == row["solved"]
        assert sum(cell["first_attempts"] for cell in cells) == row["first_attempt"]["solved"]


def test_images_are_those_of_other_problems():
    rows = [{"id": n, "prompt": f"q{n}", "images": [f"one{n}"], "answer": str(n)} for n in range(6)]
    rows += [{"id": 6, "images": ["x", "y"]}, {"id": 7, "images": ["v", "w"]}, {"id": 8, "images": None}]
    shown = shuffle_images(rows, 0)
    assert shown == shuffle_images(rows, 0) != shuffle_images(rows, 1)
    for before, after in zip(rows, shown, strict=True):
        assert {**before, "images": None} == {**after, "images": None}
        assert len(before["images"] or []) == len(after["images"] or [])
    assert all(before["images"] != after["images"] for before, after in zip(rows[:8], shown[:8], strict=True))
    assert sorted(row["images"][0] for row in shown[:6]) == sorted(row["images"][0] for row in rows[:6])
    assert shown[8]["images"] is None
    # A copy has the same image, which is none of another problem; without copies nothing changes.
    copies = [*rows[:6], *({**rows[0], "id": 10 + n} for n in range(4)), *rows[6:]]
    for seed in range(20):
        found = shuffle_images(copies, seed)
        assert all(one["images"] != other["images"] for one, other in zip(copies[:12], found[:12], strict=True))
    alike = [{"id": n, "images": ["x"]} for n in range(3)]
    assert shuffle_images(alike, 0) == alike


@pytest.mark.parametrize(
    ("images", "evaluation", "names"),
    [
        ([["i"], ["j"]], {}, ["_blank", "_shuffled"]),
        ([["i"], ["j"]], {"blank_images": False}, ["_shuffled"]),
        ([["i"], ["j"]], {"shuffled_images": False, "blank_images": False}, []),
        ([[]], {}, []),  # nothing to hide
        ([["i"], ["i"]], {}, ["_blank"]),  # no image of another problem
    ],
)
def test_ablations_of_the_options(images, evaluation, names):
    rows = [{"id": number, "images": shown} for number, shown in enumerate(images)]
    options = Geo3kTrainOptions.model_validate({"evaluation": evaluation})
    assert list(image_ablations(rows, options, 0)) == names


@pytest.mark.parametrize("model", [Geo3kTrainOptions, Geo3kMultiTurnTrainOptions])
def test_players_without_a_policy(model, geometry_rows):
    options = model()
    rows = geometry_rows(60, options.task)
    frequent = rows[0]["answer"]
    training = [*rows, *({**rows[0], "id": f"again{n}"} for n in range(5))]
    found = {row["policy"]: row for row in evaluate_baselines(rows, training, options, 0)}
    assert list(found) == ["label", "most_frequent", "teacher (plausible)"]
    assert found["label"]["solve_rate"] == 1.0
    assert found["most_frequent"]["solved"] == sum(row["answer"] == frequent for row in rows)
    assert found["teacher (plausible)"]["plausible_share"] == 1.0
    several = options.rollout.max_turns > 1
    expert = found["teacher (plausible)"]
    assert (expert["tools"]["calls"] > 0) == several
    assert (expert["solved"] > expert["first_attempt"]["solved"]) == several
    assert 0.08 < expert["first_attempt"]["solve_rate"] < 0.4  # once in five rules, of 60 episodes
    # Without training prompts no answer is the most frequent.
    without = model.model_validate({"warm_start": {"steps": 0}})
    assert [row["policy"] for row in evaluate_baselines(rows[:3], [], without, 0)] == ["label"]


def test_an_environment_of_ones_own_has_no_word_of_geometry(tmp_path, geometry_rows):
    """Neither candidates nor families nor forms of answers mean anything to it, whatever its rows hold."""
    (tmp_path / "own.py").write_text(OWN_ENV)
    expert = {"factory": str(tmp_path / "own.py")}
    env = {"factory": str(tmp_path / "own.py"), "args": {}}
    rows = geometry_rows(12)
    for teacher, names in (
        ({}, ["label", "teacher (candidates)"]),
        (expert, [f"teacher ({expert['factory']})"]),  # how geometry writes a label means nothing to the environment
        ({**expert, "name": "solver"}, [f"teacher (solver of {expert['factory']})"]),
    ):
        options = Geo3kTrainOptions.model_validate({"env": env, "warm_start": {"teacher": teacher}})
        found = evaluate_baselines(rows, rows, options, 0)
        assert [row["policy"] for row in found] == names
        (sentence,) = GEO3K.report.compare({"rows": found}, [])
        assert sentence == f"The expert of the warm start is correct for {write_rate(found[-1])}."
        task = GEO3K.evaluated_in(options.env.factory)
        summary = {"task": "geo3k", "rows": found, "policies": [], **task.describe_prompts(rows, options)}
        shown = [*columns_of(summary), *columns_of(summary, "responses")]
        assert [column.heading for column in shown] == ["invalid responses"]
        tables = read_evaluation(summary)
        words = json.dumps([summary, tables], default=vars)
        assert not re.search("plausible|famil|frequent|integer|scored|figure", words)
        assert tables.kinds == []
    # The package's own environments keep theirs.
    assert GEO3K.evaluated_in(Geo3kTrainOptions().env.factory) is GEO3K


OWN_ENV = """
class Env:
    def reset(self): return {}, {}
    def step(self, text): return {"obs_str": ""}, True, {}
    def format_observation(self, observation): return {"role": "user", "content": [{"type": "text", "text": ""}]}
    def final_metrics(self): return {"success": 1.0}
    def close(self): pass
class Expert:
    def respond(self, env, generator): return "near"
def build_env(sample, args): return Env()
def build_teacher(name, patience, noise): return Expert()
"""
