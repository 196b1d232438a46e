"""Importance rules: the weight of each token's loss for the gap between the policy before the update and the engine.

A weight is made of `old − rollout` log-probs and has no gradient. It multiplies the loss, whose own ratio is that of
the trained policy to the one before the update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from geo_sokoban_pipeline.config.estimators import MaskedArguments, NoArguments, TruncatedArguments
from geo_sokoban_pipeline.grpo.sequences import TokenBatch, importance_ratio

if TYPE_CHECKING:
    from torch import Tensor


def none(batch: TokenBatch, args: NoArguments) -> Tensor:
    """(B, T) of 1: the engine's log-probs count as those of the policy before the update."""
    return batch.old_log_probs.new_ones(batch.old_log_probs.shape)


def truncated(batch: TokenBatch, args: TruncatedArguments) -> Tensor:
    """(B, T) `min(w, cap)`: truncated importance sampling (TIS)."""
    return importance_ratio(batch, args.level, args.per).clamp(max=args.cap)


def masked(batch: TokenBatch, args: MaskedArguments) -> Tensor:
    """(B, T) w where `low <= w <= high`, else 0: such tokens have no gradient, but stay in the loss's denominator."""
    weights = importance_ratio(batch, args.level, args.per)
    return weights.masked_fill((weights < args.low) | (weights > args.high), 0.0)
