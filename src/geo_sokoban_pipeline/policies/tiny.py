"""A tiny Qwen3-VL, built here from its class and a seed: the same architecture as the real one, half a million
weights.

It exists so that every line of the pipeline runs for real on a laptop. Weights are a function of the options and the
seed.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from geo_sokoban_pipeline.options.policy import TinyPolicyOptions
from geo_sokoban_pipeline.policies.images import build_image_processor
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.policies.tokenizer import build_tokenizer
from geo_sokoban_pipeline.seeding import derive_seed

VOCABULARY_MULTIPLE = 64


def build_tiny_policy(options: TinyPolicyOptions, seed: int) -> Policy:
    """Build the tiny policy with random weights.

    Args:
        options: sizes of the language model and the vision tower.
        seed: seed of the weights; equal options and seed give equal weights.
    """
    from transformers import Qwen3VLForConditionalGeneration

    tokenizer = build_tokenizer(options.vocabulary, options.texts)
    config = build_config(options, tokenizer)
    # The library initialises from the global generator; a fork keeps that from being seen outside.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "tiny policy"))
        model = Qwen3VLForConditionalGeneration(config)
    model.config._attn_implementation = "sdpa"
    processor = build_image_processor(options.min_pixels, options.max_pixels)
    return Policy(model=model.float().eval(), tokenizer=tokenizer, image_processor=processor)


def build_config(options: TinyPolicyOptions, tokenizer: Any) -> Any:
    """`Qwen3VLConfig` of the options; the vocabulary is padded to a multiple of 64."""
    from transformers import Qwen3VLConfig

    half = options.head_dim // 2
    height = width = half // 3
    rows = math.ceil(len(tokenizer) / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    text = {
        "vocab_size": rows,
        "hidden_size": options.hidden,
        "intermediate_size": options.mlp,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.kv_heads,
        "head_dim": options.head_dim,
        "max_position_embeddings": 32_768,
        "initializer_range": options.initializer_range,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [half - height - width, height, width],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        # Not the tokenizer's: a padding row of the embedding would be zero and never be trained.
        "pad_token_id": None,
        "dtype": "float32",
    }
    vision = {
        "depth": options.vision_layers,
        "hidden_size": options.vision_hidden,
        "intermediate_size": options.vision_mlp,
        "num_heads": options.vision_heads,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": options.hidden,
        "num_position_embeddings": options.vision_grid**2,
        "deepstack_visual_indexes": list(options.deepstack),
        "initializer_range": options.initializer_range,
        "dtype": "float32",
    }
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(token)
        for name, token in (
            ("image", "<|image_pad|>"),
            ("video", "<|video_pad|>"),
            ("vision_start", "<|vision_start|>"),
            ("vision_end", "<|vision_end|>"),
        )
    }
    return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
