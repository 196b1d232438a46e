"""Planned activations against those that autograd keeps, at the real widths of Qwen3-VL with few layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from geo_sokoban_pipeline.config.grpo import GrpoOptions, OptimizerOptions
from geo_sokoban_pipeline.grpo.loss import GrpoObjective, StepSize
from geo_sokoban_pipeline.policies.patches import EncodedImage, build_image_processor
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.policies.tiny import build_config, build_tokenizer
from geo_sokoban_pipeline.preflight.memory import language_bytes, logit_bytes, vision_bytes
from geo_sokoban_pipeline.training.backends.torch import GradientPass, PassSetting
from geo_sokoban_pipeline.training.batch import TrainSample
from task_options import PolicyOptions, TinyPolicyOptions
from training.live_bytes import LiveBytes

GRID = {"vision_grid": 16, "deepstack": (0,)}
SIZES: dict[str, dict[str, int]] = {
    "2B": {"hidden": 2048, "heads": 16, "kv_heads": 8, "head_dim": 128, "mlp": 6144}
    | {"vision_hidden": 1024, "vision_heads": 16, "vision_mlp": 4096},
    # A quarter of these widths.
    "small": {"hidden": 512, "heads": 4, "kv_heads": 2, "head_dim": 128, "mlp": 1536}
    | {"vision_hidden": 256, "vision_heads": 4, "vision_mlp": 1024},
}
MIXTURE = {"hidden": 512, "heads": 8, "kv_heads": 2, "head_dim": 64, "vision_hidden": 64}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 192}
TYPES = {"float32": ("float32", None), "mixed": ("float32", "bfloat16"), "bfloat16": ("bfloat16", None)}
TOKENS = 40


def build_policy(sizes: dict[str, Any], options: PolicyOptions, experts: dict[str, int] | None = None) -> Policy:
    """Policy without drawn weights: nothing is computed but sizes."""
    from transformers import AutoModelForImageTextToText, Qwen3VLMoeConfig

    tokenizer = build_tokenizer()
    config = build_config(TinyPolicyOptions.model_validate({**GRID, **sizes}), tokenizer)
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
    matrices = [p for p in policy.model.parameters() if p.ndim > 1]
    shapes = {tuple(shape) for p in matrices for shape in (p.shape, p.shape[::-1], p.mT.shape)}

    def keep(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()  # the graph would hold its own outputs, and with them the policy, for ever
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


CASES = [
    *(("2B" if kind == "mixed" else "small", kind, again) for kind in TYPES for again in (False, True)),
    *(("mixture", kind, False) for kind in TYPES),
]


@pytest.mark.parametrize(("name", "kind", "checkpointing"), CASES)
def test_planned_bytes_are_those_that_autograd_keeps(name: str, kind: str, checkpointing: bool) -> None:
    """Between one layer and two, so that what is no layer does not count; of the vision tower all with its mergers."""
    dtype, compute = TYPES[kind]
    options = PolicyOptions.model_validate({"dtype": dtype, "compute": compute})
    optimizer = OptimizerOptions(gradient_checkpointing=checkpointing)
    text, vision, planned = [], [], []
    for layers in (1, 2):
        sizes = {**SIZES.get(name, MIXTURE), "layers": layers, "vision_layers": layers}
        policy = build_policy(sizes, options, EXPERTS if name == "mixture" else None)
        image = read_image(policy)
        patches = int(np.prod(image.grid))
        text.append(kept_bytes(policy, lambda: run_text(policy, checkpointing=checkpointing)))  # noqa: B023
        vision.append(kept_bytes(policy, lambda: policy.network.encode([image], checkpointing=checkpointing)))  # noqa: B023
        counts = (
            language_bytes(policy.model.config, options, optimizer, TOKENS),
            vision_bytes(policy.model.config, options, optimizer, patches, patches),
        )
        planned.append(counts)
    assert text[1] - text[0] == pytest.approx(planned[1][0] - planned[0][0], rel=0.02)
    assert vision[1] - vision[0] == pytest.approx(planned[1][1] - planned[0][1], rel=0.1)
    if (
        name in SIZES and not checkpointing
    ):  # else a block that runs again is in the plan and not among what a forward pass keeps
        assert vision[1] == pytest.approx(planned[1][1], rel=0.15)


def test_vision_passes_and_frozen_towers_are_in_the_plan() -> None:
    config = build_config(TinyPolicyOptions(), build_tokenizer())
    plan = {
        (limit, frozen): vision_bytes(
            config,
            PolicyOptions.model_validate({"freeze": frozen}),
            OptimizerOptions(vision_patches=limit),
            patches=10_000,
            largest=400,
        )
        for limit in (None, 1000, 100, 20_000)
        for frozen in ((), ("visual",))
    }
    whole = plan[None, ()]
    assert [plan[limit, ()] / whole for limit in (1000, 100, 20_000)] == pytest.approx([0.1, 0.04, 1.0])
    assert not any(plan[limit, ("visual",)] for limit in (None, 1000))


@pytest.mark.parametrize(("tokens", "chunk"), [(300, 50), (30, 100)])
def test_planned_logits_are_those_that_live_at_once(tokens: int, chunk: int) -> None:
    """At Qwen3-VL's vocabulary and a width at which nothing else counts."""
    sizes = {"hidden": 16, "heads": 1, "kv_heads": 1, "mlp": 16, "layers": 1, "deepstack": ()}
    policy = build_policy(sizes, PolicyOptions())
    policy.model.resize_token_embeddings(151_936)
    ids, places = np.arange(tokens + 1) + 10, np.tile(np.arange(tokens + 1), (3, 1))
    values = {name: np.full(tokens, -1, np.float32) for name in ("old_log_probs", "rollout_log_probs", "advantages")}
    batch = [TrainSample(ids, places, np.arange(1, tokens + 1), ids[1:], [], **values)]
    with LiveBytes() as count:
        GradientPass(policy, PassSetting(0.8, 8192, chunk)).accumulate(
            batch, GrpoObjective(GrpoOptions()), StepSize.of(batch)
        )
    planned = logit_bytes(policy.model.config, PolicyOptions(), OptimizerOptions(logit_chunk=chunk), tokens)
    assert count.peak == pytest.approx(planned, rel=0.15)
