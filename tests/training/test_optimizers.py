"""Optimizers: which parameters Muon moves, how far, and that their state survives a folder bit for bit."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from geo_sokoban_pipeline.config.grpo import OptimizerOptions
from geo_sokoban_pipeline.grpo.loss import SftObjective
from geo_sokoban_pipeline.training.backends.optim import Muon, Optimizers, is_inner_matrix, orthogonalise
from geo_sokoban_pipeline.training.backends.torch import TorchBackend
from geo_sokoban_pipeline.training.batch import TrainSample


@pytest.mark.parametrize(
    ("name", "shape", "inner"),
    [
        ("model.language_model.layers.0.mlp.up_proj.weight", (192, 64), True),
        ("model.visual.blocks.0.attn.qkv.weight", (192, 64), True),
        ("model.visual.merger.linear_fc1.weight", (256, 256), True),
        ("model.visual.deepstack_merger_list.0.linear_fc2.weight", (64, 256), True),
        ("model.visual.blocks.0.attn.qkv.bias", (192,), False),
        ("model.language_model.layers.0.input_layernorm.weight", (64,), False),
        ("model.language_model.embed_tokens.weight", (448, 64), False),
        ("model.visual.pos_embed.weight", (256, 64), False),
        ("model.visual.patch_embed.proj.weight", (64, 3, 2, 16, 16), False),
        ("lm_head.weight", (448, 64), False),
    ],
)
def test_inner_matrices(name, shape, inner):
    assert is_inner_matrix(name, torch.zeros(shape)) == inner


@pytest.mark.parametrize("shape", [(64, 64), (192, 64), (64, 192), (1, 8)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_singular_values_come_near_one(shape, scale):
    matrix = scale * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrix))
    # The smallest ones of a square matrix begin too near 0 to be there after five iterations.
    assert values.max() < 1.25 and values.median() > 0.6


def test_a_zero_gradient_moves_nothing():
    assert torch.equal(orthogonalise(torch.zeros(4, 6)), torch.zeros(4, 6))


def test_steps_equal_those_of_torch():
    """torch's own iterates in bfloat16, hence the tolerance: a hundredth of an update."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(32, 48, generator=generator)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    first = Muon([ours], lr=0.1, weight_decay=0.01)
    second = torch.optim.Muon([theirs], lr=0.1, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        gradient = torch.randn(32, 48, generator=generator)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        first.step()
        second.step()
    moved = (ours - start).pow(2).mean().sqrt()
    assert (ours - theirs).pow(2).mean().sqrt() < 0.03 * moved


@pytest.mark.parametrize("matrices", ["adamw", "muon"])
def test_one_rate_moves_both_kinds_equally_far(matrices):
    """Root mean square of an update over the learning rate: 0.2 by construction for Muon, near it for AdamW."""
    name = "layers.0.weight"
    parameters = {name: torch.nn.Parameter(torch.zeros(64, 192))}
    options = OptimizerOptions(matrices=matrices, learning_rate=0.01)
    optimizers = Optimizers(parameters, options)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        before = parameters[name].detach().clone()
        parameters[name].grad = torch.randn(64, 192, generator=generator)
        optimizers.step(0.01)
    rate = 0.02 if matrices == "muon" else 0.01  # Muon's is twice AdamW's
    moved = float((parameters[name].detach() - before).pow(2).mean().sqrt()) / rate
    assert 0.1 < moved < 0.6


@pytest.mark.parametrize("matrices", ["adamw", "muon"])
def test_a_loaded_state_goes_on_bit_for_bit(tiny_policy, tmp_path, matrices):
    options = OptimizerOptions(matrices=matrices)
    policy = copy.deepcopy(tiny_policy)
    backend = TorchBackend(policy, options)

    def step(trained, number):
        ids = np.random.default_rng(number).integers(0, 300, 12)
        positions, targets = np.tile(np.arange(12), (3, 1)), np.arange(4, 12)
        trained.step([TrainSample(ids, positions, targets, ids[targets], [])], SftObjective(), 1e-3)

    step(backend, 0)
    step(backend, 1)
    backend.export(tmp_path)
    backend.save_state(tmp_path)
    other = TorchBackend(copy.deepcopy(tiny_policy), options)
    other.load_state(tmp_path)
    step(backend, 2)
    step(other, 2)
    for (name, ours), (_, theirs) in zip(backend.weight_source().read(), other.weight_source().read(), strict=True):
        assert torch.equal(ours, theirs), name
    ours, theirs = backend.optimizers.state(), other.optimizers.state()
    assert ours[1] == theirs[1] == 3
    assert ours[0].keys() == theirs[0].keys()
    assert all(torch.equal(value, theirs[0][name]) for name, value in ours[0].items())
    assert any(name.startswith("momentum.") for name in ours[0]) == (matrices == "muon")
