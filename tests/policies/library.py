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
from geo_sokoban_pipeline.policies.qwen3_vl import extend_positions
from geo_sokoban_pipeline.training.batch import TrainSample
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


def conversation(policy: Policy, sizes: Sequence[tuple[int, int]]) -> tuple[np.ndarray, list[EncodedImage]]:
    """Token ids of a conversation with images of these sizes, and the images."""
    images = read_noise(policy, sizes)
    pad, mark = policy.codec.image_pad_id, policy.tokenizer.convert_tokens_to_ids("<|vision_start|>")
    ids = [5, 6, 7]
    for image in images:
        ids += [mark, *[pad] * image.token_count(2), mark + 1, 8, 9]
    return np.array(ids, np.int32), images


def build_samples(policy: Policy) -> list[TrainSample]:
    """Samples with two images, one, and none; each with three targets and another advantage."""
    found = []
    for number, sizes in enumerate(([(96, 96), (32, 64)], [(64, 32)], [])):
        ids, images = conversation(policy, sizes)
        positions, _ = extend_positions(ids, [image.grid for image in images], policy.codec.image_pad_id, 2)
        names = ("old_log_probs", "rollout_log_probs", "advantages")
        values = {name: np.full(3, number - 1.0, np.float32) for name in names}
        targets, labels = np.array([1, 2, len(ids) - 1]), np.array([20, 21, 22])
        found.append(TrainSample(ids.astype(np.int64), positions, targets, labels, images, **values))
    return found


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


def sample_log_probs(policy: Policy, sample: TrainSample, temperature: float = 1.0) -> Tensor:
    """Log-probs of a sample's trained tokens, with their graph."""
    token_ids = np.append(sample.input_ids, sample.labels[-1])
    policy.model.model.rope_deltas = None
    logits = policy.model(**library_inputs(policy, token_ids, sample.images)).logits[0].float()
    logits = logits.index_fill(1, torch.from_numpy(policy.banned_ids), -torch.inf)
    scores = torch.log_softmax(logits / temperature, -1)
    return scores[torch.from_numpy(sample.targets - 1), torch.from_numpy(sample.labels)]
