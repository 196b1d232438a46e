"""Policies whose responses differ in length."""

from __future__ import annotations

import copy

import pytest
import torch

from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
from task_options import TinyPolicyOptions


def ending_early(policy, bias):
    """A copy with a bias to end its responses, so that they differ in length and episodes in turns."""
    policy = copy.deepcopy(policy)
    biases = torch.zeros(policy.model.config.text_config.vocab_size)
    biases[policy.codec.end_id] = bias
    policy.model.lm_head.bias = torch.nn.Parameter(biases, requires_grad=False)
    return policy


@pytest.fixture(scope="session")
def talker(tiny_policy):
    return ending_early(tiny_policy, 4.5)


@pytest.fixture(scope="session")
def grouped():
    """Three layers, two of them fed by the vision tower, grouped key-value heads."""
    options = TinyPolicyOptions(layers=3, heads=4, kv_heads=2, vision_layers=3, deepstack=(0, 2))
    return ending_early(build_tiny_policy(options, seed=4), 3.0)


@pytest.fixture
def passes(talker):
    """(conversations, tokens) of each forward pass of the talker, in order."""
    seen: list[tuple[int, int]] = []
    handle = talker.network.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape)))
    yield seen
    handle.remove()
