"""What FSDP2 needs of the network: every weight is used inside the `forward` of a unit, whose hooks gather it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from geo_sokoban_pipeline.grpo.loss import SftObjective, StepSize
from geo_sokoban_pipeline.training.backends.torch import GradientPass, PassSetting
from policies.library import build_samples


@pytest.fixture
def mesh():
    """Of this process alone: weights leave their modules between passes as with many ranks."""
    if dist.is_initialized():  # by an earlier test that offloads
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def learn(policy, batch, **setting):
    chosen = {"temperature": 1.0, "max_tokens": 64, "logit_chunk": 100} | setting
    passes = GradientPass(policy, PassSetting(**chosen))
    before = passes.log_probs(batch)
    return before, passes.accumulate(batch, SftObjective(), StepSize.of(batch))["loss"]


@pytest.mark.parametrize(
    "setting",
    [{}, {"logit_chunk": 2}, {"vision_patches": 8}, {"gradient_checkpointing": True}],
    ids=["at once", "logits in chunks", "vision in parts", "checkpointing"],
)
def test_sharded_units_give_the_same_gradients(policy, mesh, setting):
    compare(policy, mesh, **setting)


def test_sharded_experts_do_too_in_bfloat16(mixture, mesh):
    policy = copy.deepcopy(mixture)
    policy.compute = "bfloat16"
    compare(policy, mesh, gradient_checkpointing=True)


def compare(policy, mesh, **setting):
    """Learn from some samples with the policy and with a sharded copy."""
    plain, sharded = copy.deepcopy(policy), copy.deepcopy(policy)
    network = sharded.network
    for layer in network.language.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(network.language, mesh=mesh)
    fully_shard(network.vision, mesh=mesh)
    batch = build_samples(policy)
    expected, loss = learn(plain, batch, **setting)
    found, sharded_loss = learn(sharded, batch, **setting)
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(expected), atol=1e-6)
    assert sharded_loss == pytest.approx(loss, abs=1e-6)
    assert isinstance(network.language, FSDPModule)
    theirs = dict(plain.model.named_parameters())
    for name, parameter in sharded.model.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert isinstance(parameter.grad, DTensor), name
        torch.testing.assert_close(parameter.grad.full_tensor(), theirs[name].grad, atol=1e-6, rtol=1e-4)
