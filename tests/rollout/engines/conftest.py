"""A policy whose responses differ in length."""

from __future__ import annotations

import copy

import pytest
import torch


@pytest.fixture(scope="session")
def talker(tiny_policy):
    """The tiny policy with a bias to end its responses, so that they differ in length and episodes in turns."""
    policy = copy.deepcopy(tiny_policy)
    bias = torch.zeros(policy.model.config.text_config.vocab_size)
    bias[policy.codec.end_id] = 4.5
    policy.model.lm_head.bias = torch.nn.Parameter(bias, requires_grad=False)
    return policy


@pytest.fixture
def passes(talker):
    """(conversations, tokens) of each forward pass of the talker, in order."""
    seen: list[tuple[int, int]] = []
    handle = talker.network.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape)))
    yield seen
    handle.remove()
