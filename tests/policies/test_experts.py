"""A mixture of experts: its products under mixed precision, and the published layout wherever its weights go."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file

from geo_sokoban_pipeline.config.grpo import OptimizerOptions
from geo_sokoban_pipeline.policies.policy import Policy, save_policy, store_in_compute_type
from geo_sokoban_pipeline.policies.qwen3_vl import mix_experts
from geo_sokoban_pipeline.policies.weights import check_orientation
from geo_sokoban_pipeline.rollout.engines.transformers import TransformersEngine
from geo_sokoban_pipeline.training.backends.torch import TorchBackend
from policies.mixtures import EXPERTS, HIDDEN, INNER, MIXED, build_config, published_weights

LAYER = "model.language_model.layers.0.mlp.experts"


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert weight.shape == theirs[name].shape and torch.equal(weight, theirs[name]), name


def copied(policy, **options):
    return Policy(copy.deepcopy(policy.model), policy.tokenizer, policy.image_processor, **options)


def test_weights_have_the_published_layout_wherever_they_go(mixture, tmp_path):
    """To files, to servers, and to folders that servers take them from; plain transformers loads the files."""
    from transformers import AutoModelForImageTextToText

    published = published_weights(mixture, tmp_path / "library")
    assert tuple(published[f"{LAYER}.gate_up_proj"].shape) == (EXPERTS, HIDDEN, 2 * INNER)
    assert tuple(published[f"{LAYER}.down_proj"].shape) == (EXPERTS, INNER, HIDDEN)
    save_policy(mixture, tmp_path / "saved")
    assert_same(load_file(tmp_path / "saved" / "model.safetensors"), published)
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved")
    assert_same(dict(plain.named_parameters()), dict(mixture.model.named_parameters()))
    backend = TorchBackend(mixture, OptimizerOptions())
    assert_same(dict(backend.weight_source().read()), published)
    backend.weight_source().write(tmp_path / "new", 1 << 30)
    assert_same(load_file(tmp_path / "new" / "model-00000.safetensors"), published)


def test_a_checkpoint_is_loaded_back(mixture, tmp_path):
    trained, fresh, engine = copied(mixture), copied(mixture), TransformersEngine(copied(mixture))
    backend, resumed = (TorchBackend(policy, OptimizerOptions()) for policy in (trained, fresh))
    with torch.no_grad():
        for parameter in trained.model.parameters():
            parameter.mul_(1.5)
    backend.export(tmp_path)
    backend.save_state(tmp_path)
    resumed.load_state(tmp_path)
    engine.update_weights(backend.weight_source(), 1)
    for policy in (resumed.policy, engine.policy):
        assert_same(dict(policy.model.named_parameters()), dict(trained.model.named_parameters()))


@pytest.mark.parametrize("inner", [HIDDEN, HIDDEN // 2])
def test_square_experts_are_refused(tiny_policy, inner):
    with pytest.raises(ValueError, match=f"moe_intermediate_size={inner}: .* do not show the layout"):
        check_orientation(build_config(tiny_policy, **MIXED | {"moe_intermediate_size": inner}))
    check_orientation(build_config(tiny_policy, **MIXED))
    check_orientation(tiny_policy.model.config)


def rows_and_block(mixture):
    block = copy.deepcopy(mixture.model.model.language_model.layers[0].mlp)
    with torch.no_grad():
        for weight in block.parameters():
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) / HIDDEN**0.5)
        # Scores of two experts that are one in bfloat16: rounded products would choose either.
        block.gate.weight[1] = block.gate.weight[0] * (1 + 2**-12)
    return torch.randn(2, 50, HIDDEN, generator=torch.Generator().manual_seed(2)), block


def outcome(block, hidden, compute):
    """(output, gradients by name) with or without mixed precision, and the types that the experts multiplied."""
    block.zero_grad()
    kinds = []
    watch = block.experts.register_forward_hook(
        lambda experts, given, output: kinds.append((given[0].dtype, experts.gate_up_proj.dtype, output.dtype))
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=compute):
        output = mix_experts(block, hidden)
    watch.remove()
    output.float().square().sum().backward()
    return output.detach(), {name: weight.grad.clone() for name, weight in block.named_parameters()}, kinds


def test_experts_multiply_in_the_compute_type_and_are_chosen_in_that_of_the_weights(mixture):
    hidden, block = rows_and_block(mixture)
    exact, exact_gradients, kinds = outcome(block, hidden, compute=False)
    assert torch.equal(exact, block(hidden)) and kinds == [(torch.float32,) * 3]
    rounded, gradients, kinds = outcome(block, hidden, compute=True)
    assert rounded.dtype == torch.bfloat16 and kinds == [(torch.bfloat16,) * 3]
    # Another expert would give another row altogether; 2 % of the largest value is what bfloat16 loses.
    error = (rounded.float() - exact).abs()
    assert 0 < error.max() < 0.02 * exact.abs().max()
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32, name
        assert (gradient - exact_gradients[name]).norm() < 0.02 * exact_gradients[name].norm(), name


@torch.no_grad()
def test_rounding_the_weights_of_experts_once_changes_no_bit(mixture):
    policy = copied(mixture, compute="bfloat16")
    tokens, positions = torch.arange(8)[None] + 10, torch.arange(8).expand(3, 1, 8)
    with policy.computing():
        expected = policy.network(tokens, positions)
    store_in_compute_type(policy)
    layer = policy.model.model.language_model.layers[0].mlp
    assert layer.experts.down_proj.dtype == torch.bfloat16 and layer.gate.weight.dtype == torch.float32
    with policy.computing():
        assert torch.equal(policy.network(tokens, positions), expected)
