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
    """Of no global generator, which is left alone."""
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    same, other = (weights(build_tiny_policy(TinyPolicyOptions(), seed)) for seed in (0, 1))
    assert torch.equal(before, torch.random.get_rng_state())
    for name, tensor in weights(tiny_policy).items():
        assert torch.equal(tensor, same[name]), name
        assert tensor.dtype == torch.float32 and (tensor.dim() < 2 or not torch.equal(tensor, other[name])), name
    assert 0.44e6 < sum(tensor.numel() for tensor in same.values()) < 0.46e6
    assert tiny_policy.model.lm_head.weight is tiny_policy.model.model.language_model.embed_tokens.weight


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
        {"min_pixels": 1 << 12, "max_pixels": 1 << 12, "head_dim": 64},
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
    config = policy.model.config.text_config
    assert sum(config.rope_parameters["mrope_section"]) == config.head_dim // 2 and config.vocab_size % 64 == 0
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in policy.model.parameters())


@pytest.mark.parametrize(
    "wrong", [{"deepstack": (0, 1, 0)}, {"deepstack": (2,)}, {"hidden": 0}, {"head_dim": 33}, {"vocabulary": 100}]
)
def test_impossible_sizes_are_refused(wrong):
    with pytest.raises(ValidationError):
        TinyPolicyOptions(**wrong)
