"""Forward pass over the vision tower of a Qwen3-VL model, for pictures in batches of equal size.

The library's modules and weights do the arithmetic; only the order of the work is ours: one matrix product instead of a
3-D convolution, one attention call for all pictures of a size instead of one per picture. The results equal the
library's forward pass to float rounding (tested).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb_vision
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from geo_sokoban_pipeline.policies.images import EncodedImage

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
