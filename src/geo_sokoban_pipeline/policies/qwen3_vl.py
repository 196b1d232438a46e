"""Qwen3-VL's forward pass as one module: images to features, tokens to states, states to logits.

`PolicyNetwork` uses the weights of a Hugging Face model in place; its parameters keep their names. Its results equal
those of the library's forward pass (tested), but it orders the work differently: images of one size pass the tower as
one batch, the last layer runs only at the wanted positions, and a cache may have rows of unequal length. Every weight
is used inside the `forward` of `vision` or of `language`, and layers are called whole, so both can be sharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    apply_rotary_pos_emb_vision,
    eager_attention_forward,
    rotate_half,
)
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from geo_sokoban_pipeline.policies.patches import EncodedImage

VISION_BATCH_PATCHES = 16_384
_PROBED_ROWS = 64


def extend_positions(
    token_ids: np.ndarray, grids: Sequence[tuple[int, int, int]], image_pad_id: int, merge_size: int, start: int = 0
) -> tuple[np.ndarray, int]:
    """M-RoPE positions of the next tokens of a conversation: text counts up, an image spans a block of (t, h, w).

    Positions do not depend on what follows, so later turns extend earlier positions; the result equals
    `Qwen3VLModel.get_rope_index` (tested).

    Args:
        token_ids: (L,) ids with image pads expanded; each image's pads are consecutive and complete.
        grids: (t, h, w) in patches of the images among these tokens, in order.
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
    """(3, time · rows · columns) int64 positions of an image relative to its first token."""
    return np.indices((time, rows, columns)).reshape(3, -1)


@dataclass
class ImageFeatures:
    """Features of distinct images, looked up token by token.

    Attributes:
        tables: (N, hidden) each: first the rows that replace image-pad embeddings, then those that are added to the
            output of each early language layer (deepstack).
        offsets: first row of each image, by its key.
        counts: number of rows of each image, by its key.
    """

    tables: list[Tensor]
    offsets: dict[str, int]
    counts: dict[str, int]

    @classmethod
    def join(cls, parts: Sequence[ImageFeatures]) -> ImageFeatures:
        """Features of the images of all parts, one part's tables behind the other's."""
        if len(parts) == 1:
            return parts[0]
        starts = np.cumsum([0, *(len(part.tables[0]) for part in parts)]).tolist()
        offsets = {
            k: start + own for start, part in zip(starts, parts, strict=False) for k, own in part.offsets.items()
        }
        counts = {key: count for part in parts for key, count in part.counts.items()}
        return cls([torch.cat(tables) for tables in zip(*(p.tables for p in parts), strict=True)], offsets, counts)

    def rows(self, keys: Sequence[str]) -> np.ndarray:
        """(M,) int64 row numbers of images, one after the other."""
        if not keys:
            return np.empty(0, np.int64)
        return np.concatenate([np.arange(self.offsets[k], self.offsets[k] + self.counts[k]) for k in keys])


