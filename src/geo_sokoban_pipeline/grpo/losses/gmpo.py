"""GMPO (arXiv 2507.20673): the geometric mean of a sequence's ratios, each clipped before, is its ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from geo_sokoban_pipeline.config.estimators import GmpoArguments
from geo_sokoban_pipeline.grpo.sequences import TokenBatch, ratio, sequence_means

if TYPE_CHECKING:
    from torch import Tensor


def gmpo(batch: TokenBatch, args: GmpoArguments) -> tuple[Tensor, dict[str, Tensor]]:
    """Per token `−A exp(mean of clipped log-ratios)` of its sequence; the paper's mean is `reduction=sample_mean`.

    The clip is one-sided, as PPO's is: at `clip` from above where A > 0, at `−clip` from below elsewhere. A sequence
    has one advantage, the mean over its tokens.

    Returns:
        (B, T) terms, and which tokens are clipped: `pg_clipfrac`.
    """
    advantages = sequence_means(batch.advantages, batch, args.per)
    changes = batch.log_ratio
    clipped = changes.clamp(max=args.clip).where(advantages > 0, changes.clamp(min=-args.clip))
    terms = -advantages * ratio(sequence_means(clipped, batch, args.per))
    return terms, {"pg_clipfrac": (clipped != changes).to(terms.dtype)}
