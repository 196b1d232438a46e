"""Log-probs of sampled tokens under the distribution they were sampled from, and comparisons of two such lists.

Trainer and engine must score a token alike: one temperature, one set of banned ids, float32. Nothing here gives a NaN,
in a value or a gradient, for banned ids or masked positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

# exp(20) is 5e8: past every clip range, and far from the overflow whose gradient is NaN.
MAX_LOG_RATIO = 20.0
# Bound of `low_var_kl`, as in the seed systems.
MAX_LOW_VAR_KL = 10.0

KlKind = Literal["k1", "k2", "k3", "low_var_kl"]


def token_log_probs(
    logits: Tensor, ids: Tensor, *, temperature: float = 1.0, banned_ids: Sequence[int] | Tensor | None = None
) -> Tensor:
    """Log-probs of the ids that were sampled, float32, under the distribution they were sampled from.

    Args:
        logits: (..., V), any float type; computed in float32.
        ids: (...) integer ids.
        temperature: divides the logits, > 0.
        banned_ids: ids that sampling never draws; their logits are -inf here as well. None: no id is banned.

    Returns:
        (...) float32 with gradient; -inf for a banned id (mask such positions out).
    """
    if temperature <= 0.0:
        raise ValueError(f"temperature={temperature}: it must be greater than 0.")
    log_probs = _log_distribution(logits, temperature, banned_ids)
    return log_probs.gather(-1, ids.long().unsqueeze(-1)).squeeze(-1)


def entropy(logits: Tensor, *, temperature: float = 1.0, banned_ids: Sequence[int] | Tensor | None = None) -> Tensor:
    """Entropy of each position's distribution in nats, (...) float32 with gradient; the seeds use temperature 1."""
    return _entropy(_log_distribution(logits, temperature, banned_ids))


def token_log_probs_and_entropy(
    logits: Tensor, ids: Tensor, *, temperature: float = 1.0, banned_ids: Sequence[int] | Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`token_log_probs` at the temperature and `entropy` at temperature 1; one softmax where both are the same."""
    if temperature != 1.0:
        return token_log_probs(logits, ids, temperature=temperature, banned_ids=banned_ids), entropy(
            logits, banned_ids=banned_ids
        )
    log_probs = _log_distribution(logits, 1.0, banned_ids)
    return log_probs.gather(-1, ids.long().unsqueeze(-1)).squeeze(-1), _entropy(log_probs)


def truncated_importance_weights(
    train_log_probs: Tensor, rollout_log_probs: Tensor, cap: float = 2.0, *, loss_mask: Tensor | None = None
) -> Tensor:
    """Weights `min(exp(train - rollout), cap)` that correct the gap of trainer and engine, without gradient.

    Returns:
        Tensor of the shape of the log-probs, in [0, cap]; 1 where the mask is 0.
    """
    if cap <= 0.0:
        raise ValueError(f"cap={cap}: it must be greater than 0.")
    return _importance_ratio(train_log_probs, rollout_log_probs, loss_mask).clamp(max=cap)


def icepop_weights(
    train_log_probs: Tensor, rollout_log_probs: Tensor, low: float, high: float, *, loss_mask: Tensor | None = None
) -> Tensor:
    """Weights `exp(train - rollout)` inside [low, high], else 0 (IcePop), without gradient; 1 where the mask is 0."""
    if not 0.0 <= low <= 1.0 <= high:
        raise ValueError(f"low={low}, high={high}: the range must hold 1, with 0 <= low.")
    ratio = _importance_ratio(train_log_probs, rollout_log_probs, loss_mask)
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def off_policy_metrics(
    train_log_probs: Tensor, rollout_log_probs: Tensor, loss_mask: Tensor, *, cap: float = 2.0
) -> dict[str, float]:
    """Token means of the gap between trainer and engine, under the seed's names.

    `train_rollout_logprob_abs_diff`; `tis`, the weight before it is capped; `tis_clipfrac`, the share above the cap;
    `tis_abs`, the mean of |weight - 1|.
    """
    mask = loss_mask.bool()
    train, rollout = torch.where(mask, train_log_probs, 0.0), torch.where(mask, rollout_log_probs, 0.0)
    ratio = _importance_ratio(train, rollout, mask)
    weights = mask.float() / mask.sum().clamp(min=1)
    parts = {
        "train_rollout_logprob_abs_diff": (train - rollout).detach().abs(),
        "tis": ratio,
        "tis_clipfrac": (ratio > cap).float(),
        "tis_abs": (ratio - 1).abs(),
    }
    return {name: float((part * weights).sum()) for name, part in parts.items()}


def kl_estimate(
    log_probs: Tensor, ref_log_probs: Tensor, kind: KlKind = "low_var_kl", *, loss_mask: Tensor | None = None
) -> Tensor:
    """Per-token estimate of the KL divergence from the reference policy (Schulman, "Approximating KL divergence").

    Args:
        log_probs: log-probs of the trained policy, with gradient, any shape.
        ref_log_probs: of the reference policy, same shape, used without gradient.
        kind: with d = log_probs - ref_log_probs: "k1" d; "k2" d²/2; "k3" exp(-d) - 1 + d; "low_var_kl" the same, held
            in [-10, 10].
        loss_mask: same shape; where it is 0 the estimate is exactly 0. None: all tokens count.

    Returns:
        Tensor of the same shape, float32 or better.
    """
    if kind not in ("k1", "k2", "k3", "low_var_kl"):
        raise ValueError(f"kind={kind!r}: choose 'k1', 'k2', 'k3' or 'low_var_kl'.")
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    new, ref = log_probs.to(dtype), ref_log_probs.detach().to(dtype)
    if loss_mask is not None:
        mask = loss_mask.bool()
        new, ref = torch.where(mask, new, 0.0), torch.where(mask, ref, 0.0)
    difference = new - ref
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    # The exponent is held below overflow: clamping an infinity afterwards would give a NaN gradient.
    k3 = (-difference).clamp(max=MAX_LOG_RATIO).exp() - 1 + difference
    return k3 if kind == "k3" else k3.clamp(-MAX_LOW_VAR_KL, MAX_LOW_VAR_KL)


def _log_distribution(logits: Tensor, temperature: float, banned_ids: Sequence[int] | Tensor | None) -> Tensor:
    scaled = logits.float() / temperature
    if banned_ids is not None and len(banned_ids):
        banned = torch.zeros(scaled.shape[-1], dtype=torch.bool, device=scaled.device)
        banned[torch.as_tensor(banned_ids, dtype=torch.long, device=scaled.device)] = True
        scaled = scaled.masked_fill(banned, float("-inf"))
    return torch.log_softmax(scaled, dim=-1)


def _entropy(log_probs: Tensor) -> Tensor:
    # 0 * -inf is NaN, in the value and again in the gradient: banned ids get a finite factor before the product.
    return -(log_probs.exp() * torch.where(log_probs.isneginf(), 0.0, log_probs)).sum(dim=-1)


def _importance_ratio(train_log_probs: Tensor, rollout_log_probs: Tensor, loss_mask: Tensor | None) -> Tensor:
    log_ratio = train_log_probs.detach().float() - rollout_log_probs.detach().float()
    if loss_mask is not None:
        log_ratio = torch.where(loss_mask.bool(), log_ratio, 0.0)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
