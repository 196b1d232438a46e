"""Matrix products in bfloat16 over float32 weights: engine and trainer agree, gradients and weights stay exact."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from geo_sokoban_pipeline.config.grpo import GrpoOptions, OptimizerOptions
from geo_sokoban_pipeline.config.rollout import RolloutOptions, SamplingOptions
from geo_sokoban_pipeline.grpo.loss import GrpoObjective
from geo_sokoban_pipeline.rollout.engines.transformers import TransformersEngine
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.rollout.rollout import rollout
from geo_sokoban_pipeline.training.backends.torch import TorchBackend
from geo_sokoban_pipeline.training.batch import build_sample
from task_options import EnvOptions, RewardOptions


@pytest.fixture(scope="module")
def mixed(tiny_policy):
    policy = copy.deepcopy(tiny_policy)
    policy.compute = "bfloat16"
    return policy


@pytest.fixture(scope="module")
def samples(mixed, sokoban_rows):
    env = EnvOptions(args={"cell_px": 16, "max_actions_per_turn": 1})
    limits = RolloutOptions(max_turns=2, max_tokens_per_turn=6)
    settings = RolloutSettings(env, RewardOptions(), limits, SamplingOptions(), 0, "sokoban")
    tasks = [EpisodeRequest(f"e{number}", row, 0, number, number) for number, row in enumerate(sokoban_rows(3))]
    episodes = rollout(TransformersEngine(mixed), mixed, tasks, settings)
    found = [build_sample(episode, mixed) for episode in episodes]
    for number, sample in enumerate(found):
        sample.advantages[:] = number - 1.0
    return found


def test_it_rounds_and_no_more_and_engine_and_trainer_agree(mixed, tiny_policy, samples):
    rounded = TorchBackend(mixed, OptimizerOptions()).log_probs(samples)
    for row, sample in zip(rounded, samples, strict=True):
        np.testing.assert_allclose(row, sample.rollout_log_probs, atol=0.05)
    exact = np.concatenate(TorchBackend(tiny_policy, OptimizerOptions()).log_probs(samples))
    assert 1e-5 < np.abs(np.concatenate(rounded) - exact).max() < 0.1


def test_a_step_moves_float32_weights(mixed, samples):
    policy = copy.deepcopy(mixed)
    before = {name: weight.detach().clone() for name, weight in policy.model.named_parameters()}
    backend = TorchBackend(policy, OptimizerOptions(learning_rate=1e-6, weight_decay=0.0))
    metrics = backend.step(samples, GrpoObjective(GrpoOptions(reduction="sample_mean")), 1e-6)
    assert metrics["skipped"] == 0 and metrics["grad_norm"] > 0
    weights = dict(policy.model.named_parameters())
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    steps = torch.cat([(weight - before[name]).abs().flatten() for name, weight in weights.items()])
    # In bfloat16 no weight above 1e-3 could move by a millionth.
    assert 0 < steps.max() < 3e-6 and (steps > 0).float().mean() > 0.5
