"""A tiny mixture of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from geo_sokoban_pipeline.policies.policy import Policy

EXPERTS, HIDDEN, INNER = 4, 64, 24
MIXED = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INNER, "decoder_sparse_step": 1}
MIXED |= {"mlp_only_layers": []}


def build_config(tiny_policy: Policy, vision: dict[str, Any] | None = None, *, tied: bool = False, **text: Any) -> Any:
    """Configuration of a tiny policy with other values of its text part and of its vision tower.

    With `num_experts` it is that of a mixture.
    """
    from transformers import Qwen3VLConfig, Qwen3VLMoeConfig

    own = tiny_policy.model.config
    parts = {
        "text_config": {**own.text_config.to_dict(), "tie_word_embeddings": tied, **text},
        "vision_config": {**own.vision_config.to_dict(), **(vision or {})},
    }
    for part in parts.values():
        part.pop("model_type")
    names = ("image", "video", "vision_start", "vision_end")
    marks = {f"{name}_token_id": getattr(own, f"{name}_token_id") for name in names}
    kind = Qwen3VLMoeConfig if "num_experts" in text else Qwen3VLConfig
    return kind(**parts, tie_word_embeddings=tied, **marks)


def build_model(tiny_policy: Policy, config: Any) -> Policy:
    """Tokenizer and images of a tiny policy, with a model of another configuration."""
    from transformers import AutoModelForImageTextToText

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    return Policy(model.eval(), tiny_policy.tokenizer, tiny_policy.image_processor)


def build_mixture(tiny_policy: Policy) -> Policy:
    """Tokenizer and images of a tiny policy, with a model of experts."""
    return build_model(tiny_policy, build_config(tiny_policy, **MIXED))


def published_weights(policy: Policy, folder: Path) -> dict[str, Tensor]:
    """Weights as the library saves them, those of experts turned by hand into the shapes of the hub's files."""
    policy.model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    return {name: weight.transpose(1, 2) if ".experts." in name else weight for name, weight in weights.items()}
