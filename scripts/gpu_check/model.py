"""Qwen3-VL policies with random weights, made on the device.

Weights are float32 and matrix products bfloat16, as in `conf/qwen3vl`. Only rows of the vocabulary that the project's
own tokenizer knows are sampled; all 151,936 are computed.
"""

from __future__ import annotations

import torch
from transformers import AutoModelForImageTextToText

from geo_sokoban_pipeline.config.policy import TinyPolicyOptions
from geo_sokoban_pipeline.policies.patches import build_image_processor
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.policies.tiny import build_config, build_tokenizer
from geo_sokoban_pipeline.preflight.published_sizes import published_config

VOCABULARY = 151_936
THIN = "thin"
_MIN_PIXELS, _MAX_PIXELS = 65_536, 16_777_216
_THIN = TinyPolicyOptions(
    texts="sokoban",
    hidden=64, layers=2, heads=2, kv_heads=1, head_dim=32, mlp=96, vision_hidden=64, vision_layers=2, vision_heads=2,
    vision_mlp=96, vision_grid=48, deepstack=(0,), initializer_range=0.02,
)  # fmt: skip


def build_policy(name: str, device: str, seed: int) -> Policy:
    """Policy of a published size, or a thin one, with random weights on a device.

    Args:
        name: one of `PUBLISHED`, or `THIN`.
    """
    tokenizer = build_tokenizer(_THIN.vocabulary, _THIN.texts)
    config = own = build_config(_THIN, tokenizer)
    if name == THIN:
        config.text_config.vocab_size = VOCABULARY
    else:
        config = published_config(name)
        for mark in ("image", "video", "vision_start", "vision_end"):
            setattr(config, f"{mark}_token_id", getattr(own, f"{mark}_token_id"))
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.config._attn_implementation = "sdpa"
    processor = build_image_processor(_MIN_PIXELS, _MAX_PIXELS)
    return Policy(model.eval(), tokenizer, processor, compute="bfloat16")
