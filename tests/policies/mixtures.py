"""A tiny mixture of experts."""

from __future__ import annotations

from typing import Any

import torch

from geo_sokoban_pipeline.policies.policy import Policy

EXPERTS, HIDDEN, INNER = 4, 64, 24


def build_config(tiny_policy: Policy, **changes: Any) -> Any:
    """Configuration of a tiny policy with experts; `changes` are of its text part."""
    from transformers import Qwen3VLMoeConfig

    own = tiny_policy.model.config
    text = {**own.text_config.to_dict(), "num_experts": EXPERTS, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
    text |= {"moe_intermediate_size": INNER, "mlp_only_layers": [], **changes}
    text.pop("model_type")
    vision = {name: value for name, value in own.vision_config.to_dict().items() if name != "model_type"}
    ids = ("image", "video", "vision_start", "vision_end")
    marks = {f"{name}_token_id": getattr(own, f"{name}_token_id") for name in ids}
    return Qwen3VLMoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **marks)


def build_mixture(tiny_policy: Policy) -> Policy:
    """Tokenizer and images of a tiny policy, with a model of experts."""
    from transformers import Qwen3VLMoeForConditionalGeneration

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3VLMoeForConditionalGeneration(build_config(tiny_policy))
    return Policy(model.float().eval(), tiny_policy.tokenizer, tiny_policy.image_processor)
