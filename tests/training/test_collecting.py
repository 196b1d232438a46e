"""Metrics of a rollout, counted by hand on four episodes that differ in everything that is counted."""

from __future__ import annotations

import numpy as np
import pytest

from builders import make_trajectories
from geo_sokoban_pipeline.training.collecting import describe_rollout
from geo_sokoban_pipeline.trajectories.types import Trajectory


@pytest.fixture
def episodes() -> list[Trajectory]:
    """Solved, not solved, truncated, failed; of 4, 8, 4 and 4 sampled tokens with log-probs −1, −2, −3 and −4."""
    made = [*make_trajectories(4, turns=1, reply_tokens=4)]
    made[1] = make_trajectories(1, turns=2, reply_tokens=4)[0]
    for number, episode in enumerate(made):
        episode.reward, episode.advantage, episode.trained = float(number), number / 2, number < 2
        episode.rollout_log_probs = np.where(episode.loss_mask == 1, -1.0 - number, 0.0).astype(np.float32)
        episode.metrics = {"success": float(number == 0), "turns": number + 1.0}
        episode.timings = {"engine": 1.0 + number, "env": 10.0 * number}
        episode.response = "a b c"
    made[1].metrics["tool_calls"] = 3.0
    made[2].status = "truncated"
    failed = made[3]
    failed.status, failed.reward, failed.advantage, failed.metrics = "failed", None, None, {}
    return made


def test_metrics_of_a_rollout(episodes: list[Trajectory]) -> None:
    metrics = describe_rollout(episodes, 2.0, [("tool_calls", "tool_calls/mean")], processes=2)
    tokens = sum(len(episode.token_ids) for episode in episodes)
    assert metrics == pytest.approx(
        {
            "rollout/episodes": 4.0,
            "rollout/raw_reward": 1.0,  # of 0, 1 and 2
            "rollout/returns": 1.0,
            "rollout/advantages": 0.5,  # of 0, 1/2 and 1
            "rollout/rollout_log_probs": -(4 * 1 + 8 * 2 + 4 * 3 + 4 * 4) / 20,
            "rollout/success_rate": 1 / 3,
            "rollout/response_len/mean": 5.0,
            "rollout/response_len/median": 4.0,
            "rollout/response_len/max": 8.0,
            "rollout/response_len/min": 4.0,
            "rollout/truncated_ratio": 0.25,
            "rollout/repetition_frac": 0.0,
            "rollout/turns/mean": (1 + 2 + 3 + 0) / 4,
            "rollout/tool_calls/mean": 3.0,
            "rollout/failed_ratio": 0.25,
            "rollout/trained_ratio": 0.5,
            "perf/rollout_time": 2.0,
            "perf/engine_time": (1 + 2 + 3 + 4) / 2,
            "perf/env_time": (0 + 10 + 20 + 30) / 2,
            "perf/tokens_per_second": tokens / 2.0,
        }
    )


def test_what_no_episode_can_tell_is_none() -> None:
    metrics = describe_rollout([], 0.0)
    assert metrics["rollout/episodes"] == metrics["perf/tokens_per_second"] == 0.0
    assert {metrics[f"rollout/{name}"] for name in ("raw_reward", "success_rate", "rollout_log_probs")} == {None}
