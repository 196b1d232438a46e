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

from geo_sokoban_pipeline.distributed.fsdp import gather, shard_modules
from geo_sokoban_pipeline.grpo.loss import SftObjective, StepSize
from geo_sokoban_pipeline.policies.policy import use_types
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


@pytest.mark.parametrize(
    "setting",
    [{}, {"logit_chunk": 2, "vision_patches": 8, "gradient_checkpointing": True}, {"max_tokens": 20}],
    ids=["at once", "in parts", "micro-batches"],
)
def test_gathers_in_the_type_of_products_change_no_bit(policy, mesh, setting):
    """Where logits are made in chunks, the gradient of a head of its own is rounded once."""
    batch, found = build_samples(policy), []
    for products in ("one process", None, torch.bfloat16):
        own = copy.deepcopy(policy)
        own.compute = "bfloat16"
        if products != "one process":
            shard_modules(own.network.language, own.network.vision, mesh, products=products)
        before, loss = learn(own, batch, **setting)
        gradients = {name: gather(parameter.grad) for name, parameter in own.model.named_parameters()}
        found.append((np.concatenate(before), loss, gradients))
    for scores, loss, gradients in found[1:]:
        np.testing.assert_array_equal(scores, found[0][0])
        assert loss == found[0][1]
        for name, wanted in found[0][2].items():
            if name == "lm_head.weight" and "logit_chunk" in setting:
                assert (gradients[name] - wanted).norm() <= 2**-8 * wanted.norm()
            else:
                assert torch.equal(gradients[name], wanted), name


def test_each_weight_is_gathered_in_the_type_of_its_use(policy, mesh):
    policy = copy.deepcopy(policy)
    policy.compute = "bfloat16"
    types, language, seen = use_types(policy), policy.network.language, {}
    names = {id(module): name for name, module in policy.model.named_modules()}
    shard_modules(language, policy.network.vision, mesh, products=torch.bfloat16)

    def note(module, *_):
        for name, parameter in module.named_parameters(recurse=False):
            if (full := f"{names[id(module)]}.{name}") in types:  # a head that is the embeddings is not
                seen[full] = parameter.dtype

    for module in language.modules():
        if id(module) in names and next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(note)
    learn(policy, build_samples(policy), gradient_checkpointing=True)
    assert seen and seen == {name: types[name] for name in seen}
    assert {kind for name, kind in seen.items() if "layers" in name} == {torch.float32, torch.bfloat16}


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
