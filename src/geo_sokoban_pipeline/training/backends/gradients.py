"""Gradients of an objective over samples, micro-batch by micro-batch, left in the model's parameters.

Each distinct picture is encoded once: the micro-batches leave their gradients in the picture features, and one vision
pass at the end carries them on. Gradients of several calls add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.policies.vision import ImageFeatures
from geo_sokoban_pipeline.training.backends.forward import TrainForward
from geo_sokoban_pipeline.training.objectives import Objective
from geo_sokoban_pipeline.training.samples import TrainSample


@dataclass(frozen=True)
class PassSetting:
    """How samples pass the model.

    Attributes:
        temperature: sampling temperature of the rollouts; divides the logits.
        max_tokens: padded tokens of a micro-batch.
        logit_chunk: trained positions whose logits are held at once.
    """

    temperature: float
    max_tokens: int
    logit_chunk: int


class GradientPass:
    """Forward and backward passes over a policy's model."""

    def __init__(self, policy: Policy, setting: PassSetting) -> None:
        self._forward = TrainForward(policy, setting.temperature, setting.max_tokens, setting.logit_chunk)

    @torch.no_grad()
    def log_probs(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """(M,) float32 log-probs of each sample's trained tokens."""
        features = self._forward.encode(samples)
        rows: list[np.ndarray] = [np.empty(0, np.float32)] * len(samples)
        for batch in self._forward.plan(samples):
            members = [samples[index] for index in batch]
            values, _, _ = self._forward.log_probs(members, features, entropy=False)
            for row, index in enumerate(batch):
                rows[index] = values[row, : len(samples[index].targets)].float().cpu().numpy()
        return rows

    def accumulate(self, samples: Sequence[TrainSample], objective: Objective) -> dict[str, float]:
        """Add the gradients of an objective that has begun; returns its metrics, summed."""
        features = self._forward.encode(samples)
        leaves = None if features is None else _leaves(features)
        totals: dict[str, float] = {}
        for batch in self._forward.plan(samples):
            members = [samples[index] for index in batch]
            log_probs, entropy, mask = self._forward.log_probs(members, leaves, entropy=objective.needs_entropy)
            part = objective(members, log_probs, entropy, mask)
            part.loss.backward()
            for name, value in part.metrics.items():
                totals[name] = totals.get(name, 0.0) + value
        if features is not None and leaves is not None:
            _carry_gradients(features, leaves)
        return totals


def _leaves(features: ImageFeatures) -> ImageFeatures:
    """The same features cut off from the vision tower, collecting gradients of their own."""
    return ImageFeatures(
        features.embeddings.detach().requires_grad_(),
        [layer.detach().requires_grad_() for layer in features.deepstack],
        features.offsets,
        features.counts,
    )


def _carry_gradients(features: ImageFeatures, leaves: ImageFeatures) -> None:
    pairs = [
        (tensor, leaf.grad)
        for tensor, leaf in zip(
            [features.embeddings, *features.deepstack], [leaves.embeddings, *leaves.deepstack], strict=True
        )
        if tensor.requires_grad and leaf.grad is not None
    ]
    if pairs:
        torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
