"""PPO's clipped policy loss (arXiv 1707.06347), with DAPO's asymmetric clip (2503.14476) and dual clip (1912.09729)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from geo_sokoban_pipeline.config.estimators import PpoArguments
from geo_sokoban_pipeline.grpo.sequences import TokenBatch, ratio

if TYPE_CHECKING:
    from torch import Tensor


def ppo(batch: TokenBatch, args: PpoArguments) -> tuple[Tensor, dict[str, Tensor]]:
    """Per token `max(−A r, −A clip(r, 1 − low, 1 + high))`; where A < 0, at most `dual_clip |A|`.

    Returns:
        (B, T) terms, and which tokens are clipped: `pg_clipfrac`, `dual_clipfrac`.
    """
    terms, clipped = clipped_surrogate(ratio(batch.log_ratio), batch.advantages, args.clip_low, args.clip_high)
    dual_clipped = clipped.new_zeros(clipped.shape)
    if args.dual_clip is not None:
        bound = -args.dual_clip * batch.advantages
        over = (batch.advantages < 0) & (terms > bound)
        terms = bound.where(over, terms)
        dual_clipped = over.to(terms.dtype)
    return terms, {"pg_clipfrac": clipped, "dual_clipfrac": dual_clipped}


def clipped_surrogate(ratios: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """`max(−A r, −A clip(r, 1 − low, 1 + high))`, and 1 where that is the clipped one."""
    plain = -ratios * advantages
    limited = -ratios.clamp(1.0 - low, 1.0 + high) * advantages
    return plain.maximum(limited), (limited > plain).to(plain.dtype)
