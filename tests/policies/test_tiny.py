"""The tiny policy: weights are a function of options and seed, and nothing outside sees that they were drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
from policies.library import library_inputs, read_noise
from task_options import TinyPolicyOptions


def weights(policy):
    return dict(policy.model.named_parameters())


def test_weights_are_a_function_of_the_seed(tiny_policy):
    same, other = (weights(build_tiny_policy(TinyPolicyOptions(), seed)) for seed in (0, 1))
    for name, tensor in weights(tiny_policy).items():
        assert torch.equal(tensor, same[name]), name
    drawn = [name for name, tensor in same.items() if tensor.dim() > 1]
    assert drawn
    assert not any(torch.equal(same[name], other[name]) for name in drawn)


def test_global_generator_is_left_alone():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    build_tiny_policy(TinyPolicyOptions(), seed=3)
    assert torch.equal(before, torch.random.get_rng_state())


def test_weights_do_not_depend_on_the_global_generator(tiny_policy):
    torch.manual_seed(99)
    again = weights(build_tiny_policy(TinyPolicyOptions(), seed=0))
    assert all(torch.equal(tensor, again[name]) for name, tensor in weights(tiny_policy).items())


def test_size(tiny_policy):
    count = sum(tensor.numel() for tensor in tiny_policy.model.parameters())
    assert 0.44e6 < count < 0.46e6
    assert {tensor.dtype for tensor in tiny_policy.model.parameters()} == {torch.float32}
    assert tiny_policy.model.lm_head.weight is tiny_policy.model.model.language_model.embed_tokens.weight


@pytest.mark.parametrize("spread", [0.1, 0.02])
def test_initializer_range(spread):
    policy = build_tiny_policy(TinyPolicyOptions(initializer_range=spread), seed=0)
    core = policy.model.model
    for module in (core.language_model.layers[0].mlp.up_proj, core.visual.blocks[0].mlp.linear_fc1):
        assert float(module.weight.detach().std()) == pytest.approx(spread, rel=0.1)


@pytest.mark.parametrize("head_dim", [8, 16, 32, 64])
def test_position_sections_fill_half_a_head(head_dim):
    options = TinyPolicyOptions(head_dim=head_dim)
    config = build_tiny_policy(options, seed=0).model.config.text_config
    assert sum(config.rope_parameters["mrope_section"]) == head_dim // 2
    assert config.vocab_size % 64 == 0


SMALLEST = {
    "vocabulary": 256,
    "hidden": 8,
    "layers": 1,
    "heads": 1,
    "kv_heads": 1,
    "head_dim": 8,
    "mlp": 1,
    "vision_hidden": 8,
    "vision_layers": 1,
    "vision_heads": 1,
    "vision_mlp": 1,
    "vision_grid": 1,
    "deepstack": (),
    "initializer_range": 1e-6,
    "min_pixels": 1,
    "max_pixels": 1024,
}


@pytest.mark.parametrize(
    "sizes",
    [
        SMALLEST,
        {**SMALLEST, "initializer_range": 1.0, "vocabulary": 32_768, "deepstack": (0,)},
        {**SMALLEST, "heads": 6, "kv_heads": 2, "head_dim": 10},
        {**SMALLEST, "vision_hidden": 24, "vision_heads": 6, "vision_layers": 2, "layers": 2, "deepstack": (1, 0)},
        {"min_pixels": 1 << 12, "max_pixels": 1 << 12},
    ],
)
def test_sizes_at_the_bounds_give_a_policy_that_learns(sizes):
    """Whatever the options let through is built, sees an image, and has a gradient for each of its weights."""
    policy = build_tiny_policy(TinyPolicyOptions(**sizes), seed=0)
    images = read_noise(policy, [(64, 48)])
    ids = np.array([5, 6, *[policy.codec.image_pad_id] * images[0].token_count(2), 7, 8])
    logits = policy.model(**library_inputs(policy, ids, images)).logits
    assert logits.isfinite().all()
    logits.log_softmax(-1)[0, :, 3].sum().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in policy.model.parameters())


@pytest.mark.parametrize(
    "wrong", [{"deepstack": (0, 1, 0)}, {"deepstack": (2,)}, {"hidden": 0}, {"head_dim": 33}, {"vocabulary": 100}]
)
def test_impossible_sizes_are_refused(wrong):
    with pytest.raises(ValidationError):
        TinyPolicyOptions(**wrong)
