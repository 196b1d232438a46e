"""Configurations of the published Qwen3-VL models, from their `config.json` on the hub, without a network."""

from __future__ import annotations

from typing import Any

_TEXT: dict[str, dict[str, Any]] = {
    "2B": {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 6144},
    "4B": {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 9728},
    "8B": {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12_288},
    "32B": {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64, "intermediate_size": 25_600},
    "30B-A3B": {
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "235B-A22B": {
        "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4,
        "intermediate_size": 12_288, "moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}  # fmt: skip
_ALL_TEXT = {
    "vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 262_144,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True,
    },
}  # fmt: skip
_SMALL_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
_LARGE_TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}
_TIED = ("2B", "4B")
PUBLISHED = tuple(_TEXT)


def published_name(path: str) -> str | None:
    """Size of a published model from its hub id, such as `Qwen/Qwen3-VL-8B-Instruct`; None: it is none of them."""
    name = path.rpartition("/")[2]
    return next((size for size in PUBLISHED if name.startswith(f"Qwen3-VL-{size}-")), None)


def published_config(name: str, layers: int | None = None, blocks: int | None = None) -> Any:
    """`Qwen3VLConfig` of a published size, or that of the mixture of experts.

    Args:
        name: one of `PUBLISHED`.
        layers, blocks: number of decoder layers and of vision blocks; None: as published.
    """
    from transformers import Qwen3VLConfig, Qwen3VLMoeConfig

    text = {**_ALL_TEXT, **_TEXT[name], "tie_word_embeddings": name in _TIED}
    vision = {**(_SMALL_TOWER if name in _TIED else _LARGE_TOWER), "num_heads": 16, "num_position_embeddings": 2304}
    vision["out_hidden_size"] = text["hidden_size"]
    if layers is not None:
        text["num_hidden_layers"] = layers
    if blocks is not None:
        vision |= {"depth": blocks, "deepstack_visual_indexes": [0]}
    kind = Qwen3VLMoeConfig if "num_experts" in text else Qwen3VLConfig
    return kind(
        text_config=text, vision_config=vision, tie_word_embeddings=name in _TIED, image_token_id=151_655,
        video_token_id=151_656, vision_start_token_id=151_652, vision_end_token_id=151_653,
    )  # fmt: skip
