"""GRPO raises a reward: the whole loop on a policy with random weights, which is right half of the time at first.

The same loop with the sign of its advantages turned, or without a learning rate, shows that it is the update that does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coins import rows_of
from geo_sokoban_pipeline.grpo.scoring import Scores, apply_scores
from geo_sokoban_pipeline.policies.preparing import policy_writer
from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
from geo_sokoban_pipeline.runs.policy_folder import write_policy
from geo_sokoban_pipeline.training import collecting
from geo_sokoban_pipeline.training.grpo_loop import RunInputs, run_grpo
from geo_sokoban_pipeline.trajectories.types import Trajectory
from task_options import TinyPolicyOptions, TrainOptions
from training.setup import NOTHING_STORED, SIZES, by_iteration, settings

GROUPS, SIZE, ITERATIONS, COMPARED = 8, 8, 20, 5
# Standard error of the difference between two means over COMPARED iterations each, of rewards that are 0 or 1.
NOISE = math.sqrt(2 * 0.25 / (COMPARED * GROUPS * SIZE))


GIVEN = {
    "env": {"factory": "coins.build_env"},
    "reward": {"function": "coins.solved_reward"},  # 1 for an odd number of characters
    "rollout.max_turns": 1,
    "rollout.max_tokens_per_turn": 1,
    "grpo.advantage": "dr_grpo",
    "grpo.groups": GROUPS,
    "grpo.group_size": SIZE,
    "optimizer.warmup_iterations": 0,
    "loop.iterations": ITERATIONS,
}


def turned(trajectories: Sequence[Trajectory], scores: Scores) -> None:
    apply_scores(trajectories, scores)
    for episode in trajectories:
        episode.advantage = None if episode.advantage is None else -episode.advantage


@pytest.mark.parametrize(
    ("score", "rate", "low", "high"),
    [
        (apply_scores, 0.01, 5, math.inf),  # it raises the reward
        (turned, 0.01, -math.inf, -5),
        (apply_scores, 1e-12, -2.5, 2.5),
    ],
    ids=["as it is", "advantages turned", "no learning rate"],
)
def test_the_update_raises_the_reward(
    train_options: TrainOptions,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    score: Any,
    rate: float,
    low: float,
    high: float,
) -> None:
    """By so many standard errors, in the last iterations over the first ones."""
    monkeypatch.setattr(collecting, "apply_scores", score)
    policy = build_tiny_policy(TinyPolicyOptions.model_validate(SIZES), seed=0)
    start = write_policy(tmp_path / "policy", policy_writer(policy, {}))
    rows, options = rows_of(GROUPS), settings(train_options, GIVEN | {"optimizer.learning_rate": rate})
    inputs = RunInputs("train_sokoban", 0, options, {}, start, rows, rows)
    _, *chunks, _ = by_iteration(run_grpo(inputs, NOTHING_STORED, 0))
    means = [row["rollout/raw_reward"] for chunk in chunks for row in chunk[2].values()]
    assert len(means) == ITERATIONS and abs(means[0] - 0.5) < 0.2
    gain = (sum(means[-COMPARED:]) - sum(means[:COMPARED])) / COMPARED
    assert low * NOISE < gain < high * NOISE
