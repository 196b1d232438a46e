"""The trainer's forward pass: right-padded micro-batches, logits only at trained positions, every picture encoded once.

Right padding needs no mask, because a causal pass never looks at what follows. Selections use `index_select`, whose
backward pass is deterministic on several threads, unlike that of `x[index]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from geo_sokoban_pipeline.grpo.batching import plan_micro_batches
from geo_sokoban_pipeline.grpo.loss import Objective, StepSize, token_log_probs, token_log_probs_and_entropy
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.policies.qwen3_vl import ImageFeatures, encode_images, place_images, run_text
from geo_sokoban_pipeline.training.batch import TrainSample


class TrainForward:
    """Log-probs of trained tokens under a policy.

    Args:
        policy: its model is used in place.
        temperature: sampling temperature; divides the logits here as it did there.
        max_tokens: padded tokens of a micro-batch.
        logit_chunk: trained positions whose logits are held at once.
    """

    def __init__(self, policy: Policy, temperature: float, max_tokens: int, logit_chunk: int) -> None:
        self.policy = policy
        self.temperature = temperature
        self.max_tokens = max_tokens
        self.logit_chunk = logit_chunk
        self._core = policy.model.model
        self._device = policy.model.device
        self._banned = torch.from_numpy(policy.banned_ids).to(self._device)

    def plan(self, samples: Sequence[TrainSample]) -> list[list[int]]:
        """Micro-batches as lists of sample numbers, similar lengths together."""
        return plan_micro_batches([sample.length for sample in samples], self.max_tokens)

    def encode(self, samples: Sequence[TrainSample]) -> ImageFeatures | None:
        """Features of the distinct pictures of samples; None without pictures."""
        images = {image.key: image for sample in samples for image in sample.images}
        if not images:
            return None
        with self.policy.computing():
            return encode_images(self._core.visual, list(images.values()), self.policy.image_processor)

    def log_probs(
        self, samples: Sequence[TrainSample], features: ImageFeatures | None, *, entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T) log-probs, entropies (zeros if not asked for) and bool mask of trained tokens, packed to the left."""
        with self.policy.computing():
            return self._log_probs(samples, features, entropy)

    def _log_probs(
        self, samples: Sequence[TrainSample], features: ImageFeatures | None, entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        counts = [len(sample.targets) for sample in samples]
        hidden = self._hidden(samples, features, max(counts))
        places = np.concatenate([np.arange(count) + row * max(counts) for row, count in enumerate(counts)])
        target = torch.from_numpy(places).to(self._device)
        labels = torch.from_numpy(np.concatenate([sample.labels for sample in samples])).to(self._device)
        selected = hidden.reshape(-1, hidden.shape[-1]).index_select(0, target)
        values, entropies = self._score(selected, labels, entropy)
        empty = values.new_zeros(len(samples) * max(counts))
        mask = torch.zeros_like(empty, dtype=torch.bool).index_fill(0, target, True)
        shape = (len(samples), max(counts))
        packed = empty.index_copy(0, target, values), empty.index_copy(0, target, entropies), mask
        return packed[0].view(shape), packed[1].view(shape), packed[2].view(shape)

    def _hidden(self, samples: Sequence[TrainSample], features: ImageFeatures | None, count: int) -> Tensor:
        """(B, count, hidden) states that predict the trained tokens; rows with fewer of them repeat their first one."""
        width = max(sample.length for sample in samples)
        ids = np.zeros((len(samples), width), np.int64)
        positions = np.zeros((3, len(samples), width), np.int64)
        wanted = np.empty((len(samples), count), np.int64)
        for row, sample in enumerate(samples):
            wanted[row] = sample.targets[0] - 1
            wanted[row, : len(sample.targets)] = sample.targets - 1
            ids[row, : sample.length] = sample.input_ids
            positions[:, row, : sample.length] = sample.positions
        tokens = torch.from_numpy(ids).to(self._device)
        embeddings = self._core.language_model.embed_tokens(tokens)
        keys = [image.key for sample in samples for image in sample.images]
        mask, deepstack = None, []
        if keys and features is not None:
            mask = tokens == self.policy.codec.image_pad_id
            rows = torch.from_numpy(features.rows(keys)).to(self._device)
            embeddings = place_images(embeddings, mask, features.embeddings.index_select(0, rows))
            deepstack = [layer.index_select(0, rows) for layer in features.deepstack]
        return run_text(
            self._core.language_model,
            embeddings,
            torch.from_numpy(positions).to(self._device),
            image_mask=mask,
            deepstack=deepstack,
            wanted=torch.from_numpy(wanted).to(self._device),
        )

    def _score(self, hidden: Tensor, labels: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
        if len(hidden) <= self.logit_chunk:
            return self._score_chunk(hidden, labels, entropy)
        score: Callable[..., tuple[Tensor, Tensor]] = self._score_chunk
        parts = [
            # Only one chunk's logits live at a time: they are computed again in the backward pass.
            checkpoint(score, part, label, entropy, use_reentrant=False)
            for part, label in zip(hidden.split(self.logit_chunk), labels.split(self.logit_chunk), strict=True)
        ]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def _score_chunk(self, hidden: Tensor, labels: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
        logits = self.policy.model.lm_head(hidden)
        settings = {"temperature": self.temperature, "banned_ids": self._banned}
        if entropy:
            return token_log_probs_and_entropy(logits, labels, **settings)
        values = token_log_probs(logits, labels, **settings)
        return values, torch.zeros_like(values)


# Gradients of an objective over samples, micro-batch by micro-batch, left in the model's parameters.


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

    def accumulate(self, samples: Sequence[TrainSample], objective: Objective, step: StepSize) -> dict[str, float]:
        """Add the gradients of samples that are a part of a step; returns the objective's metrics, summed."""
        features = self._forward.encode(samples)
        leaves = None if features is None else _leaves(features)
        totals: dict[str, float] = {}
        for batch in self._forward.plan(samples):
            members = [samples[index] for index in batch]
            log_probs, entropy, mask = self._forward.log_probs(members, leaves, entropy=objective.needs_entropy)
            part = objective(members, log_probs, entropy, mask, step)
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
