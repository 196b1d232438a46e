"""Geometry in the episode loop: a tiny policy calls the scoring tool and hears the score; rows keep the contract."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from geo_sokoban_pipeline.config.rollout import RolloutOptions, RolloutRules, SamplingOptions
from geo_sokoban_pipeline.evaluation.audit import check_token_parity
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.rollout.rollout import rollout
from geo_sokoban_pipeline.training.sft import run_sft
from geo_sokoban_pipeline.trajectories.schema import validate_trajectories
from geo_sokoban_pipeline.trajectories.types import Trajectory, table_to_trajectories, trajectories_to_table
from option_fields import with_value
from task_options import EnvOptions, RewardOptions, conf_options

TURNS = 3
Rows = list[dict[str, Any]]


def settings(factory: str = "env", reward: str = "math_reward", **changes: Any) -> RolloutSettings:
    preset = changes.pop("preset", "default")
    rollout = {"max_turns": TURNS, "max_tokens_per_turn": 64, "max_failed_share": 0.0} | changes
    env = {"preset": preset, "max_turns": TURNS, "feedback": "brief"} if factory == "env" else {"preset": preset}
    return RolloutSettings(
        EnvOptions(factory=f"geo_sokoban_pipeline.envs.geo3k.{factory}.build_env", args=env),
        RewardOptions(function=f"geo_sokoban_pipeline.rewards.geo3k.{reward}", args={"preset": preset}),
        RolloutOptions(**rollout),
        SamplingOptions(),
        iteration=0,
        task="geo3k_multi_turn" if factory == "env" else "geo3k",
    )


@pytest.fixture(scope="module")
def rows(geometry_rows: Any) -> Rows:
    """Prompts of generated problems, as the data pipeline makes them."""
    return geometry_rows(6, "geo3k_multi_turn")


@pytest.fixture(scope="module")
def caller(tiny_policy: Policy, rows: Rows) -> Policy:
    """The tiny policy after it has learnt by imitation what a call looks like, and no more."""
    policy = copy.deepcopy(tiny_policy)
    warm = {"steps": 80, "episodes_per_step": 8, "learning_rate": 0.004, "warmup_steps": 0, "play_every": 0}
    changes = {f"warm_start.{name}": value for name, value in warm.items()}
    run_sft(policy, rows, rows, with_value(conf_options("geo3k_multi_turn"), changes), seed=0)
    return policy


def play(policy: Policy, rows: Rows, chosen: RolloutSettings, samples: int = 4) -> list[Trajectory]:
    tasks = [
        EpisodeRequest(f"p{group}/s{sample}", row, group, sample, 1000 * group + sample)
        for group, row in enumerate(rows)
        for sample in range(samples)
    ]
    return rollout(build_engine(policy, chosen.rollout), policy, tasks, chosen)


def check(policy: Policy, episodes: list[Trajectory], *, turn_separator: bool = True) -> list[Trajectory]:
    """Contract and template parity, before and after the way through a table."""
    table = trajectories_to_table(episodes, policy.table_context)
    validate_trajectories(table)
    stored = table_to_trajectories(table)
    assert check_token_parity(stored, policy.codec, turn_separator=turn_separator) == []
    return stored


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["default", "slime_exact"])
def test_episodes_with_the_scoring_tool(caller: Policy, rows: Rows, preset: str) -> None:
    rules = RolloutRules(turn_separator=preset == "default", budget_counts_prompt=preset != "default")
    episodes = check(
        caller, play(caller, rows, settings(preset=preset, rules=rules)), turn_separator=preset == "default"
    )
    assert {episode.status for episode in episodes} <= {"completed", "truncated"}
    several = [episode for episode in episodes if episode.metrics["turns"] > 1]
    assert len(several) >= len(episodes) // 4, "the policy has learnt to call"
    assert sum(episode.metrics["valid_tool_calls"] for episode in episodes) >= len(episodes)
    for episode, row in zip(episodes, (row for row in rows for _ in range(4)), strict=True):
        answers = [turn for turn in episode.turns if turn.role == "assistant"]
        scored = [turn.info["answer"] for turn in answers if turn.info.get("tool_executed")]
        assert [turn.action for turn in answers if turn.info.get("tool_executed")] == scored
        assert (episode.label, episode.task_id) == (row["answer"], row["problem_hash"])
        assert episode.metrics[f"family_{row['family']}"] == 1.0
        if preset == "default":
            assert episode.reward == episode.reward_parts["correct"] == episode.metrics["success"]
            told = [turn.text for turn in episode.turns[2:] if turn.role == "user"]
            assert all(text.startswith(("wrong", "no ")) for text in told), "a correct answer ends the episode"
    assert {episode.metrics["tool_correct"] for episode in episodes} == {0.0, 1.0}
    assert {episode.reward for episode in episodes} == {0.0, 1.0}


@pytest.mark.slow
def test_episodes_with_one_response(caller: Policy, rows: Rows) -> None:
    chosen = settings("answer_env", "format_reward", max_turns=1)
    episodes = check(caller, play(caller, rows, chosen))
    assert {len(episode.turns) for episode in episodes} == {2}
    boxed = [episode for episode in episodes if episode.metrics["has_answer"]]
    assert boxed
    for episode in boxed:
        info = episode.turns[1].info
        if info:  # a response that was cut off is graded, but no step was made with it
            assert info["score"] == episode.metrics["success"]
        assert episode.reward == pytest.approx(0.9 * episode.metrics["success"])


def test_a_policy_that_says_anything_ends_each_episode_after_one_response(tiny_policy: Policy, rows: Rows) -> None:
    episodes = check(tiny_policy, play(tiny_policy, rows, settings(), samples=2))
    assert {episode.metrics["turns"] for episode in episodes} == {1.0}
    assert {episode.reward for episode in episodes} == {0.0}
    assert not any(episode.metrics["valid_tool_calls"] for episode in episodes)
