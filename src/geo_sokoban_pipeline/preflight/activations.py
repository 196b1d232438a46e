"""Activations of an optimizer step: bytes that autograd keeps, and logits that live at once.

The coefficients are counts of saved tensors: bytes per token (or patch) are linear in the widths of a layer.
`tests/preflight/test_activations.py` counts them again at the widths of Qwen3-VL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from geo_sokoban_pipeline.config.grpo import OptimizerOptions
from geo_sokoban_pipeline.config.policy import PolicyOptions

_LOGIT_COPIES = 2  # in float32, of a chunk
_FEW_LOGIT_COPIES = 6  # where at most a third of a chunk is trained


@dataclass(frozen=True)
class _Kept:
    """Bytes per channel of what a layer keeps.

    Attributes:
        residual: per channel of the residual stream, where a layer with gradient checkpointing keeps `stream` alone.
        inner: per channel of the MLP's inner width.
        heads: per channel of queries and of keys.
        expert, expert_inner: per expert of a token: channels of the residual stream and of the expert's inner width.
        block, block_inner: of a vision block, as `residual` and `inner`.
        merger: per channel of the vision tower, of each merger.
    """

    stream: int
    residual: int
    inner: int
    heads: int
    expert: int
    expert_inner: int
    block: int
    block_inner: int
    merger: int


_FLOAT32 = _Kept(4, residual=24, inner=16, heads=16, expert=8, expert_inner=16, block=40, block_inner=8, merger=16)
# bfloat16 products over float32 weights.
_MIXED = _Kept(4, residual=26, inner=8, heads=10, expert=4, expert_inner=8, block=24, block_inner=4, merger=10)
_HALF = _Kept(2, residual=16, inner=8, heads=10, expert=4, expert_inner=8, block=21, block_inner=4, merger=8)


def language_bytes(config: Any, policy: PolicyOptions, optimizer: OptimizerOptions, tokens: int) -> int:
    """Kept of the padded tokens of a micro-batch by the decoder layers until their backward pass."""
    text = config.text_config
    if optimizer.gradient_checkpointing:
        return int(tokens * text.num_hidden_layers * _kept(policy).stream * text.hidden_size)
    return text.num_hidden_layers * layer_bytes(config, policy, tokens)


def layer_bytes(config: Any, policy: PolicyOptions, tokens: int) -> int:
    """Kept of the padded tokens of a micro-batch by one decoder layer, as by the one that checkpointing runs again."""
    text, kept = config.text_config, _kept(policy)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = (text.num_attention_heads + text.num_key_value_heads) * head_dim
    experts = getattr(text, "num_experts_per_tok", 0)
    if experts:
        inner = experts * (kept.expert * text.hidden_size + kept.expert_inner * text.moe_intermediate_size)
    else:
        inner = kept.inner * text.intermediate_size
    return int(tokens * (kept.residual * text.hidden_size + inner + kept.heads * heads))


def vision_bytes(config: Any, policy: PolicyOptions, optimizer: OptimizerOptions, patches: int, largest: int) -> int:
    """Kept by the vision tower until its backward pass, with the block that checkpointing runs again.

    Args:
        patches: of the images of an optimizer step.
        largest: of the largest image.
    """
    if "visual" in policy.freeze:
        return 0
    vision, kept = config.vision_config, _kept(policy)
    patches = vision_patches(optimizer, patches, largest)
    block = kept.block * vision.hidden_size + kept.block_inner * vision.intermediate_size
    mergers = (1 + len(vision.deepstack_visual_indexes)) * kept.merger * vision.hidden_size
    if optimizer.gradient_checkpointing:
        return int(patches * (vision.depth * kept.stream * vision.hidden_size + block + mergers))
    return int(patches * (vision.depth * block + mergers))


def vision_patches(optimizer: OptimizerOptions, patches: int, largest: int) -> int:
    """Patches that pass the vision tower with one graph, of those of an optimizer step."""
    return patches if optimizer.vision_patches is None else min(patches, max(optimizer.vision_patches, largest))


def logit_bytes(config: Any, policy: PolicyOptions, optimizer: OptimizerOptions, tokens: int) -> int:
    """Logits of a micro-batch, whose tokens may all be trained, and the gradient of the output head in the making."""
    text, wide = config.text_config, compute_bytes(policy)
    head, chunk = text.vocab_size * text.hidden_size, min(optimizer.logit_chunk, tokens)
    rounded = 0 if policy.compute is None else wide * head
    if 3 * tokens <= optimizer.logit_chunk:
        return int(4 * text.vocab_size * _FEW_LOGIT_COPIES * tokens + (4 + wide) * head + rounded)
    # The gradient of the logits is made of them first; then it is multiplied into that of the head.
    logits = 4 * _LOGIT_COPIES * chunk * text.vocab_size
    return int(4 * head + rounded + max(logits, wide * chunk * text.vocab_size + wide * head))


def compute_bytes(policy: PolicyOptions) -> int:
    """Bytes of a value that is computed."""
    return 4 if policy.dtype == "float32" and policy.compute is None else 2


def _kept(policy: PolicyOptions) -> _Kept:
    if policy.dtype != "float32":
        return _HALF
    return _FLOAT32 if policy.compute is None else _MIXED
