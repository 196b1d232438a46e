"""A policy that has learnt to respond in the game's form, episodes with it, and how far two engines may differ."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from geo_sokoban_pipeline.config.rollout import RolloutOptions, SamplingOptions
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.rollout.rollout import rollout
from servers import strays
from task_options import EnvOptions, RewardOptions

ENV = {"max_actions_per_turn": 1, "cell_px": 16, "observation_style": "brief", "max_steps": 100}


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """No process of a test outlives it, but for servers that wait for the next engine."""
    yield
    assert strays() == []


@pytest.fixture(scope="session")
def player(tiny_policy: Policy, sokoban_rows: Any, train_options: Any) -> Policy:
    """The tiny policy after a short warm start: its responses end by themselves, so its episodes have many turns."""
    from geo_sokoban_pipeline.training.sft import run_sft

    policy = copy.deepcopy(tiny_policy)
    rows = sokoban_rows(16)
    warm = train_options.warm_start.model_copy(
        update={"steps": 60, "episodes_per_step": 8, "warmup_steps": 5, "play_every": 0, "learning_rate": 0.003}
    )
    options = train_options.model_copy(update={"warm_start": warm})
    run_sft(policy, [row for row in rows if row["split"] == "train"], rows, options, seed=0)
    return policy


@pytest.fixture(scope="session")
def make_tasks(sokoban_rows: Any) -> Callable[[int, int], list[EpisodeRequest]]:
    """`make_tasks(groups, size)`: episodes of different levels."""

    def make(groups: int, size: int) -> list[EpisodeRequest]:
        rows = [row for row in sokoban_rows(groups) if row["split"] == "train"]
        return [EpisodeRequest(f"g{g}/s{s}", rows[g], g, s, 100 * g + s) for g in range(groups) for s in range(size)]

    return make


@pytest.fixture(scope="session")
def play() -> Callable[..., list[Any]]:
    """`play(engine, policy, tasks, sampling, turns=…)`: episodes to their ends."""

    def run(
        engine: Any, policy: Policy, tasks: list[EpisodeRequest], sampling: SamplingOptions, turns: int = 8
    ) -> list:
        limits = RolloutOptions(max_turns=turns, max_tokens_per_turn=8)
        settings = RolloutSettings(EnvOptions(args=ENV), RewardOptions(), limits, sampling, 0, "sokoban")
        return rollout(engine, policy, tasks, settings)

    return run
