"""Tokens of a micro-batch as a loss sees them, and statistics over the sequences that they form.

A row is an episode; its sampled tokens lie side by side, without prompts, observations and images. A sequence is a row,
or the tokens of one response. Where the mask is 0 every field is 0, so nothing there can reach a value or a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from geo_sokoban_pipeline.config.estimators import Levels, Per

if TYPE_CHECKING:
    from torch import Tensor

# exp(20) is 5e8: past every clip range, and far from the overflow whose gradient is NaN.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Sampled tokens of a micro-batch of B episodes, all (B, T) and 0 where `mask` is.

    Attributes:
        log_probs: of the policy that is trained, float32 or better; the only field with a gradient.
        old_log_probs: of the policy before the update.
        rollout_log_probs: of the engine that sampled.
        advantages: of each token: those of its episode, or of its turn.
        mask: bool, true for trained tokens.
        turns: int64 number of each token's response within its episode.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    rollout_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    turns: Tensor

    @property
    def log_ratio(self) -> Tensor:
        """New less old log-probs, with gradient."""
        return self.log_probs - self.old_log_probs


def sequence_sums(values: Tensor, batch: TokenBatch, per: Per) -> Tensor:
    """(B, T) sum of the values over each token's sequence; 0 where the mask is 0.

    Args:
        values: (B, T), 0 where the mask is 0.
        per: whether a sequence is an episode or a response.
    """
    if per == "episode":
        return (values.sum(dim=1, keepdim=True).expand_as(values)).masked_fill(~batch.mask, 0.0)
    totals = values.new_zeros(values.shape[0], int(batch.turns.max()) + 1 if batch.turns.numel() else 1)
    totals = totals.scatter_add(1, batch.turns, values)
    return totals.gather(1, batch.turns).masked_fill(~batch.mask, 0.0)


def sequence_means(values: Tensor, batch: TokenBatch, per: Per) -> Tensor:
    """(B, T) mean of the values over the trained tokens of each token's sequence; 0 where the mask is 0."""
    counts = sequence_sums(batch.mask.to(values.dtype), batch, per)
    return sequence_sums(values, batch, per) / counts.clamp(min=1.0)


def ratio(log_ratio: Tensor) -> Tensor:
    """exp of log-ratios that are clamped at ±20: beyond every clip range the gradient is 0, and nothing overflows."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def importance_ratio(batch: TokenBatch, level: Levels, per: Per) -> Tensor:
    """(B, T) ratio of trainer to engine, without gradient: a token's, or product or geometric mean of its sequence."""
    gap = (batch.old_log_probs - batch.rollout_log_probs).detach()
    if level == "sequence":
        gap = sequence_sums(gap, batch, per)
    elif level == "geometric":
        gap = sequence_means(gap, batch, per)
    return ratio(gap)
