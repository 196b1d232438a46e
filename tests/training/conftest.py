"""A policy of 132,000 weights that knows the form of a response, and episodes that it played."""

from __future__ import annotations

from typing import Any

import pytest

from geo_sokoban_pipeline.policies.preparing import policy_writer
from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.runs.policy_folder import write_policy
from geo_sokoban_pipeline.training.collecting import Collector, build_sampler
from geo_sokoban_pipeline.training.sft import run_sft
from task_options import TinyPolicyOptions, TrainOptions
from training.setup import SIZES, Setup, copied, settings, shaken


@pytest.fixture(scope="session")
def setup(sokoban_rows: Any, train_options: TrainOptions, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """Policy, episodes and rows, made once; nothing in it may be changed."""
    rows = sokoban_rows(24, max_solution=3)
    options = settings(train_options, {})
    policy = build_tiny_policy(TinyPolicyOptions.model_validate(SIZES), seed=0)
    run_sft(policy, rows, rows, options, seed=0)
    folder = write_policy(tmp_path_factory.mktemp("start") / "policy", policy_writer(policy, {}))
    engine = build_engine(policy, options.rollout)
    collector = Collector("train_sokoban", 0, options, rows, policy, engine)
    episodes, _ = collector.collect(0, build_sampler(rows, options, 0, None))
    engine.close()
    for episode in episodes:
        episode.advantage, episode.trained = None, False
        for turn in episode.turns:
            turn.advantage = None
    return Setup(policy, shaken(copied(policy)), folder, rows, options, episodes)
