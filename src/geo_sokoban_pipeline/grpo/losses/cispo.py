"""CISPO (arXiv 2506.13585): REINFORCE with a clipped ratio as weight, so that no token loses its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from geo_sokoban_pipeline.config.estimators import CispoArguments
from geo_sokoban_pipeline.grpo.sequences import TokenBatch, ratio

if TYPE_CHECKING:
    from torch import Tensor


def cispo(batch: TokenBatch, args: CispoArguments) -> tuple[Tensor, dict[str, Tensor]]:
    """Per token `−sg[clip(r, low, high)] A l`; the bounds are those of the ratio itself, not distances from 1.

    Returns:
        (B, T) terms, and which tokens have a clipped weight: `pg_clipfrac`.
    """
    ratios = ratio(batch.log_ratio.detach())
    weights = ratios.clamp(args.low, args.high)
    return -weights * batch.advantages * batch.log_probs, {"pg_clipfrac": (weights != ratios).to(ratios.dtype)}
