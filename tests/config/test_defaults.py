"""Defaults: those of each task wherever a section is given in part, and what one section takes from another."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from pydantic import BaseModel

from geo_sokoban_pipeline.envs.geo3k.config import Geo3kDataOptions, Geo3kMultiTurnDataOptions
from geo_sokoban_pipeline.parameters import ProjectParameters
from geo_sokoban_pipeline.rewards.geo3k import GradingOptions
from option_fields import value_at
from task_options import (
    ControlOptions,
    Geo3kMultiTurnTrainOptions,
    Geo3kTrainOptions,
    StudyDefinition,
    TrainOptions,
)

GEOMETRY = "geo_sokoban_pipeline.envs.geo3k"
IN_PART = {
    "env": {"args": {"grader": "geo3k"}},
    "reward": {"args": {}},
    "warm_start": {"steps": 3, "teacher": {"noise": 0.5}},
    "policy": {"tiny": {"hidden": 32}},
    "grpo": {"groups": 2},
    "rollout": {"sampling": {"temperature": 0.7}},
}


@pytest.mark.parametrize(
    ("model", "given", "expected"),
    [
        (ProjectParameters, {}, {"run_id": "default", "seed": 0, "fresh": False, "tracking.enabled": True}),
        (StudyDefinition, {}, {"seeds": (0, 1, 2)}),
        (ControlOptions, {}, {"source.run": "train_sokoban"}),
        (TrainOptions, {}, {"policy.tiny.texts": "sokoban"}),
        (
            Geo3kTrainOptions,
            IN_PART,
            {
                "env.factory": f"{GEOMETRY}.answer_env.build_env",
                "reward.function": "geo_sokoban_pipeline.rewards.geo3k.math_reward",
                "warm_start.teacher.name": "plausible",
                "warm_start.teacher.factory": f"{GEOMETRY}.expert.build_teacher",
                "policy.tiny.texts": "geo3k",
                "grpo.advantage": "dr_grpo",
                "rollout.max_turns": 1,
            },
        ),
        (
            Geo3kMultiTurnTrainOptions,
            {"rollout": {"max_tokens_per_turn": 9}},
            {
                "env.factory": f"{GEOMETRY}.env.build_env",
                "env.args.max_turns": 3,
                "rollout.max_turns": 3,
                "policy.tiny.texts": "geo3k",
            },
        ),
        (Geo3kTrainOptions, {}, {"evaluation.image_ablations": 2}),
        (Geo3kTrainOptions, {"evaluation": {"blank_images": False}}, {"evaluation.image_ablations": 1}),
        (Geo3kTrainOptions, {"evaluation": {"shuffled_images": False}}, {"evaluation.image_ablations": 1}),
        # Worked example 13.9: temperature 0.8 and top_p 1 of the rollout, top_k 1 of the evaluation, one sample.
        (
            TrainOptions,
            {"rollout": {"sampling": {"temperature": 0.8}}, "evaluation": {"sampling": {"top_k": 1}}},
            {
                "evaluation.samples": 1,
                "evaluation_sampling.temperature": 0.8,
                "evaluation_sampling.top_p": 1.0,
                "evaluation_sampling.top_k": 1,
            },
        ),
        (GradingOptions, {"preset": "slime_exact"}, {"grader": "slime_exact"}),
        (GradingOptions, {"preset": "slime_exact", "grader": "default"}, {"grader": "default"}),
    ],
)
def test_what_a_section_in_part_has(model: type[BaseModel], given: dict[str, Any], expected: dict[str, Any]) -> None:
    options = model.model_validate(given)
    assert {path: value_at(options, path) for path in expected} == expected


def test_only_the_instruction_differs_between_the_data_of_geometry() -> None:
    single, multi = Geo3kDataOptions().model_dump(), Geo3kMultiTurnDataOptions().model_dump()
    assert (single.pop("instruction"), multi.pop("instruction")) == ("question", "tool_brief")
    assert single == multi


def test_options_with_a_tasks_defaults_are_sent_to_other_processes_as_plain_ones() -> None:
    """A process that was started anew has no class of that name."""
    given = Geo3kMultiTurnTrainOptions.model_validate({"warm_start": {"teacher": {"args": {"a": 1}}}})
    sent = pickle.loads(pickle.dumps(given))
    assert type(sent).__module__ == "geo_sokoban_pipeline.config.grpo"
    assert sent.model_dump() == given.model_dump()
