"""The tiny policy: a Qwen3-VL of half a million parameters with random weights, and its own tokenizer.

The architecture is that of the real Qwen3-VL. Equal options and seed give equal weights. The tokenizer is byte-level
BPE with Qwen's pre-tokenizer, special tokens and chat markup, trained on the task's vocabulary: each word of the fixed
text of a turn becomes one token, and so does each tag of the answer format, so a response costs little more than its
answer.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from geo_sokoban_pipeline.config.policy import TinyPolicyOptions
from geo_sokoban_pipeline.envs.base import Vocabulary
from geo_sokoban_pipeline.policies.patches import build_image_processor
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.seeding import derive_seed
from geo_sokoban_pipeline.tasks import task_of

QWEN_SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
_PLAIN = Vocabulary(frequent=("user", "assistant", "system"), markup=("<think>", "</think>"))

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}
{%- for item in message.content -%}
{%- if item.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif item.type == 'text' -%}{{- item.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def build_tokenizer(vocabulary: int = 384, texts: str | None = None) -> Qwen2Tokenizer:
    """Train the tokenizer.

    Args:
        vocabulary: maximum number of BPE entries before special and markup tokens, at least 256 (the bytes).
        texts: task whose vocabulary is used; None: only roles and tags of the chat.

    Returns:
        A stock `Qwen2Tokenizer` with Qwen's special tokens and the chat template; end token `<|im_end|>`.
    """
    trainable = Tokenizer(models.BPE())
    trainable.normalizer = normalizers.NFC()
    trainable.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainable.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # 40 repetitions: every frequent word becomes one token.
    chosen = _PLAIN if texts is None else task_of(texts).vocabulary
    trainable.train_from_iterator([*[*chosen.frequent] * 40, chosen.corpus], trainer)
    model = json.loads(trainable.to_str())["model"]
    words = dict(model["vocab"])
    merges = [tuple(pair) for pair in model["merges"]]
    for token in QWEN_SPECIAL_TOKENS:
        words.setdefault(token, len(words))
    tokenizer = Qwen2Tokenizer(
        vocab=words,
        merges=merges,
        unk_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[t for t in QWEN_SPECIAL_TOKENS if t not in ("<|endoftext|>", "<|im_end|>")],
    )
    tokenizer.add_tokens(list(chosen.markup))
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


VOCABULARY_MULTIPLE = 64


def build_tiny_policy(options: TinyPolicyOptions, seed: int) -> Policy:
    """Build the tiny policy with random weights.

    Args:
        options: sizes of the language model and the vision tower.
        seed: seed of the weights; equal options and seed give equal weights.
    """
    tokenizer = build_tokenizer(options.vocabulary, options.texts)
    config = build_config(options, tokenizer)
    # transformers initialises from the global generator; the fork leaves its state outside unchanged.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "tiny policy"))
        model = transformers.Qwen3VLForConditionalGeneration(config)
    model.config._attn_implementation = "sdpa"
    processor = build_image_processor(options.min_pixels, options.max_pixels)
    return Policy(model=model.float().eval(), tokenizer=tokenizer, image_processor=processor)


def build_config(options: TinyPolicyOptions, tokenizer: Any) -> Any:
    """`Qwen3VLConfig` of the options; the vocabulary is padded to a multiple of 64."""
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
        # Not the tokenizer's pad token: torch would set its embedding row to zero and never train it.
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
    return transformers.Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
