"""Policies of three shapes, for what must hold whatever the number of layers."""

from __future__ import annotations

import pytest

from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
from policies.mixtures import build_mixture
from task_options import TinyPolicyOptions


@pytest.fixture(scope="package")
def deep_policy() -> Policy:
    """Two deepstack layers, three language layers, grouped key-value heads."""
    options = TinyPolicyOptions(layers=3, heads=4, kv_heads=2, vision_layers=3, deepstack=(0, 2))
    return build_tiny_policy(options, seed=4)


@pytest.fixture(scope="package")
def mixture(tiny_policy: Policy) -> Policy:
    """A mixture of experts."""
    return build_mixture(tiny_policy)


@pytest.fixture(params=["tiny_policy", "deep_policy", "mixture"])
def policy(request: pytest.FixtureRequest) -> Policy:
    """Each of the three in turn."""
    found: Policy = request.getfixturevalue(request.param)
    return found