class KvCache(Protocol):
    """Keys and values of earlier tokens."""

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Store (B, heads, L, dim) keys and values of a layer; returns all that the queries attend to."""


class PolicyNetwork(nn.Module):
    """The forward pass of a policy, for prefill, decode and training.

    Args:
        model: `Qwen3VLForConditionalGeneration` or its mixture of experts, whose weights are used in place.
        image_processor: its `rescale_factor`, `image_mean` and `image_std` normalise the pixels.

    Attributes:
        vision: the vision tower; a call encodes images of any sizes, so it is one unit where weights are sharded.
        language: the language model with its output head; each of its layers is a unit of its own.
    """

    def __init__(self, model: Any, image_processor: Any) -> None:
        super().__init__()
        self.vision = VisionTower(model.model.visual, image_processor)
        self.language = LanguageModel(model.model.language_model, model.lm_head, model.config.image_token_id)

    def encode(self, images: Sequence[EncodedImage], *, checkpointing: bool = False) -> ImageFeatures:
        """Features of distinct images, at least one, any sizes; see `LanguageModel.forward` for checkpointing."""
        order = [image for members in _by_grid(images).values() for image in members]
        counts = {image.key: image.token_count(self.vision.merge_size) for image in order}
        ends = np.cumsum(list(counts.values())).tolist()
        offsets = {key: end - count for (key, count), end in zip(counts.items(), ends, strict=True)}
        return ImageFeatures(self.vision(images, checkpointing), offsets, counts)

    def forward(self, token_ids: Tensor, positions: Tensor, **options: Any) -> Any:
        """States of the language model, or the result of a head on them: see `LanguageModel.forward`."""
        return self.language(token_ids, positions, **options)

    def logits(self, states: Tensor) -> Tensor:
        """(..., vocabulary) logits of (..., hidden) states that `forward` gave."""
        return self.language.head(states)


# The vision tower: images in batches of equal size.


class VisionTower(nn.Module):
    """Vision features of images, with gradients where torch records them."""

    def __init__(self, visual: Any, image_processor: Any) -> None:
        super().__init__()
        self.visual = visual
        self.blocks = nn.ModuleList(VisionBlock(block) for block in visual.blocks)
        self.merge_size = int(visual.spatial_merge_size)
        self._processor = image_processor

    def forward(self, images: Sequence[EncodedImage], checkpointing: bool = False) -> list[Tensor]:
        """`ImageFeatures.tables` of distinct images, grouped by grid in order of first appearance."""
        parts: list[list[Tensor]] = []
        for grid, members in _by_grid(images).items():
            size = max(1, VISION_BATCH_PATCHES // (grid[0] * grid[1] * grid[2]))
            parts += [
                self._encode(members[first : first + size], grid, checkpointing)
                for first in range(0, len(members), size)
            ]
        return [torch.cat(tables) for tables in zip(*parts, strict=True)]

    def _encode(self, images: Sequence[EncodedImage], grid: tuple[int, int, int], checkpointing: bool) -> list[Tensor]:
        visual, device = self.visual, self.visual.pos_embed.weight.device
        shape = torch.tensor([grid], dtype=torch.long, device=device)
        hidden = self._embed(np.stack([image.patches for image in images])) + self._grid_embedding(shape)
        rotary = visual.rotary_pos_emb(hidden, get_vision_position_ids(shape, self.merge_size))
        deepstack: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            hidden = _run(block, checkpointing, hidden, rotary)
            if index in visual.deepstack_visual_indexes:
                merger = visual.deepstack_merger_list[list(visual.deepstack_visual_indexes).index(index)]
                deepstack.append(merger(hidden.flatten(0, 1)))
        return [visual.merger(hidden.flatten(0, 1)), *deepstack]

    def _embed(self, raw: np.ndarray) -> Tensor:
        """(N, P, hidden) embeddings of (N, P, 3·patch²) uint8 patches."""
        projection, processor = self.visual.patch_embed.proj, self._processor
        weight, device = projection.weight, projection.weight.device
        # A still image repeats its frame, so the temporal taps of the kernel add up; the normalisation of pixels,
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

    def _grid_embedding(self, shape: Tensor) -> Tensor:
        """(P, hidden) learned position embeddings, interpolated to a grid."""
        visual = self.visual
        indices, weights = get_vision_interpolation_indices_and_weights(
            shape,
            num_grid_per_side=visual.num_grid_per_side,
            mode=visual.interpolation_mode,
            align_corners=visual.interpolation_align_corners,
            spatial_merge_size=self.merge_size,
        )
        embedded = visual.pos_embed(indices)
        return (embedded * weights[:, :, None].to(embedded.dtype)).sum(1)


class VisionBlock(nn.Module):
    """A block of the tower over a batch of images of equal size; the library's block attends image by image."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """(N, P, hidden) of (N, P, hidden); rotary: cosines and sines, (P, head dimension) each."""
        block, attention = self.block, self.block.attn
        qkv = attention.qkv(block.norm1(hidden)).view(*hidden.shape[:2], 3, attention.num_heads, -1)
        queries, keys, values = qkv.unbind(2)
        queries, keys = apply_rotary_pos_emb_vision(queries, keys, *rotary)
        mixed = attend(attention, queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), None)
        hidden = hidden + attention.proj(mixed)
        return hidden + block.mlp(block.norm2(hidden))


def cut_images(images: Sequence[EncodedImage], patches: int | None) -> list[list[EncodedImage]]:
    """Parts of at most so many patches, each at least one image; images of one grid follow each other.

    Args:
        patches: None: one part.
    """
    if patches is None or sum(math.prod(image.grid) for image in images) <= patches:
        return [list(images)]
    parts: list[list[EncodedImage]] = []
    left = 0
    for image in (image for members in _by_grid(images).values() for image in members):
        size = math.prod(image.grid)
        if size > left:
            parts.append([])
            left = max(patches, size)
        parts[-1].append(image)
        left -= size
    return parts


def _by_grid(images: Sequence[EncodedImage]) -> dict[tuple[int, int, int], list[EncodedImage]]:
    groups: dict[tuple[int, int, int], list[EncodedImage]] = {}
    for image in images:
        groups.setdefault(image.grid, []).append(image)
    return groups


