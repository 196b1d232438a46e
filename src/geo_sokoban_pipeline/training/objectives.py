"""Objectives: from log-probs of trained tokens to a loss. Each divides by the numbers of the whole optimizer step, so
the sum over its micro-batches is the loss of the step, however it was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from geo_sokoban_pipeline.config.grpo import GrpoOptions
from geo_sokoban_pipeline.grpo.loss import (
    kl_estimate,
    off_policy_metrics,
    policy_loss,
    reduce_tokens,
    truncated_importance_weights,
)
from geo_sokoban_pipeline.training.batch import TrainSample


class Objective(Protocol):
    """A loss over the trained tokens of a micro-batch."""

    needs_entropy: bool

    def begin(self, samples: Sequence[TrainSample]) -> None:
        """Learn the denominators of the step whose samples these are."""

    def __call__(self, samples: Sequence[TrainSample], log_probs: Tensor, entropy: Tensor, mask: Tensor) -> Loss:
        """Loss of a micro-batch: (B, T) log-probs, entropies and mask of trained tokens, packed to the left."""


@dataclass(frozen=True)
class Loss:
    """Loss of a micro-batch with its graph, and metrics that add up over the step."""

    loss: Tensor
    metrics: dict[str, float]


class ImitationObjective:
    """Negative log-likelihood of the demonstrated reply tokens, mean over the tokens of the step, in nats."""

    needs_entropy = False

    def __init__(self) -> None:
        self._tokens = 1

    def begin(self, samples: Sequence[TrainSample]) -> None:
        """See `Objective`."""
        self._tokens = sum(len(sample.targets) for sample in samples)

    def __call__(self, samples: Sequence[TrainSample], log_probs: Tensor, entropy: Tensor, mask: Tensor) -> Loss:
        """See `Objective`."""
        loss = reduce_tokens(-log_probs, mask, "token_mean", float(self._tokens))
        return Loss(loss, {"loss": float(loss.detach())})


class GrpoObjective:
    """Clipped policy loss, minus the entropy bonus, plus the KL to the reference policy (see `GrpoOptions`)."""

    def __init__(self, options: GrpoOptions) -> None:
        self.options = options
        self.needs_entropy = True
        self._denominator = 1.0
        self._tokens = 1

    def begin(self, samples: Sequence[TrainSample]) -> None:
        """See `Objective`."""
        options = self.options
        self._tokens = sum(len(sample.targets) for sample in samples)
        if options.reduction == "constant":
            assert options.constant_denominator is not None
            self._denominator = options.constant_denominator
        elif options.reduction == "token_mean":
            self._denominator = float(self._tokens)
        else:
            self._denominator = float(len(samples))

    def __call__(self, samples: Sequence[TrainSample], log_probs: Tensor, entropy: Tensor, mask: Tensor) -> Loss:
        """See `Objective`."""
        options = self.options
        old = pad([sample.old_log_probs for sample in samples], log_probs)
        rollout = pad([sample.rollout_log_probs for sample in samples], log_probs)
        advantages = pad([sample.advantages for sample in samples], log_probs)
        weights = None
        if options.importance_cap is not None:
            weights = truncated_importance_weights(old, rollout, options.importance_cap, loss_mask=mask)
        policy = policy_loss(
            log_probs,
            old,
            advantages,
            mask,
            clip_low=options.clip_low,
            clip_high=options.clip_high,
            dual_clip=options.dual_clip,
            importance_weights=weights,
            reduction=options.reduction,
            denominator=self._denominator,
        )
        bonus = reduce_tokens(entropy, mask, options.reduction, self._denominator)
        loss = policy.loss - options.entropy_coefficient * bonus
        gap = reduce_tokens((log_probs.detach() - rollout).abs(), mask, options.reduction, self._denominator)
        metrics = {
            **policy.metrics,
            "entropy_loss": float(bonus.detach()),
            "train_rollout_logprob_abs_diff": float(gap),
        }
        if weights is not None:
            off_policy = off_policy_metrics(old, rollout, mask, cap=options.importance_cap or 1.0)
            share = float(mask.sum()) / max(self._tokens, 1)
            metrics |= {name: value * share for name, value in off_policy.items() if name.startswith("tis")}
        references = [sample.ref_log_probs for sample in samples if sample.ref_log_probs is not None]
        if options.kl_coefficient > 0:
            kl = kl_estimate(log_probs, pad(references, log_probs), options.kl_kind, loss_mask=mask)
            kl_mean = reduce_tokens(kl, mask, options.reduction, self._denominator)
            loss = loss + options.kl_coefficient * kl_mean
            metrics["kl_loss"] = float(kl_mean.detach())
        return Loss(loss, {"loss": float(loss.detach()), **metrics})


def pad(rows: Sequence[np.ndarray], like: Tensor) -> Tensor:
    """(B, T) float32 tensor of rows of unequal length, zeros behind them, on the device and of the width of `like`."""
    table = np.zeros((len(rows), like.shape[1]), np.float32)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return torch.from_numpy(table).to(like.device)
