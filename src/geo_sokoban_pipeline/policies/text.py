"""Forward pass over the language model of a Qwen3-VL model, from embeddings with the pictures in place.

Only what somebody reads is computed: where hidden states are wanted at a few positions, the last layer makes keys and
values of all tokens, but queries, attention output and MLP of those positions alone. Modules and weights are the
library's; the results equal its forward pass to float rounding (tested).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextDecoderLayer, rotate_half


def run_text(
    language_model: nn.Module,
    embeddings: Tensor,
    positions: Tensor,
    *,
    attention_mask: Tensor | None = None,
    cache: Any = None,
    image_mask: Tensor | None = None,
    deepstack: Sequence[Tensor] = (),
    wanted: Tensor | None = None,
) -> Tensor:
    """Last hidden states of the language model.

    Args:
        embeddings: (B, L, hidden), pictures already in place.
        positions: (3, B, L) int64 M-RoPE positions.
        attention_mask: (B or 1, 1, L, S) bool, True where attention is allowed; None means causal over the L tokens.
        cache: object with `update(keys, values, layer)` that returns all keys and values to attend to, or None.
        image_mask: (B, L) bool, True at image pads.
        deepstack: per early layer (number of pads, hidden), in row-major order of `image_mask`.
        wanted: (B, T) int64 indices along L of the positions to return; None: all.

    Returns:
        (B, L, hidden), or (B, T, hidden) at the wanted positions.
    """
    eager = language_model.config._attn_implementation == "eager"
    mask = _as_addend(attention_mask, embeddings) if eager else attention_mask
    rotary = language_model.rotary_emb(embeddings, positions)
    layers = list(language_model.layers)
    hidden = embeddings
    partial = wanted is not None and _is_worth_it(layers[-1], wanted, embeddings) and len(deepstack) < len(layers)
    for index, layer in enumerate(layers[:-1] if partial else layers):
        hidden = layer(hidden, attention_mask=mask, past_key_values=cache, position_embeddings=rotary)
        if image_mask is not None and index < len(deepstack):
            hidden = language_model._deepstack_process(hidden, image_mask, deepstack[index])
    if wanted is not None:
        hidden = (
            _run_layer_at(layers[-1], hidden, wanted, rotary, attention_mask, cache)
            if partial
            else _pick(hidden, wanted)
        )
    return language_model.norm(hidden)


def place_images(embeddings: Tensor, image_mask: Tensor, features: Tensor) -> Tensor:
    """Replace the rows at image pads.

    Args:
        embeddings: (B, L, hidden).
        image_mask: (B, L) bool.
        features: (number of pads, hidden), in row-major order.
    """
    flat = embeddings.reshape(-1, embeddings.shape[-1])
    where = image_mask.reshape(-1).nonzero().squeeze(1)
    return flat.index_copy(0, where, features.to(flat.dtype)).view_as(embeddings)


def _as_addend(mask: Tensor | None, embeddings: Tensor) -> Tensor:
    """A mask as `eager` attention takes it: 0 where attention is allowed, the least number elsewhere.

    That attention adds a mask of bools as 0 and 1, and sees every token without one.
    """
    if mask is None:
        length = embeddings.shape[1]
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=embeddings.device).tril()
    allowed = torch.zeros(mask.shape, dtype=embeddings.dtype, device=embeddings.device)
    return allowed.masked_fill(~mask, torch.finfo(embeddings.dtype).min)


def _is_worth_it(layer: nn.Module, wanted: Tensor, embeddings: Tensor) -> bool:
    """Few positions, and a layer whose insides are known and whose own call may be left out.

    A mixture of experts routes in ways of its own. FSDP2 makes a class of its own of a layer and gathers its weights in
    hooks, which only a call of the layer runs.
    """
    plain = type(layer) is Qwen3VLTextDecoderLayer and not any(map(_has_hooks, (layer, layer.self_attn)))
    return plain and 2 * wanted.shape[1] <= embeddings.shape[1]


def _has_hooks(module: nn.Module) -> bool:
    forward, backward = (module._forward_hooks, module._forward_pre_hooks), (module._backward_hooks,)
    return any((*forward, *backward, module._backward_pre_hooks))


def _run_layer_at(
    layer: nn.Module,
    hidden: Tensor,
    wanted: Tensor,
    rotary: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    cache: Any,
) -> Tensor:
    """(B, T, hidden) output of a decoder layer at the wanted positions; keys and values are those of all positions."""
    attention = layer.self_attn
    cos, sin = rotary
    normed = layer.input_layernorm(hidden)
    heads = (*normed.shape[:2], -1, attention.head_dim)
    keys = _rotate(attention.k_norm(attention.k_proj(normed).view(heads)), cos, sin)
    values = attention.v_proj(normed).view(heads).transpose(1, 2)
    if cache is not None:
        keys, values = cache.update(keys, values, attention.layer_idx)
    few = (*wanted.shape, -1, attention.head_dim)
    queries = attention.q_norm(attention.q_proj(_pick(normed, wanted)).view(few))
    queries = _rotate(queries, _pick(cos, wanted), _pick(sin, wanted))
    groups = attention.num_key_value_groups
    if groups > 1:
        keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
    mask = _mask_at(wanted, attention_mask, keys.shape[2])
    mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=attention.scaling)
    output = _pick(hidden, wanted) + attention.o_proj(mixed.transpose(1, 2).reshape(*wanted.shape, -1))
    return output + layer.mlp(layer.post_attention_layernorm(output))


def _mask_at(wanted: Tensor, attention_mask: Tensor | None, total: int) -> Tensor:
    """(B, 1, T, S) bool mask of the wanted positions."""
    if attention_mask is None:
        return (torch.arange(total, device=wanted.device) <= wanted[:, :, None])[:, None]
    rows = attention_mask.expand(len(wanted), -1, -1, -1)
    return rows.gather(2, wanted[:, None, :, None].expand(-1, 1, -1, rows.shape[-1]))


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(B, L, heads, dim) states turned by their positions, as (B, heads, L, dim)."""
    turned = states.transpose(1, 2)
    return turned * cos.unsqueeze(1) + rotate_half(turned) * sin.unsqueeze(1)


def _pick(states: Tensor, wanted: Tensor) -> Tensor:
    """(B, T, width) rows of (B, L, width) states; the backward pass of `index_select` is deterministic on threads."""
    starts = torch.arange(len(states), device=wanted.device)[:, None] * states.shape[1]
    flat = states.reshape(-1, states.shape[-1]).index_select(0, (wanted + starts).reshape(-1))
    return flat.view(*wanted.shape, -1)
