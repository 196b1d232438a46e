"""Every Qwen3-VL of the launchers' list, thin and with two layers: one step, export, reload, names as on the hub."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from geo_sokoban_pipeline.config.grpo import GrpoOptions, OptimizerOptions
from geo_sokoban_pipeline.config.launcher_env import SIZES
from geo_sokoban_pipeline.grpo.loss import GrpoObjective, StepSize
from geo_sokoban_pipeline.policies.policy import Policy, load_policy
from geo_sokoban_pipeline.training.backends.torch import GradientPass, PassSetting, TorchBackend
from policies.library import build_samples
from policies.mixtures import INNER, MIXED, build_config
from policies.mixtures import build_model as build_thin

# Per size: query heads, key and value heads, heads of the vision tower, tied output head, experts of a token.
FAMILY: dict[str, tuple[int, int, int, bool, int]] = {
    "2B": (4, 2, 4, True, 0),
    "4B": (8, 2, 4, True, 0),
    "8B": (8, 2, 4, False, 0),
    "30B-A3B": (8, 1, 4, False, 8),
    "235B-A22B": (16, 1, 4, False, 8),
}
HIDDEN, EXPERTS = 64, 16
TOWER = ("norm", "linear_fc1", "linear_fc2")
BOUNDED = {"gradient_checkpointing": True, "vision_patches": 20, "logit_chunk": 3, "max_tokens": 60}


def build_model(tiny: Policy, size: str) -> Any:
    heads, kv_heads, vision_heads, tied, chosen = FAMILY[size]
    text = {"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": heads}
    text |= {"num_key_value_heads": kv_heads}
    mixed = MIXED | {"num_experts": EXPERTS, "num_experts_per_tok": chosen} if chosen else {}
    vision = {"depth": 2, "num_heads": vision_heads, "deepstack_visual_indexes": [0], "out_hidden_size": HIDDEN}
    return build_thin(tiny, build_config(tiny, vision, tied=tied, **text, **mixed)).model


def published_shapes(size: str) -> dict[str, tuple[int, ...] | None]:
    """Names of the tensors in the hub's files; shapes of those that have a layout of their own there."""
    _, _, _, tied, chosen = FAMILY[size]
    both = ("weight", "bias")
    names = ["model.language_model.embed_tokens.weight", "model.language_model.norm.weight"]
    names += [] if tied else ["lm_head.weight"]
    experts: dict[str, tuple[int, ...] | None] = {}
    for layer in range(2):
        at = f"model.language_model.layers.{layer}"
        names += [f"{at}.{norm}_layernorm.weight" for norm in ("input", "post_attention")]
        names += [
            f"{at}.self_attn.{part}.weight" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
        ]
        if chosen:
            experts |= {f"{at}.mlp.gate.weight": (EXPERTS, HIDDEN)}
            experts |= {f"{at}.mlp.experts.gate_up_proj": (EXPERTS, HIDDEN, 2 * INNER)}
            experts |= {f"{at}.mlp.experts.down_proj": (EXPERTS, INNER, HIDDEN)}
        else:
            names += [f"{at}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
        at = f"model.visual.blocks.{layer}"
        parts = ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2", "norm1", "norm2")
        names += [f"{at}.{part}.{kind}" for part in parts for kind in both]
    # What a second one gave would be added behind the last of two layers, where nothing reads it.
    mergers = ("merger", "deepstack_merger_list.0")
    names += [f"model.visual.{merger}.{part}.{kind}" for merger in mergers for part in TOWER for kind in both]
    names += [
        "model.visual.patch_embed.proj.weight",
        "model.visual.patch_embed.proj.bias",
        "model.visual.pos_embed.weight",
    ]
    return {**dict.fromkeys(names), **experts}


@pytest.fixture(scope="module", params=SIZES)
def size(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def thin(size: str, tiny_policy: Policy) -> Policy:
    return Policy(build_model(tiny_policy, size), tiny_policy.tokenizer, tiny_policy.image_processor)


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
    backend.export(tmp_path)
    stored, expected = load_file(tmp_path / "model.safetensors"), published_shapes(size)
    assert {name: expected[name] and tuple(weight.shape) for name, weight in stored.items()} == expected
    for model in (load_policy(tmp_path).model, AutoModelForImageTextToText.from_pretrained(tmp_path)):
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