def _distinct_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Distinct rows and the index of each row among them, or the rows themselves and None where few repeat.

    Rendered boards consist of a few kinds of tiles; photographs and diagrams do not. The first rows decide.
    """
    probe = rows[:_PROBED_ROWS]
    if len({row.tobytes() for row in probe}) * 2 > len(probe):
        return rows, None
    # A dictionary in the order of appearance: sorting rows of this length takes five times as long.
    numbers: dict[bytes, int] = {}
    inverse = np.array([numbers.setdefault(row.tobytes(), len(numbers)) for row in rows], np.int64)
    return np.frombuffer(bytearray().join(numbers), np.uint8).reshape(len(numbers), -1), inverse


# The language model with its output head.


class LanguageModel(nn.Module):
    """The language model with its head: tokens and image features to states, states to logits."""

    def __init__(self, model: Any, head: nn.Module, image_pad_id: int) -> None:
        super().__init__()
        self.embed_tokens = model.embed_tokens
        self.rotary_emb = model.rotary_emb
        self.layers = nn.ModuleList(DecoderLayer(layer) for layer in model.layers)
        self.norm = model.norm
        self.head = OutputHead(head)
        self._config = model.config
        self._image_pad_id = image_pad_id

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        *,
        features: Sequence[Tensor] = (),
        rows: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: KvCache | None = None,
        wanted: Tensor | None = None,
        head: Callable[[Tensor, nn.Module], Any] | None = None,
        checkpointing: bool = False,
    ) -> Any:
        """Run the language model.

        Args:
            token_ids: (B, L) int64.
            positions: (3, B, L) int64 M-RoPE positions.
            features: `ImageFeatures.tables`.
            rows: (number of image pads,) int64 rows of the tables, in row-major order of the tokens; None: no images.
            attention_mask: (B or 1, 1, L, S) bool, True where attention is allowed; None: causal over the L tokens, or,
                with L = 1, all positions in the cache.
            cache: of earlier tokens.
            wanted: (B, T) int64 indices along L of the states to return; None: all.
            head: `head(states, output head)`, called inside `forward`, where sharded weights are gathered. None: the
                states are returned.
            checkpointing: autograd keeps the input of each layer alone, and runs the layer again in the backward pass.

        Returns:
            (B, L, hidden) states, (B, T, hidden) at the wanted positions, or the head's result.
        """
        hidden = self.embed_tokens(token_ids)
        where: Tensor | None = None
        deepstack: list[Tensor] = []
        if rows is not None:
            where = (token_ids == self._image_pad_id).reshape(-1).nonzero().squeeze(1)
            placed, *deepstack = [table.index_select(0, rows).to(hidden.dtype) for table in features]
            hidden = hidden.flatten(0, 1).index_copy(0, where, placed).view_as(hidden)
        if torch.is_grad_enabled() and not hidden.requires_grad:
            # Frozen embeddings and no image: without a gradient here a frozen language model has no backward pass, and
            # FSDP reduces the gradients of layer 0 later than on a rank that has images, where the two would mix.
            hidden = hidden.detach().requires_grad_()
        rotary = self.rotary_emb(hidden, positions)
        # The last layer runs at the wanted positions alone if they are few, unless image features are added after it.
        few = wanted is not None and 2 * wanted.shape[1] <= token_ids.shape[1] and len(deepstack) < len(self.layers)
        length = token_ids.shape[1]
        mask = attention_bias(self._config, attention_mask, length, hidden)
        for index, layer in enumerate(self.layers):
            if few and index == len(self.layers) - 1:
                assert wanted is not None
                there = attention_bias(self._config, _mask_at(wanted, attention_mask, length), length, hidden)
                hidden = _run(layer, checkpointing, hidden, rotary, there, cache, wanted)
            else:
                hidden = _run(layer, checkpointing, hidden, rotary, mask, cache)
            if where is not None and index < len(deepstack):
                hidden = hidden.flatten(0, 1).index_add(0, where, deepstack[index]).view_as(hidden)
        if wanted is not None and not few:
            hidden = _pick(hidden, wanted)
        states = self.norm(hidden)
        return states if head is None else self.head(states, head)


class OutputHead(nn.Module):
    """The output head: states to logits."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, states: Tensor, read: Callable[[Tensor, nn.Module], Any] | None = None) -> Any:
        """Logits of states, or `read(states, linear layer)`."""
        return self.linear(states) if read is None else read(states, self.linear)


