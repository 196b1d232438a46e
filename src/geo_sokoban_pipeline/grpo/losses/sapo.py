"""SAPO (arXiv 2511.20347): a soft gate in place of a clip, with a temperature for each sign of the advantage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from geo_sokoban_pipeline.config.estimators import SapoArguments
from geo_sokoban_pipeline.grpo.sequences import TokenBatch, ratio

if TYPE_CHECKING:
    from torch import Tensor


def sapo(batch: TokenBatch, args: SapoArguments) -> tuple[Tensor, dict[str, Tensor]]:
    """Per token `−A (4 / τ) sigmoid(τ (r − 1))`, whose slope in r is 1 at r = 1 and fades on both sides.

    The value depends on τ even at r = 1, where the gradient does not: values of different temperatures do not compare.

    Returns:
        (B, T) terms, and no metric: nothing is clipped.
    """
    ratios = ratio(batch.log_ratio)
    temperatures = ratios.new_full(ratios.shape, args.negative).masked_fill(batch.advantages > 0, args.positive)
    return -batch.advantages * (temperatures * (ratios - 1.0)).sigmoid() * (4.0 / temperatures), {}
