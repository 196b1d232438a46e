"""Planned activations against those that autograd keeps, at the real widths of Qwen3-VL with few layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from geo_sokoban_pipeline.config.grpo import OptimizerOptions
from geo_sokoban_pipeline.policies.patches import EncodedImage, build_image_processor
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.policies.tiny import build_config, build_tokenizer
from geo_sokoban_pipeline.preflight.activations import language_bytes, vision_bytes
from task_options import PolicyOptions, TinyPolicyOptions

LAYERS = {"layers": 2, "vision_layers": 2, "vision_grid": 16, "deepstack": (0,)}
SIZES: dict[str, dict[str, int]] = {
    "2B": {"hidden": 2048, "heads": 16, "kv_heads": 8, "head_dim": 128, "mlp": 6144}
    | {"vision_hidden": 1024, "vision_heads": 16, "vision_mlp": 4096},
    "8B": {"hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "mlp": 12288}
    | {"vision_hidden": 1152, "vision_heads": 16, "vision_mlp": 4304},
}
MIXTURE = {"hidden": 512, "heads": 8, "kv_heads": 2, "head_dim": 64, "vision_hidden": 64}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 192}
TYPES = {"float32": ("float32", None), "mixed": ("float32", "bfloat16"), "bfloat16": ("bfloat16", None)}
TOKENS = 40


def build_policy(sizes: dict[str, Any], options: PolicyOptions, experts: dict[str, int] | None = None) -> Policy:
    """Policy without drawn weights: nothing is computed but sizes."""
    from transformers import AutoModelForImageTextToText, Qwen3VLMoeConfig

    tokenizer = build_tokenizer()
    config = build_config(TinyPolicyOptions.model_validate({**LAYERS, **sizes}), tokenizer)
    if experts is not None:
        text, vision = config.text_config.to_dict(), config.vision_config.to_dict()
        parts = {"text_config": {**text, **experts, "mlp_only_layers": []}, "vision_config": vision}
        for part in parts.values():
            part.pop("model_type")
        config = Qwen3VLMoeConfig(**parts, image_token_id=config.image_token_id)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config, dtype=getattr(torch, options.dtype))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(0.01)
    return Policy(model, tokenizer, build_image_processor(1024, 1 << 24), compute=options.compute)


def kept_bytes(policy: Policy, run: Any) -> int:
    """Bytes that autograd keeps of a forward pass, weights and their copies in another type left out."""
    kept: dict[int, tuple[int, Tensor]] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in policy.model.parameters()}
    shapes = {tuple(shape) for p in policy.model.parameters() if p.ndim > 1 for shape in (p.shape, p.shape[::-1])}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tuple(tensor.shape) not in shapes:
            kept[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), policy.computing():
        run()
    return sum(size for size, _ in kept.values())


def read_image(policy: Policy) -> EncodedImage:
    pixels = np.random.default_rng(0).integers(0, 256, (96, 192, 3), np.uint8)
    return policy.reader.read(Image.fromarray(pixels))


def run_text(policy: Policy, *, checkpointing: bool) -> None:
    ids = torch.arange(TOKENS)[None] + 10
    # More than half of the positions: the last layer runs at all of them.
    policy.network(
        ids,
        torch.arange(TOKENS).expand(3, 1, TOKENS),
        wanted=torch.arange(TOKENS // 2 + 1)[None],
        checkpointing=checkpointing,
    )


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", [*SIZES, "mixture"])
def test_planned_bytes_are_those_that_autograd_keeps(name: str, kind: str, checkpointing: bool) -> None:
    dtype, compute = TYPES[kind]
    options = PolicyOptions.model_validate({"dtype": dtype, "compute": compute})
    policy = build_policy(SIZES.get(name, MIXTURE), options, EXPERTS if name == "mixture" else None)
    config, image = policy.model.config, read_image(policy)
    patches = int(np.prod(image.grid))

    def planned(*, bounded: bool) -> tuple[int, int]:
        optimizer = OptimizerOptions(gradient_checkpointing=bounded)
        return (
            language_bytes(config, options, optimizer, TOKENS),
            vision_bytes(config, options, optimizer, patches, patches),
        )

    expected = planned(bounded=checkpointing)
    if checkpointing:
        # A layer that runs again in the backward pass is not among what a forward pass keeps.
        one = [count // 2 for count in planned(bounded=False)]
        expected = expected[0] - one[0], expected[1] - one[1]
    text = kept_bytes(policy, lambda: run_text(policy, checkpointing=checkpointing))
    assert text == pytest.approx(expected[0], rel=0.15 if not checkpointing else 0.8)
    vision = kept_bytes(policy, lambda: policy.network.encode([image], checkpointing=checkpointing))
    assert vision == pytest.approx(expected[1], rel=0.15)
