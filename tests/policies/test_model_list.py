"""Every Qwen3-VL of the launchers' list, thin and with two layers: one step, export, reload, names as on the hub."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from geo_sokoban_pipeline.config.grpo import GrpoOptions, OptimizerOptions
from geo_sokoban_pipeline.config.launcher_env import SIZES
from geo_sokoban_pipeline.grpo.loss import GrpoObjective, StepSize
from geo_sokoban_pipeline.policies.policy import Policy, load_policy
from geo_sokoban_pipeline.training.backends.torch import GradientPass, PassSetting, TorchBackend
from policies.library import build_samples
from policies.mixtures import MIXED, build_config, build_model, published_weights

# Per size: query heads, key and value heads, heads of the vision tower, tied output head, experts of a token.
FAMILY: dict[str, tuple[int, int, int, bool, int]] = {
    "2B": (4, 2, 4, True, 0),
    "4B": (8, 2, 4, True, 0),
    "8B": (8, 2, 4, False, 0),
    "30B-A3B": (8, 1, 4, False, 8),
    "235B-A22B": (16, 1, 4, False, 8),
}
BOUNDED = {"gradient_checkpointing": True, "vision_patches": 20, "logit_chunk": 3, "max_tokens": 60}


@pytest.fixture(scope="module", params=SIZES)
def size(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def thin(size: str, tiny_policy: Policy) -> Policy:
    heads, kv_heads, vision_heads, tied, chosen = FAMILY[size]
    text = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    mixed = MIXED | {"num_experts": 16, "num_experts_per_tok": chosen} if chosen else {}
    # What a second one gave would be added behind the last of two layers, where nothing reads it.
    vision = {"depth": 2, "num_heads": vision_heads, "deepstack_visual_indexes": [0], "out_hidden_size": 64}
    return build_model(tiny_policy, build_config(tiny_policy, vision, tied=tied, **text, **mixed))


def copied(policy: Policy) -> Policy:
    return Policy(copy.deepcopy(policy.model), policy.tokenizer, policy.image_processor)


def test_a_step_is_exported_under_the_hubs_names_and_loads_again(size: str, thin: Policy, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    policy = copied(thin)
    backend = TorchBackend(policy, OptimizerOptions())
    metrics = backend.step(build_samples(policy), GrpoObjective(GrpoOptions()), 1e-3)
    assert metrics["grad_norm"] > 0 and not metrics["skipped"]
    moved = dict(policy.model.named_parameters())
    assert all(not torch.equal(moved[name], weight) for name, weight in thin.model.named_parameters())
    backend.export(tmp_path / "ours")
    stored, published = load_file(tmp_path / "ours/model.safetensors"), published_weights(policy, tmp_path / "theirs")
    assert {name: weight.shape for name, weight in stored.items()} == {
        n: weight.shape for n, weight in published.items()
    }
    layers = {name.split(".")[5] for name in stored if ".layers.1.mlp." in name}
    assert layers == ({"experts", "gate"} if FAMILY[size][4] else {"gate_proj", "up_proj", "down_proj"})
    assert ("lm_head.weight" in stored) != FAMILY[size][3]
    for model in (load_policy(tmp_path / "ours").model, AutoModelForImageTextToText.from_pretrained(tmp_path / "ours")):
        for name, weight in model.named_parameters():
            assert torch.equal(weight, moved[name]), name


def test_gradients_are_the_same_with_the_options_that_bound_memory(thin: Policy) -> None:
    """Those of routers and experts too, which run twice with checkpointing."""
    results = []
    for changes in ({}, BOUNDED):
        policy = copied(thin)
        batch = build_samples(policy)
        setting = PassSetting.of(OptimizerOptions(**changes), 0.8)
        GradientPass(policy, setting).accumulate(batch, GrpoObjective(GrpoOptions()), StepSize.of(batch))
        results.append({name: parameter.grad for name, parameter in policy.model.named_parameters()})
    norm = torch.stack([gradient.norm() for gradient in results[0].values()]).norm()
    for name, gradient in results[0].items():
        assert gradient.norm() > 0, name
        assert (results[1][name] - gradient).norm() <= 1e-5 * norm, name
