"""The trainer's forward and backward passes: micro-batches of similar lengths, logits only at trained positions.

Right padding needs no mask, because a causal pass never looks at what follows. Every image is encoded once, and its
features gather the gradients of all micro-batches before one backward pass through the vision tower. Selections use
`index_select`, whose backward pass is deterministic on several threads, unlike that of `x[index]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from geo_sokoban_pipeline.grpo.batching import plan_micro_batches
from geo_sokoban_pipeline.grpo.loss import Objective, StepSize, token_log_probs, token_log_probs_and_entropy
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.policies.qwen3_vl import ImageFeatures
from geo_sokoban_pipeline.training.batch import TrainSample


@dataclass(frozen=True)
class PassSetting:
    """How samples pass the model.

    Attributes:
        temperature: sampling temperature of the rollouts; divides the logits here as it did there.
        max_tokens: padded tokens of a micro-batch.
        logit_chunk: trained positions whose logits are held at once.
    """

    temperature: float
    max_tokens: int
    logit_chunk: int


class GradientPass:
    """Log-probs of trained tokens under a policy, and gradients of an objective, left in its parameters."""

    def __init__(self, policy: Policy, setting: PassSetting) -> None:
        self.policy, self.setting = policy, setting
        self._device = policy.model.device
        self._banned = torch.from_numpy(policy.banned_ids).to(self._device)

    @torch.no_grad()
    def log_probs(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """(M,) float32 log-probs of each sample's trained tokens."""
        features = self._encode(samples)
        rows: list[np.ndarray] = [np.empty(0, np.float32)] * len(samples)
        for batch in self._plan(samples):
            members = [samples[index] for index in batch]
            values, _, _ = self._score(members, features, entropy=False)
            for row, index in enumerate(batch):
                rows[index] = values[row, : len(samples[index].targets)].float().cpu().numpy()
        return rows

    def accumulate(self, samples: Sequence[TrainSample], objective: Objective, step: StepSize) -> dict[str, float]:
        """Add the gradients of samples that are a part of a step; returns the objective's metrics, summed."""
        network = self.policy.network.train()
        try:
            features = self._encode(samples)
            leaves = None
            if features is not None:
                # Cut off from the tower, they collect the gradients of all micro-batches.
                leaves = replace(features, tables=[table.detach().requires_grad_() for table in features.tables])
            totals: dict[str, float] = {}
            for batch in self._plan(samples):
                members = [samples[index] for index in batch]
                scored = self._score(members, leaves, entropy=objective.needs_entropy)
                part = objective(members, *scored, step)
                part.loss.backward()
                for name, value in part.metrics.items():
                    totals[name] = totals.get(name, 0.0) + value
            if features is not None and leaves is not None:
                _carry_gradients(features.tables, leaves.tables)
            return totals
        finally:
            network.eval()

    def _plan(self, samples: Sequence[TrainSample]) -> list[list[int]]:
        return plan_micro_batches([sample.length for sample in samples], self.setting.max_tokens)

    def _encode(self, samples: Sequence[TrainSample]) -> ImageFeatures | None:
        """Features of the distinct images of samples; None without images."""
        images = {image.key: image for sample in samples for image in sample.images}
        if not images:
            return None
        with self.policy.computing():
            return self.policy.network.encode(list(images.values()))

    def _score(
        self, samples: Sequence[TrainSample], features: ImageFeatures | None, *, entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T) log-probs, entropies (zeros if not asked for) and bool mask of trained tokens, packed to the left."""
        counts = [len(sample.targets) for sample in samples]
        width, count = max(sample.length for sample in samples), max(counts)
        ids = np.zeros((len(samples), width), np.int64)
        positions = np.zeros((3, len(samples), width), np.int64)
        wanted = np.empty((len(samples), count), np.int64)
        for row, sample in enumerate(samples):
            # States that predict the trained tokens; a row with fewer of them repeats its first one.
            wanted[row] = sample.targets[0] - 1
            wanted[row, : len(sample.targets)] = sample.targets - 1
            ids[row, : sample.length] = sample.input_ids
            positions[:, row, : sample.length] = sample.positions
        places = np.concatenate([np.arange(own) + row * count for row, own in enumerate(counts)])
        target = torch.from_numpy(places).to(self._device)
        labels = torch.from_numpy(np.concatenate([sample.labels for sample in samples])).to(self._device)

        def read_out(states: Tensor, logits: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
            return self._read_out(states.flatten(0, 1).index_select(0, target), labels, logits, entropy)

        keys = [image.key for sample in samples for image in sample.images]
        shown = {}
        if keys and features is not None:
            rows = torch.from_numpy(features.rows(keys)).to(self._device)
            shown = {"features": features.tables, "rows": rows}
        with self.policy.computing():
            values, entropies = self.policy.network(
                torch.from_numpy(ids).to(self._device),
                torch.from_numpy(positions).to(self._device),
                wanted=torch.from_numpy(wanted).to(self._device),
                head=read_out,
                **shown,
            )
        empty = values.new_zeros(len(samples) * count)
        mask = torch.zeros_like(empty, dtype=torch.bool).index_fill(0, target, True)
        packed = empty.index_copy(0, target, values), empty.index_copy(0, target, entropies), mask
        shape = (len(samples), count)
        return packed[0].view(shape), packed[1].view(shape), packed[2].view(shape)

    def _read_out(
        self, states: Tensor, labels: Tensor, logits: Callable[[Tensor], Tensor], entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """(M,) log-probs of the labels and entropies after (M, hidden) states."""
        temperature, banned, chunk = self.setting.temperature, self._banned, self.setting.logit_chunk

        def score(part: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
            if entropy:
                return token_log_probs_and_entropy(logits(part), label, temperature=temperature, banned_ids=banned)
            values = token_log_probs(logits(part), label, temperature=temperature, banned_ids=banned)
            return values, torch.zeros_like(values)

        if len(states) <= chunk:
            return score(states, labels)
        # Only one chunk's logits live at a time: they are computed again in the backward pass.
        parts = [
            checkpoint(score, part, label, use_reentrant=False)
            for part, label in zip(states.split(chunk), labels.split(chunk), strict=True)
        ]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _carry_gradients(tables: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    pairs = [
        (table, leaf.grad)
        for table, leaf in zip(tables, leaves, strict=True)
        if table.requires_grad and leaf.grad is not None
    ]
    if pairs:
        torch.autograd.backward([table for table, _ in pairs], [gradient for _, gradient in pairs])
