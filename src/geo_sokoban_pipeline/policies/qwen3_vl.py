"""M-RoPE positions of a growing conversation: text counts on, a picture spans a block of (time, height, width).

Positions of a sequence do not depend on what follows, so a conversation's later turns extend its earlier positions; the
result equals `Qwen3VLModel.get_rope_index` (tested).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLTextDecoderLayer,
    apply_rotary_pos_emb_vision,
    rotate_half,
)
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from geo_sokoban_pipeline.policies.images import EncodedImage


def extend_positions(
    token_ids: np.ndarray, grids: Sequence[tuple[int, int, int]], image_pad_id: int, merge_size: int, start: int = 0
) -> tuple[np.ndarray, int]:
    """Positions of the next tokens of a conversation.

    Args:
        token_ids: (L,) ids with image pads expanded; each picture's pads are consecutive and complete.
        grids: (t, h, w) in patches of the pictures among these tokens, in order.
        start: position of the first token, 0 at the beginning of a conversation.

    Returns:
        (3, L) int64 positions (time, height, width) and the position of the token after them.

    Raises:
        ValueError: the pads do not match the grids.
    """
    positions = np.empty((3, len(token_ids)), np.int64)
    pads = np.flatnonzero(np.asarray(token_ids) == image_pad_id)
    expected = sum(t * h * w // merge_size**2 for t, h, w in grids)
    if len(pads) != expected:
        raise ValueError(f"{len(pads)} image-pad tokens, but the grids {list(grids)} need {expected}.")
    done, taken, current = 0, 0, start
    for time, height, width in grids:
        first = int(pads[taken])
        block = _block(time, height // merge_size, width // merge_size)
        count = block.shape[1]
        positions[:, done:first] = np.arange(current, current + first - done)
        current += first - done
        positions[:, first : first + count] = block + current
        current += max(height, width) // merge_size
        done, taken = first + count, taken + count
    positions[:, done:] = np.arange(current, current + len(token_ids) - done)
    return positions, current + len(token_ids) - done


@lru_cache(maxsize=256)
def _block(time: int, rows: int, columns: int) -> np.ndarray:
    """(3, time · rows · columns) int64 positions of a picture relative to its first token."""
    return np.indices((time, rows, columns)).reshape(3, -1)


# Forward pass over the vision tower of a Qwen3-VL model, for pictures in batches of equal size.


VISION_BATCH_PATCHES = 16_384
_PROBED_ROWS = 64


@dataclass
class ImageFeatures:
    """Vision features of distinct pictures, ready to be looked up token by token.

    Attributes:
        embeddings: (N, hidden) rows that replace the image-pad embeddings.
        deepstack: one (N, hidden) tensor per early language layer, added to its output.
        offsets: first row of each picture, by picture key.
        counts: number of rows of each picture, by picture key.
    """

    embeddings: Tensor
    deepstack: list[Tensor]
    offsets: dict[str, int]
    counts: dict[str, int]

    def rows(self, keys: Sequence[str]) -> np.ndarray:
        """(M,) int64 row numbers of pictures, one after the other."""
        if not keys:
            return np.empty(0, np.int64)
        return np.concatenate([np.arange(self.offsets[k], self.offsets[k] + self.counts[k]) for k in keys])


def encode_images(visual: nn.Module, images: Sequence[EncodedImage], processor: Any) -> ImageFeatures:
    """Vision features of distinct pictures; gradients flow to the vision weights where they are on.

    Args:
        visual: the model's vision tower.
        images: distinct pictures, any sizes, at least one.
        processor: image processor whose `rescale_factor`, `image_mean`, `image_std` hold.
    """
    merge = visual.spatial_merge_size**2
    by_grid: dict[tuple[int, int, int], list[EncodedImage]] = {}
    for image in images:
        by_grid.setdefault(image.grid, []).append(image)
    offsets: dict[str, int] = {}
    counts: dict[str, int] = {}
    embeddings: list[Tensor] = []
    deepstack: list[list[Tensor]] = [[] for _ in visual.deepstack_merger_list]
    total = 0
    for grid, members in by_grid.items():
        patches = grid[0] * grid[1] * grid[2]
        size = max(1, VISION_BATCH_PATCHES // patches)
        for first in range(0, len(members), size):
            batch = members[first : first + size]
            pooled, layers = _encode_equal(visual, batch, grid, processor)
            embeddings.append(pooled)
            for collected, layer in zip(deepstack, layers, strict=True):
                collected.append(layer)
            for image in batch:
                offsets[image.key], counts[image.key] = total, patches // merge
                total += patches // merge
    return ImageFeatures(torch.cat(embeddings), [torch.cat(layer) for layer in deepstack], offsets, counts)


def _encode_equal(
    visual: nn.Module, images: Sequence[EncodedImage], grid: tuple[int, int, int], processor: Any
) -> tuple[Tensor, list[Tensor]]:
    count, device = len(images), visual.pos_embed.weight.device
    raw = np.stack([image.patches for image in images])
    hidden = _embed_patches(visual, raw, processor) + _grid_embedding(visual, grid, device)
    cos, sin = visual.rotary_pos_emb(
        hidden, get_vision_position_ids(_grid_tensor(grid, device), visual.spatial_merge_size)
    )
    layers: list[Tensor] = []
    for index, block in enumerate(visual.blocks):
        hidden = hidden + _attend(block.attn, block.norm1(hidden), cos, sin)
        hidden = hidden + block.mlp(block.norm2(hidden))
        if index in visual.deepstack_visual_indexes:
            merger = visual.deepstack_merger_list[list(visual.deepstack_visual_indexes).index(index)]
            layers.append(merger(hidden.reshape(count * hidden.shape[1], -1)))
    return visual.merger(hidden.reshape(count * hidden.shape[1], -1)), layers


def _embed_patches(visual: nn.Module, raw: np.ndarray, processor: Any) -> Tensor:
    """(N, P, hidden) embeddings of (N, P, 3·patch²) uint8 patches."""
    projection = visual.patch_embed.proj
    weight, device = projection.weight, projection.weight.device
    # A still picture repeats its frame, so the temporal taps of the kernel add up; the normalisation of pixels,
    # (value · scale − mean) / std per channel, is part of the same linear map.
    taps = weight.sum(dim=2).flatten(2).float()
    mean = torch.tensor(processor.image_mean, device=device).view(1, 3, 1)
    std = torch.tensor(processor.image_std, device=device).view(1, 3, 1)
    kernel = (taps * (processor.rescale_factor / std)).flatten(1)
    offset = projection.bias.float() - (taps * (mean / std)).flatten(1).sum(1)
    rows, inverse = _distinct_rows(raw.reshape(-1, raw.shape[-1]))
    embedded = F.linear(torch.from_numpy(rows).to(device).float(), kernel, offset).to(weight.dtype)
    if inverse is not None:
        embedded = embedded.index_select(0, torch.from_numpy(inverse).to(device))
    return embedded.view(*raw.shape[:2], -1)


def _distinct_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Distinct rows and the number of each row among them, or the rows themselves where few repeat.

    Drawn boards consist of a few kinds of tiles; photographs and diagrams do not, which the first rows tell.
    """
    probe = rows[:_PROBED_ROWS]
    if len({row.tobytes() for row in probe}) * 2 > len(probe):
        return rows, None
    # A dictionary in the order of appearance: sorting rows of this length takes five times as long.
    numbers: dict[bytes, int] = {}
    inverse = np.array([numbers.setdefault(row.tobytes(), len(numbers)) for row in rows], np.int64)
    return np.frombuffer(bytearray().join(numbers), np.uint8).reshape(len(numbers), -1), inverse


def _grid_embedding(visual: nn.Module, grid: tuple[int, int, int], device: torch.device) -> Tensor:
    indices, weights = get_vision_interpolation_indices_and_weights(
        _grid_tensor(grid, device),
        num_grid_per_side=visual.num_grid_per_side,
        mode=visual.interpolation_mode,
        align_corners=visual.interpolation_align_corners,
        spatial_merge_size=visual.config.spatial_merge_size,
    )
    table = visual.pos_embed.weight
    return (F.embedding(indices, table) * weights[:, :, None].to(table.dtype)).sum(1)


def _attend(attention: nn.Module, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    count, length, width = hidden.shape
    queries, keys, values = attention.qkv(hidden).view(count, length, 3, attention.num_heads, -1).unbind(2)
    queries, keys = apply_rotary_pos_emb_vision(queries, keys, cos, sin)
    mixed = F.scaled_dot_product_attention(
        queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), scale=attention.scaling
    )
    return attention.proj(mixed.transpose(1, 2).reshape(count, length, width))


def _grid_tensor(grid: tuple[int, int, int], device: torch.device) -> Tensor:
    return torch.tensor([grid], dtype=torch.long, device=device)


# Forward pass over the language model of a Qwen3-VL model, from embeddings with the pictures in place.


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
