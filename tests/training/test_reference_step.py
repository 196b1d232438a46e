"""The trainer's step equals one written out in plain torch, under every estimator, reduction and option that it has.

Each case also says what it changes: the written-out step must differ with and without it, so no case can pass without
its option being in force.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from geo_sokoban_pipeline.envs.sokoban.task import SOKOBAN
from geo_sokoban_pipeline.grpo.scoring import apply_scores, score_groups
from geo_sokoban_pipeline.training.backends.torch import TorchBackend
from geo_sokoban_pipeline.training.grpo_loop import update_policy
from geo_sokoban_pipeline.trajectories.types import Trajectory
from training import reference
from training.setup import Setup, copied, settings, weights
from training.step_cases import CASES, StepCase


def played(setup: Setup, case: StepCase) -> list[Trajectory]:
    """Copies of the episodes of three groups, with the tokens of earlier weights that the case wants."""
    episodes = copy.deepcopy([episode for episode in setup.episodes if episode.group_index > 0])
    if case.stale:
        for episode in episodes[::2]:
            places = np.flatnonzero(episode.loss_mask)
            middle = int(places[len(places) // 2])
            episode.weight_spans = [(0, int(places[0]), middle), (1, middle, len(episode.token_ids))]
        for episode in episodes[1::2]:
            episode.weight_spans = [(1, 0, len(episode.token_ids))]
    return episodes


def expected(setup: Setup, changes: dict[str, Any], case: StepCase, cache: dict[str, Any]) -> Any:
    """Displacement of the weights and metrics of the written-out update."""
    key = json.dumps([changes, case.iteration, case.stale], sort_keys=True)
    if key not in cache:
        options = settings(setup.options, changes)
        policy, episodes = copied(setup.trained), played(setup, case)
        reference.score(episodes, options.grpo, options.reward.args)
        metrics = reference.train(
            policy,
            episodes,
            options.grpo,
            options.optimizer,
            temperature=options.rollout.sampling.temperature,
            iteration=case.iteration,
            seed=7,
            reference=setup.policy,
        )
        cache[key] = weights(policy) - weights(setup.trained), metrics
    return cache[key]


def updated(setup: Setup, changes: dict[str, Any], case: StepCase) -> tuple[Tensor, dict[str, float]]:
    """The same by the project's own trainer."""
    options = settings(setup.options, changes)
    policy = copied(setup.trained)
    backend = TorchBackend(policy, options.optimizer, options.rollout.sampling.temperature)
    scorer = TorchBackend(setup.policy, options.optimizer, options.rollout.sampling.temperature)
    episodes = played(setup, case)
    apply_scores(episodes, score_groups(episodes, options.grpo, SOKOBAN, options.reward.args))
    metrics = update_policy(
        episodes, policy, backend, options.grpo, options.optimizer, case.iteration, 7, scorer.log_probs
    )
    return weights(policy) - weights(setup.trained), metrics


@pytest.fixture(scope="module")
def cache() -> dict[str, Any]:
    """Results of the written-out update by settings."""
    return {}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_step_equals_the_written_out_one(setup: Setup, cache: dict[str, Any], case: StepCase) -> None:
    wanted, metrics = expected(setup, case.given | case.changed, case, cache)
    got, ours = updated(setup, case.given | case.changed, case)
    error, size = float((got - wanted).abs().max()), float(wanted.abs().max())
    assert error <= 1e-5, f"weights differ by {error:.1e} after moves of up to {size:.1e}"
    assert {name for name in ours if name.startswith("train/")} == set(metrics)
    for name, value in metrics.items():
        assert np.isclose(ours[name], value, rtol=1e-3, atol=2e-5), (name, ours[name], value)
    if case.changed:
        without, _ = expected(setup, case.given, case, cache)
        effect = float((wanted - without).abs().max())
        assert case.same or effect >= 2e-4, f"{case.name} moves no weight by more than {effect:.1e}"
