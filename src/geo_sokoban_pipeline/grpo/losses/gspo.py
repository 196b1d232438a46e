"""GSPO (arXiv 2507.18071): PPO's clip on one ratio per sequence, the geometric mean of its tokens' ratios."""

from __future__ import annotations

from typing import TYPE_CHECKING

from geo_sokoban_pipeline.config.estimators import GspoArguments
from geo_sokoban_pipeline.grpo.losses.ppo import clipped_surrogate
from geo_sokoban_pipeline.grpo.sequences import TokenBatch, ratio, sequence_means

if TYPE_CHECKING:
    from torch import Tensor


def gspo(batch: TokenBatch, args: GspoArguments) -> tuple[Tensor, dict[str, Tensor]]:
    """Per token PPO's term with `s_t = sg[s] exp(l − sg[l])`, where `s = exp(mean of log-ratios)` of its sequence.

    This is the paper's token form: its value, and with equal advantages in a sequence its gradient, are those of s; but
    the advantages may differ between turns. The paper takes the mean over sequences: `reduction=sample_mean`.

    Returns:
        (B, T) terms, and which tokens are clipped: `pg_clipfrac`.
    """
    ratios = ratio(sequence_means(batch.log_ratio.detach(), batch, args.per))
    own = (batch.log_probs - batch.log_probs.detach()).exp()
    terms, clipped = clipped_surrogate(ratios * own, batch.advantages, args.clip_low, args.clip_high)
    return terms, {"pg_clipfrac": clipped}