class DecoderLayer(nn.Module):
    """A layer of the language model, at all positions or at the wanted ones."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: KvCache | None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Output at the wanted positions, or at all; keys and values are computed at all positions.

        Args:
            hidden: (B, L, hidden).
            rotary: cosines and sines, (B, L, head dimension) each.
            mask: of the wanted positions, in the form that the attention implementation takes.
            wanted: (B, T) int64 indices along L.
        """
        layer, attention = self.layer, self.layer.self_attn
        normed = layer.input_layernorm(hidden)
        if wanted is None:
            queries = self._queries(normed, rotary)
        keys = attention.k_norm(_heads(attention.k_proj(normed), attention))
        keys, values = _rotate(keys, *rotary), _heads(attention.v_proj(normed), attention).transpose(1, 2)
        if cache is not None:
            keys, values = cache.update(keys, values, attention.layer_idx)
        if wanted is not None:
            queries = self._queries(_pick(normed, wanted), (_pick(rotary[0], wanted), _pick(rotary[1], wanted)))
        mixed = attention.o_proj(attend(attention, queries, keys, values, mask))
        hidden = (hidden if wanted is None else _pick(hidden, wanted)) + mixed
        normed = layer.post_attention_layernorm(hidden)
        mixture = hasattr(layer.mlp, "experts")
        return hidden + (mix_experts(layer.mlp, normed) if mixture else layer.mlp(normed))

    def _queries(self, normed: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        attention = self.layer.self_attn
        return _rotate(attention.q_norm(_heads(attention.q_proj(normed), attention)), *rotary)


def is_exact(module: nn.Module) -> bool:
    """Whether a module of a decoder layer has weights that no pass rounds to the type of products: norms, routers."""
    has_weights = next(module.parameters(recurse=False), None) is not None
    return has_weights and not isinstance(module, nn.Linear) and not hasattr(module, "gate_up_proj")


def _run(layer: nn.Module, checkpointing: bool, *inputs: Any) -> Tensor:
    """Output of a layer; nothing in it is random, so nothing of a generator is kept for its second run."""
    return (
        checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False) if checkpointing else layer(*inputs)
    )


def attend(attention: Any, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """(B, L, heads · dim) of (B, heads, L, dim) queries, by the policy's attention implementation."""
    name = attention.config._attn_implementation
    function = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
    return function(attention, queries, keys, values, mask, dropout=0.0, scaling=attention.scaling)[0].flatten(2)


def attention_bias(config: Any, mask: Tensor | None, length: int, like: Tensor) -> Tensor | None:
    """A bool mask in the form that the attention implementation takes.

    `eager` adds its mask to the scores: it needs 0 and a large negative number, and without one it is not causal.

    Args:
        config: of the language model.
        mask: True where attention is allowed; None: causal.
        length: tokens of each row.
        like: tensor of the device and type of the bias.
    """
    if config._attn_implementation != "eager":
        return mask
    if mask is None:
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=like.device).tril()
    allowed = torch.zeros(mask.shape, dtype=like.dtype, device=like.device)
    return allowed.masked_fill(~mask, torch.finfo(like.dtype).min)


def _mask_at(wanted: Tensor, mask: Tensor | None, total: int) -> Tensor:
    """(B, 1, T, S) bool mask of the wanted positions."""
    if mask is None:
        return (torch.arange(total, device=wanted.device) <= wanted[:, :, None])[:, None]
    rows = mask.expand(len(wanted), -1, -1, -1)
    return rows.gather(2, wanted[:, None, :, None].expand(-1, 1, -1, rows.shape[-1]))


def _heads(states: Tensor, attention: Any) -> Tensor:
    """(B, L, heads, dim) of (B, L, heads · dim)."""
    return states.view(*states.shape[:2], -1, attention.head_dim)


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (B, L, heads, dim) states, as (B, heads, L, dim)."""
    turned = states.transpose(1, 2)
    return turned * cos.unsqueeze(1) + rotate_half(turned) * sin.unsqueeze(1)


def _pick(states: Tensor, wanted: Tensor) -> Tensor:
    """(B, T, width) rows of (B, L, width) states; the backward pass of `index_select` is deterministic on threads."""
    starts = torch.arange(len(states), device=wanted.device)[:, None] * states.shape[1]
    flat = states.reshape(-1, states.shape[-1]).index_select(0, (wanted + starts).reshape(-1))
    return flat.view(*wanted.shape, -1)


def mix_experts(block: Any, hidden: Tensor) -> Tensor:
    """Output of a layer's mixture of experts; without autocast it equals the library's bit for bit.

    The library's router and experts do not follow autocast well: the router's product is rounded like any other, which
    changes the choice of experts wherever two scores are close, and the experts are multiplied in the type of their
    weights. Here the router computes in the type of its weights, and the experts in that of all other products.

    Args:
        block: `Qwen3VLMoeTextSparseMoeBlock`.
        hidden: (B, L, hidden).

    Returns:
        (B, L, hidden) in the type of products.
    """
    rows, device = hidden.flatten(0, 1), hidden.device.type
    with torch.autocast(device, enabled=False):
        _, shares, chosen = block.gate(rows.to(block.gate.weight.dtype))
    if not torch.is_autocast_enabled(device):
        mixed = block.experts(rows, chosen, shares)
    else:
        kind = torch.get_autocast_dtype(device)
        rounded = {name: weight.to(kind) for name, weight in block.experts.named_parameters()}
        mixed = functional_call(block.experts, rounded, (rows.to(kind), chosen, shares))
    return mixed.view_as(hidden)
