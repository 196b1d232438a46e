"""GRPO raises a reward: the whole loop on a policy with random weights, which is right half of the time at first.

The same loop with the sign of its advantages turned, or without a learning rate, shows that it is the update that does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from coins import rows_of
from geo_sokoban_pipeline.grpo.scoring import Scores, apply_scores
from geo_sokoban_pipeline.policies.preparing import policy_writer
from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
from geo_sokoban_pipeline.runs.policy_folder import PolicyFolder, write_policy
from geo_sokoban_pipeline.training import collecting
from geo_sokoban_pipeline.training.grpo_loop import RunInputs, run_grpo
from geo_sokoban_pipeline.trajectories.types import Trajectory
from task_options import TinyPolicyOptions, TrainOptions
from training.setup import SIZES, by_iteration, settings

GROUPS, SIZE, ITERATIONS, COMPARED = 8, 8, 20, 5
NOTHING_STORED = {"iteration": -1, "dir": None, "manifest": None, "complete": None, "stored": []}
# Standard error of the difference between two means over COMPARED iterations each, of rewards that are 0 or 1.
NOISE = math.sqrt(2 * 0.25 / (COMPARED * GROUPS * SIZE))


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> PolicyFolder:
    policy = build_tiny_policy(TinyPolicyOptions.model_validate(SIZES), seed=0)
    return write_policy(tmp_path_factory.mktemp("start") / "policy", policy_writer(policy, {}))


def rewards(start: PolicyFolder, base: TrainOptions, seed: int, **changes: Any) -> list[float]:
    """Mean reward of each iteration."""
    given = {
        "env": {"factory": "coins.build_env"},
        "reward": {"function": "coins.solved_reward"},  # 1 for an odd number of characters
        "rollout.max_turns": 1,
        "rollout.max_tokens_per_turn": 1,
        "grpo.credit": "episode",
        "grpo.groups": GROUPS,
        "grpo.group_size": SIZE,
        "optimizer.learning_rate": 0.01,
        "optimizer.warmup_iterations": 0,
        "loop.iterations": ITERATIONS,
    }
    rows = rows_of(GROUPS)
    options = settings(base, given | changes)
    inputs = RunInputs("train_sokoban", seed, options, {}, start, rows, rows)
    _, *chunks, _ = by_iteration(run_grpo(inputs, NOTHING_STORED))
    return [row["rollout/raw_reward"] for chunk in chunks for row in chunk[2].values()]


def gain(means: Sequence[float]) -> float:
    """Mean reward of the last iterations over that of the first ones."""
    assert len(means) == ITERATIONS
    return (sum(means[-COMPARED:]) - sum(means[:COMPARED])) / COMPARED


def turned(trajectories: Sequence[Trajectory], scores: Scores) -> None:
    apply_scores(trajectories, scores)
    for episode in trajectories:
        episode.advantage = None if episode.advantage is None else -episode.advantage


def test_grpo_raises_the_reward(start: PolicyFolder, train_options: TrainOptions) -> None:
    means = rewards(start, train_options, seed=0)
    assert abs(means[0] - 0.5) < 0.2
    assert gain(means) > 5 * NOISE


def test_with_the_sign_of_its_advantages_turned_it_lowers_the_reward(
    start: PolicyFolder, train_options: TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "apply_scores", turned)
    assert gain(rewards(start, train_options, seed=0)) < -5 * NOISE


def test_without_a_learning_rate_it_changes_nothing(start: PolicyFolder, train_options: TrainOptions) -> None:
    assert abs(gain(rewards(start, train_options, seed=0, **{"optimizer.learning_rate": 1e-12}))) < 2.5 * NOISE
