"""The library's own forward pass, against which our shortcuts are compared, and images to compare on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from geo_sokoban_pipeline.grpo.loss import token_log_probs
from geo_sokoban_pipeline.policies.patches import EncodedImage
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.trajectories.types import Trajectory
from stock_pixels import pixel_values

SIZES = [(96, 96), (32, 64), (96, 96), (64, 32), (128, 96), (96, 96)]


def read_noise(policy: Policy, sizes: Sequence[tuple[int, int]] = SIZES) -> list[EncodedImage]:
    """Images of noise of these widths and heights, as the policy's processor gives them."""
    generator = np.random.default_rng(0)
    return [
        policy.reader.read(Image.fromarray(generator.integers(0, 256, (height, width, 3), np.uint8)))
        for width, height in sizes
    ]


def library_inputs(policy: Policy, token_ids: np.ndarray, images: Sequence[EncodedImage]) -> dict[str, Tensor]:
    """Arguments of the model for one conversation, pixels in full."""
    ids = torch.from_numpy(np.asarray(token_ids, np.int64))[None]
    inputs = {"input_ids": ids, "mm_token_type_ids": (ids == policy.codec.image_pad_id).int()}
    if len(images):
        pixels = pixel_values(policy.reader, images)
        inputs["pixel_values"] = torch.from_numpy(pixels)
        inputs["image_grid_thw"] = torch.tensor([image.grid for image in images])
    return inputs


@torch.no_grad()
def library_logits(policy: Policy, token_ids: np.ndarray, images: Sequence[EncodedImage]) -> Tensor:
    """(L, V) logits of one conversation in one plain forward pass."""
    policy.model.model.rope_deltas = None
    return policy.model(**library_inputs(policy, token_ids, images)).logits[0]


def library_log_probs(policy: Policy, episode: Trajectory, temperature: float = 1.0) -> np.ndarray:
    """(L,) log-probs of an episode's tokens, 0 where the mask is 0."""
    images = [policy.reader.read_png(png) for png in episode.images]
    logits = library_logits(policy, episode.token_ids, images)[:-1]
    labels = torch.from_numpy(episode.token_ids[1:].astype(np.int64))
    values = token_log_probs(logits, labels, temperature=temperature, banned_ids=policy.banned_ids.tolist()).numpy()
    return np.where(episode.loss_mask == 1, np.concatenate([np.zeros(1, np.float32), values]), 0.0)
