"""Training samples: the arrays of an episode that the trainer needs, cut off after its last trained token.

Tokens after the last trained one cannot influence the loss, so they are not computed; the cut never splits an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import numpy as np

from geo_sokoban_pipeline.grpo.scoring import assistant_turns
from geo_sokoban_pipeline.policies.patches import EncodedImage
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.policies.qwen3_vl import extend_positions
from geo_sokoban_pipeline.trajectories.types import Trajectory

Item = TypeVar("Item")


@dataclass(frozen=True, eq=False)
class TrainSample:
    """One episode, ready to be trained on.

    Attributes:
        input_ids: (L,) int64 tokens before the last trained one.
        positions: (3, L) int64 M-RoPE positions.
        targets: (M,) int64 places of the trained tokens in the episode, each at least 1; the logits for token t are
            those at place t − 1.
        labels: (M,) int64 ids of the trained tokens.
        images: images among the inputs, in order.
        old_log_probs: (M,) float32, the denominator of the policy ratio.
        rollout_log_probs: (M,) float32 of the engine.
        ref_log_probs: (M,) float32 of the reference policy, or None.
        advantages: (M,) float32.
        turns: (M,) int32 number of each token's response within the episode.
    """

    input_ids: np.ndarray
    positions: np.ndarray
    targets: np.ndarray
    labels: np.ndarray
    images: list[EncodedImage]
    old_log_probs: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    rollout_log_probs: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    ref_log_probs: np.ndarray | None = None
    advantages: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    turns: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))

    @property
    def length(self) -> int:
        """Input tokens."""
        return len(self.input_ids)


def build_sample(trajectory: Trajectory, policy: Policy, version: int | None = None) -> TrainSample:
    """Training sample of an episode.

    Args:
        version: train only tokens sampled by this policy version; None: all sampled tokens.

    Raises:
        ValueError: the episode has no such token.
    """
    trained = trajectory.loss_mask if version is None else trajectory.loss_mask * sampled_by(trajectory, version)
    targets = np.flatnonzero(trained).astype(np.int64)
    if not len(targets):
        raise ValueError(f"episode {trajectory.trajectory_id} has no sampled token to train on.")
    kept = trajectory.token_ids[: targets[-1]]
    images = _images_within(trajectory, len(kept), policy)
    grids = [image.grid for image in images]
    codec = policy.codec
    positions, _ = extend_positions(kept, grids, codec.image_pad_id, codec.merge_size)
    rollout = trajectory.rollout_log_probs[targets]
    return TrainSample(
        input_ids=kept.astype(np.int64),
        positions=positions,
        targets=targets,
        labels=trajectory.token_ids[targets].astype(np.int64),
        images=images,
        old_log_probs=rollout,  # stored ones are of other settings; `update_policy` recomputes them where asked
        rollout_log_probs=rollout,
        advantages=token_advantages(trajectory)[targets],
        turns=token_turns(trajectory)[targets],
    )


def sampled_by(trajectory: Trajectory, version: int) -> np.ndarray:
    """(L,) int8, 1 on tokens sampled by this policy version."""
    mask = np.zeros(len(trajectory.token_ids), np.int8)
    for span_version, start, end in trajectory.weight_spans:
        if span_version == version:
            mask[start:end] = 1
    return mask


def token_advantages(trajectory: Trajectory) -> np.ndarray:
    """(L,) float32: each turn's advantage on its tokens where turns have some, else the episode's on all sampled."""
    values = np.zeros(len(trajectory.token_ids), np.float32)
    turns = assistant_turns(trajectory)
    if any(turn.advantage is not None for turn in turns):
        for turn in turns:
            values[turn.token_start : turn.token_end] = turn.advantage or 0.0
    elif trajectory.advantage is not None:
        values[trajectory.loss_mask == 1] = trajectory.advantage
    return values


def token_turns(trajectory: Trajectory) -> np.ndarray:
    """(L,) int32 number of the response that each token belongs to; 0 outside of responses."""
    turns = np.zeros(len(trajectory.token_ids), np.int32)
    for number, turn in enumerate(assistant_turns(trajectory)):
        turns[turn.token_start : turn.token_end] = number
    return turns


def spread(values: np.ndarray, sample: TrainSample, length: int) -> np.ndarray:
    """(length,) float32: (M,) values of a sample's trained tokens at their positions in the episode, 0.0 elsewhere."""
    row = np.zeros(length, np.float32)
    row[sample.targets] = values
    return row


def _images_within(trajectory: Trajectory, length: int, policy: Policy) -> list[EncodedImage]:
    images: list[EncodedImage] = []
    for turn in trajectory.turns:
        if turn.token_start < length:
            images += [policy.reader.read_png(trajectory.images[index]) for index in turn.image_indices]
    return images


def split_steps(
    groups: Sequence[Item], *, steps: int | None = None, groups_per_step: int | None = None
) -> list[list[Item]]:
    """Split the groups of an iteration into minibatches of nearly equal size, one per optimizer step, in order.

    Args:
        groups: trained groups; without any there is no step.
        steps: number of steps, at most one per group; None: derived from `groups_per_step`, or 1.
        groups_per_step: wanted minibatch size; the number of steps is rounded (halves up), at least 1.

    Returns:
        One list per step; sizes differ by at most 1, larger ones first.

    Raises:
        ValueError: both are given, or one is not positive.
    """
    if steps is not None and groups_per_step is not None:
        raise ValueError(f"steps={steps} and groups_per_step={groups_per_step}: give one of them, the other as None.")
    for name, value in (("steps", steps), ("groups_per_step", groups_per_step)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: it must be 1 or more.")
    if groups_per_step is not None:
        steps = (2 * len(groups) + groups_per_step) // (2 * groups_per_step)
    count = min(max(1, steps or 1), len(groups))
    size, extra = divmod(len(groups), count) if count else (0, 0)
    bounds = [part * size + min(part, extra) for part in range(count + 1)]
    return [list(groups[start:end]) for start, end in pairwise(bounds)]
