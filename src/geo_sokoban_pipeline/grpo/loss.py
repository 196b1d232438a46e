"""Policy loss: clipped surrogate and reductions over (B, T) token tensors.

A position with loss mask 0 touches neither a value nor a gradient, whatever it holds (also -inf and NaN): it is
replaced before any exponential, not multiplied by 0 after it. With one `denominator` for all micro-batches of a step,
losses and metrics of the micro-batches add up to those of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from geo_sokoban_pipeline.grpo.log_probs import (
    MAX_LOG_RATIO,
    entropy,
    icepop_weights,
    kl_estimate,
    off_policy_metrics,
    token_log_probs,
    token_log_probs_and_entropy,
    truncated_importance_weights,
)

__all__ = [
    "PolicyLoss",
    "TokenTerms",
    "entropy",
    "icepop_weights",
    "kl_estimate",
    "off_policy_metrics",
    "policy_loss",
    "policy_terms",
    "reduce_tokens",
    "reduction_weights",
    "token_log_probs",
    "token_log_probs_and_entropy",
    "truncated_importance_weights",
]

Reduction = Literal["sample_mean", "token_mean", "constant"]


@dataclass(frozen=True)
class PolicyLoss:
    """A scalar loss with its graph, and plain numbers beside it.

    Attributes:
        loss: 0-d tensor to call `backward` on.
        metrics: `pg_loss`; `pg_clipfrac` and `dual_clipfrac` (share of tokens clipped); `ppo_kl` (mean absolute log
            ratio); `ppo_kl_signed` (mean of old - new). All are reduced as the loss is.
    """

    loss: Tensor
    metrics: dict[str, float]


@dataclass(frozen=True)
class TokenTerms:
    """Per-token parts of the policy loss, each of the shape of the log-probs; for callers with their own layout."""

    loss: Tensor
    clipped: Tensor
    dual_clipped: Tensor
    log_ratio: Tensor


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    importance_weights: Tensor | None = None,
    reduction: Reduction = "sample_mean",
    denominator: float | None = None,
) -> PolicyLoss:
    """Clipped policy-gradient loss (PPO, arXiv 1707.06347) with asymmetric clip (DAPO, arXiv 2503.14476).

    Args:
        log_probs: (B, T) log-probs of the policy that is trained, with gradient.
        old_log_probs: (B, T) log-probs before the update, by the trainer or by the engine.
        advantages: (B,) per episode or (B, T) per token.
        loss_mask: (B, T), 1 on trained tokens.
        clip_low: the ratio is clipped below at 1 - clip_low, in [0, 1].
        clip_high: and above at 1 + clip_high.
        dual_clip: for negative advantages the loss is at most dual_clip * |A| (arXiv 1912.09729), > 1; None: off.
        importance_weights: (B, T) factors of the token losses, used without gradient; None: 1.
        reduction: see `reduce_tokens`.
        denominator: see `reduce_tokens`.

    Raises:
        ValueError: shapes that do not fit, or a clip value out of range.
    """
    if log_probs.dim() != 2 or not log_probs.shape == old_log_probs.shape == loss_mask.shape:
        raise ValueError(
            f"log_probs {tuple(log_probs.shape)}, old_log_probs {tuple(old_log_probs.shape)} and loss_mask "
            f"{tuple(loss_mask.shape)} must have one shape (B, T)."
        )
    mask = loss_mask.bool()
    terms = policy_terms(
        torch.where(mask, log_probs, 0.0),
        torch.where(mask, old_log_probs, 0.0),
        torch.where(mask, _per_token("advantages", advantages, log_probs), 0.0),
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    token_loss = terms.loss
    if importance_weights is not None:
        token_loss = token_loss * torch.where(
            mask, _per_token("importance_weights", importance_weights, log_probs), 0.0
        )
    weights = reduction_weights(loss_mask, reduction, denominator)
    return PolicyLoss((token_loss * weights).sum(), _loss_metrics(terms, token_loss, weights))


def policy_terms(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
) -> TokenTerms:
    """Per-token clipped loss `max(-r A, -clip(r) A)` of trained tokens, any one shape, float32 or better.

    Log ratios beyond ±20 are held there (gradient 0), where the ratio is out of every clip range.
    """
    if not 0.0 <= clip_low <= 1.0 or clip_high < 0.0:
        raise ValueError(
            f"clip_low={clip_low}, clip_high={clip_high}: clip_low must be in [0, 1], clip_high 0 or more."
        )
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip={dual_clip}: it must be greater than 1; None switches it off.")
    wanted = advantages.detach().to(torch.promote_types(log_probs.dtype, torch.float32))
    log_ratio = log_probs.to(wanted.dtype) - old_log_probs.detach().to(wanted.dtype)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain = -ratio * wanted
    limited = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * wanted
    loss = torch.maximum(plain, limited)
    clipped = (limited > plain).to(wanted.dtype)
    dual_clipped = torch.zeros_like(clipped)
    if dual_clip is not None:
        bound = -dual_clip * wanted
        over = (wanted < 0) & (loss > bound)
        loss = torch.where(over, bound, loss)
        dual_clipped = over.to(wanted.dtype)
    return TokenTerms(loss, clipped, dual_clipped, log_ratio)


def reduce_tokens(
    values: Tensor, loss_mask: Tensor, reduction: Reduction = "sample_mean", denominator: float | None = None
) -> Tensor:
    """Reduce (B, T) token values to a scalar over the positions with mask 1.

    Args:
        values: (B, T); positions with mask 0 may hold anything.
        loss_mask: (B, T), 1 on trained tokens; all 0 gives 0.
        reduction: "sample_mean": sum over samples of the sample's token mean, divided by the denominator; "token_mean"
            and "constant": sum over tokens, divided by it.
        denominator: None: the number of samples B for "sample_mean", of trained tokens for "token_mean"; "constant"
            demands one. Give the step's number when the samples are one micro-batch of it.

    Raises:
        ValueError: shapes that do not fit, an unknown reduction, or a denominator that is missing or not positive.
    """
    if values.shape != loss_mask.shape:
        raise ValueError(
            f"values {tuple(values.shape)} and loss_mask {tuple(loss_mask.shape)} must have one shape (B, T)."
        )
    weights = reduction_weights(loss_mask, reduction, denominator)
    return (torch.where(loss_mask.bool(), values, 0.0) * weights).sum()


def reduction_weights(
    loss_mask: Tensor, reduction: Reduction = "sample_mean", denominator: float | None = None
) -> Tensor:
    """(B, T) float32 weight of each token, so that a reduction is the sum of weight times value; 0 where the mask is 0.

    For layouts that keep only the trained tokens: select the weights at the mask and sum. Arguments as `reduce_tokens`.
    """
    if loss_mask.dim() != 2:
        raise ValueError(f"loss_mask has shape {tuple(loss_mask.shape)}: it must be (B, T).")
    if denominator is not None and denominator <= 0:
        raise ValueError(f"denominator={denominator}: it must be greater than 0.")
    mask = loss_mask.bool().float()
    if reduction == "sample_mean":
        divisor = max(1, loss_mask.shape[0]) if denominator is None else denominator
        return mask / mask.sum(dim=1, keepdim=True).clamp(min=1.0) / divisor
    if reduction == "token_mean":
        return mask / (mask.sum().clamp(min=1.0) if denominator is None else denominator)
    if reduction == "constant":
        if denominator is None:
            raise ValueError("denominator=None: the reduction 'constant' needs the number to divide by.")
        return mask / denominator
    raise ValueError(f"reduction={reduction!r}: choose 'sample_mean', 'token_mean' or 'constant'.")


def _per_token(name: str, values: Tensor, like: Tensor) -> Tensor:
    """Values of shape (B,) or (B, T), without gradient, as (B, T)."""
    if values.dim() == 1 and values.shape[0] == like.shape[0]:
        values = values.unsqueeze(1).expand_as(like)
    if values.shape != like.shape:
        raise ValueError(f"{name} has shape {tuple(values.shape)}: it must be (B,) or (B, T) = {tuple(like.shape)}.")
    return values.detach()


def _loss_metrics(terms: TokenTerms, token_loss: Tensor, weights: Tensor) -> dict[str, float]:
    log_ratio = terms.log_ratio.detach()
    parts = {
        "pg_loss": token_loss.detach(),
        "pg_clipfrac": terms.clipped,
        "dual_clipfrac": terms.dual_clipped,
        "ppo_kl": log_ratio.abs(),
        "ppo_kl_signed": -log_ratio,
    }
    # One transfer for all numbers: each would otherwise wait for the accelerator on its own.
    numbers = torch.stack([(part * weights).sum() for part in parts.values()]).tolist()
    return dict(zip(parts, numbers, strict=True))
