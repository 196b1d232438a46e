"""The environment `slime_exact` of the configuration: its files give valid parameters with the original's rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from geo_sokoban_pipeline.config import validate_parameters
from geo_sokoban_pipeline.envs.geo3k.answer_env import AnswerEnvOptions
from geo_sokoban_pipeline.envs.geo3k.config import Geo3kDataOptions, Geo3kMultiTurnDataOptions
from geo_sokoban_pipeline.envs.geo3k.env import build_env
from geo_sokoban_pipeline.parameters import ProjectParameters
from geo_sokoban_pipeline.rewards.geo3k import AnswerRewardOptions, GradingOptions

CONF = Path(__file__).parents[2] / "conf"


@pytest.fixture(scope="module")
def parameters() -> ProjectParameters:
    """The parameters that a command with `--env=slime_exact` reads."""
    merged: dict[str, Any] = {}
    for environment in ("base", "slime_exact"):
        for file in sorted((CONF / environment / "parameters").glob("*geo3k*.yml")):
            merged = OmegaConf.to_container(OmegaConf.merge(merged, OmegaConf.load(file)))  # type: ignore[assignment]
    return validate_parameters(merged, ProjectParameters)


def test_geometry_data(parameters):
    exact = {"exclude_overlaps", "repair_control_characters", "transparency"}
    for given, model in (
        (parameters.geo3k, Geo3kDataOptions),
        (parameters.geo3k_multi_turn, Geo3kMultiTurnDataOptions),
    ):
        wanted = model.slime_exact()
        assert {name: getattr(given, name) for name in exact} == {name: getattr(wanted, name) for name in exact}


def test_geometry_with_the_scoring_tool(parameters):
    run = parameters.train_geo3k_multi_turn
    env = build_env({"answer": "5"}, run.env.args)
    assert env.options.preset == "slime_exact"
    assert env.options == type(env.options)(preset="slime_exact", max_turns=3)
    assert run.rollout.effective_rules.model_dump() == {
        "turn_separator": False,
        "budget_counts_prompt": True,
        "budget_counts": "response",
        "step_before_finish_check": False,
        "truncate_at_max_turns": False,
        "drop_overflowing_observation": False,
    }
    assert (run.rollout.max_turns, run.rollout.max_response_tokens, run.rollout.max_context_tokens) == (3, 4096, None)


@pytest.mark.parametrize("name", ["train_geo3k", "train_geo3k_multi_turn"])
def test_geometry_rewards_and_updates(parameters, name):
    run = getattr(parameters, name)
    reward = validate_parameters(run.reward.args, AnswerRewardOptions)
    assert (reward.grader, reward.grade_scope) == ("slime_exact", "response")
    assert run.reward.function.endswith(".math_reward")
    grpo = run.grpo
    assert (grpo.groups, grpo.group_size, grpo.credit, grpo.normalize, grpo.filter) == (64, 8, "episode", "std", "none")
    assert (grpo.clip_low, grpo.clip_high, grpo.entropy_coefficient, grpo.reduction) == (0.2, 0.28, 0.0, "sample_mean")


def test_geometry_with_one_response(parameters):
    run = parameters.train_geo3k
    assert validate_parameters(run.env.args, AnswerEnvOptions).grader == "slime_exact"
    assert (run.rollout.max_turns, run.rollout.sampling.temperature) == (1, 0.8)


def test_the_preset_of_grading_is_the_original_grader():
    assert GradingOptions(preset="slime_exact").grader == "slime_exact"
    assert GradingOptions(preset="slime_exact", grader="default").grader == "default"
