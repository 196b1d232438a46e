"""The loss: log-probs of sampled tokens, the clipped policy loss, its reductions, and the objectives of a step.

Trainer and engine must score a token alike: one temperature, one set of banned ids, float32. No function gives a NaN,
in a value or a gradient, for banned ids or masked positions. An objective divides by the counts of the whole optimizer
step, so the losses of micro-batches add up to the loss of the step, however the step is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from geo_sokoban_pipeline.config.estimators import PpoArguments
from geo_sokoban_pipeline.config.grpo import GrpoOptions
from geo_sokoban_pipeline.grpo.estimators import estimate_loss, estimate_weights, load_estimator
from geo_sokoban_pipeline.grpo.losses.ppo import ppo
from geo_sokoban_pipeline.grpo.sequences import MAX_LOG_RATIO, TokenBatch, importance_ratio

# Bound of `low_var_kl`, as in slime.
MAX_LOW_VAR_KL = 10.0

KlKind = Literal["k1", "k2", "k3", "low_var_kl"]
EntropyUse = Literal["none", "reported", "trained"]


def token_log_probs(
    logits: Tensor, ids: Tensor, *, temperature: float = 1.0, banned_ids: Sequence[int] | Tensor | None = None
) -> Tensor:
    """Log-probs of sampled ids under the distribution they were sampled from, float32.

    Args:
        logits: (..., V), any float type; computed in float32.
        ids: (...) integer ids.
        temperature: divides the logits, > 0.
        banned_ids: ids that sampling never draws; their logits are set to -inf. None: no id is banned.

    Returns:
        (...) float32 with gradient; -inf for a banned id (mask such positions out).
    """
    if temperature <= 0.0:
        raise ValueError(f"temperature={temperature}: it must be greater than 0.")
    log_probs = log_distribution(logits, temperature, banned_ids)
    return log_probs.gather(-1, ids.long().unsqueeze(-1)).squeeze(-1)


def entropy(logits: Tensor, *, temperature: float = 1.0, banned_ids: Sequence[int] | Tensor | None = None) -> Tensor:
    """Entropy of each position's distribution in nats, (...) float32 with gradient; slime uses temperature 1."""
    return _entropy(log_distribution(logits, temperature, banned_ids))


def token_log_probs_and_entropy(
    logits: Tensor, ids: Tensor, *, temperature: float = 1.0, banned_ids: Sequence[int] | Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`token_log_probs` at the temperature and `entropy` at temperature 1; one softmax where both are the same."""
    if temperature != 1.0:
        return token_log_probs(logits, ids, temperature=temperature, banned_ids=banned_ids), entropy(
            logits, banned_ids=banned_ids
        )
    log_probs = log_distribution(logits, 1.0, banned_ids)
    return log_probs.gather(-1, ids.long().unsqueeze(-1)).squeeze(-1), _entropy(log_probs)


def score_states(
    states: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunk: int,
    temperature: float,
    banned_ids: Tensor,
    entropy: EntropyUse = "none",
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies as `token_log_probs_and_entropy` gives them, of states rather than logits.

    No logits are kept: those of a chunk are computed again in the backward pass, where at most two float32 copies of
    them live at once.

    Args:
        states: (M, hidden) that predict the labels.
        weight: (V, hidden) of the output head.
        labels: (M,) int64.
        chunk: states whose logits are held at once.
        entropy: "none" gives zeros, "reported" values without gradient.

    Returns:
        (M,) float32 each.
    """
    scores: tuple[Tensor, Tensor] = _ScoredStates.apply(states, weight, labels, banned_ids, chunk, temperature, entropy)
    return scores


class _ScoredStates(torch.autograd.Function):
    """See `score_states`."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        labels: Tensor,
        banned: Tensor,
        chunk: int,
        temperature: float,
        entropy: EntropyUse,
    ) -> tuple[Tensor, Tensor]:
        device = states.device.type
        kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        matrix = weight.to(kind)
        values, entropies = (torch.zeros(len(states), device=states.device) for _ in range(2))
        for first in range(0, len(states), chunk):
            rows = slice(first, first + chunk)
            logits = chunk_logits(states[rows], matrix, banned)
            if entropy != "none":
                shares = torch.softmax(logits, -1)
                entropies[rows] = torch.special.entr(shares, out=shares).sum(-1)
                del shares
            log_probs = torch.log_softmax(logits.div_(temperature), -1)
            values[rows] = log_probs.gather(-1, labels[rows, None]).squeeze(-1)
            del logits, log_probs
        ctx.save_for_backward(states, weight, labels, banned, entropies)
        ctx.kind, ctx.chunk, ctx.temperature, ctx.entropy = kind, chunk, temperature, entropy
        if entropy != "trained":
            ctx.mark_non_differentiable(entropies)
        return values, entropies

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradients: Tensor, entropy_gradients: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, labels, banned, entropies = ctx.saved_tensors
        matrix = weight.to(ctx.kind)
        of_states = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for first in range(0, len(states), ctx.chunk):
            rows = slice(first, first + ctx.chunk)
            spread = entropy_gradients[rows] if ctx.entropy == "trained" else None
            moved = _logit_gradients(
                chunk_logits(states[rows], matrix, banned),
                labels[rows],
                gradients[rows],
                ctx.temperature,
                entropies[rows],
                spread,
            ).to(ctx.kind)
            if of_states is not None:
                of_states[rows] = moved @ matrix
            if of_weight is not None:
                of_weight += moved.T @ states[rows].to(ctx.kind)
            del moved  # before the next chunk's logits are there
        return of_states, of_weight, None, None, None, None, None


def chunk_logits(states: Tensor, matrix: Tensor, banned: Tensor) -> Tensor:
    """(M, V) float32 logits of (M, hidden) states and V rows of the output head, -inf for banned ids."""
    return (states.to(matrix.dtype) @ matrix.T).float().index_fill_(-1, banned, float("-inf"))


def _logit_gradients(
    logits: Tensor,
    labels: Tensor,
    of_values: Tensor,
    temperature: float,
    entropies: Tensor,
    of_entropies: Tensor | None,
) -> Tensor:
    """(M, V) gradients of logits, given those of log-probs and, unless None, of entropies."""
    own = of_values[:, None] / temperature
    shares = torch.softmax(logits, -1)
    del logits
    # The distribution at a temperature is that at 1 to a power, so the logits need not stay.
    found = shares.pow(1 / temperature)
    found.mul_(-own / found.sum(-1, keepdim=True)).scatter_add_(-1, labels[:, None], own)
    if of_entropies is not None:
        # d entropy / d logit = −p (log p + entropy)
        found.addcmul_(shares, -(of_entropies * entropies)[:, None])
        found.addcmul_(torch.special.entr(shares, out=shares), of_entropies[:, None])
    return found


def kl_estimate(
    log_probs: Tensor, ref_log_probs: Tensor, kind: KlKind = "low_var_kl", *, loss_mask: Tensor | None = None
) -> Tensor:
    """Per-token estimate of the KL divergence from the reference policy (Schulman, "Approximating KL divergence").

    Args:
        log_probs: log-probs of the trained policy, with gradient, any shape.
        ref_log_probs: of the reference policy, same shape, used without gradient.
        kind: with d = log_probs - ref_log_probs: "k1" d; "k2" d²/2; "k3" exp(-d) - 1 + d; "low_var_kl" the same,
            clamped to [-10, 10].
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
    # The exponent is clamped below overflow: clamping an infinity afterwards would give a NaN gradient.
    k3 = (-difference).clamp(max=MAX_LOG_RATIO).exp() - 1 + difference
    return k3 if kind == "k3" else k3.clamp(-MAX_LOW_VAR_KL, MAX_LOW_VAR_KL)


def log_distribution(logits: Tensor, temperature: float, banned_ids: Sequence[int] | Tensor | None) -> Tensor:
    """(..., V) float32 log-probs of all ids, -inf for banned ones."""
    scaled = logits.float() / temperature
    if banned_ids is not None and len(banned_ids):
        banned = torch.zeros(scaled.shape[-1], dtype=torch.bool, device=scaled.device)
        banned[torch.as_tensor(banned_ids, dtype=torch.long, device=scaled.device)] = True
        scaled = scaled.masked_fill(banned, float("-inf"))
    return torch.log_softmax(scaled, dim=-1)


def _entropy(log_probs: Tensor) -> Tensor:
    # 0 * -inf is NaN, in the value and again in the gradient: banned ids get a finite factor before the product.
    return -(log_probs.exp() * torch.where(log_probs.isneginf(), 0.0, log_probs)).sum(dim=-1)


# Policy loss and reductions over (B, T) token tensors.


Reduction = Literal["sample_mean", "token_mean", "constant"]


@dataclass(frozen=True)
class PolicyLoss:
    """A scalar loss with its graph, and its metrics as plain numbers.

    Attributes:
        loss: 0-d tensor to call `backward` on.
        metrics: `pg_loss`; `ppo_kl` (mean absolute log ratio); `ppo_kl_signed` (mean of old - new); and those of the
            loss, such as `pg_clipfrac` (share of tokens clipped). All use the reduction of the loss.
    """

    loss: Tensor
    metrics: dict[str, float]


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
    batch = token_batch(log_probs, old_log_probs, old_log_probs, advantages, loss_mask)
    arguments = PpoArguments(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    terms, metrics = ppo(batch, arguments)
    if importance_weights is not None:
        weights = _per_token("importance_weights", importance_weights, log_probs)
        terms = terms * torch.where(batch.mask, weights, 0.0)
    return _reduced(batch, terms, metrics, reduction_weights(loss_mask, reduction, denominator))


def token_batch(
    log_probs: Tensor,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    turns: Tensor | None = None,
) -> TokenBatch:
    """The inputs of a policy loss, float32 or better, 0 where the mask is.

    Args:
        log_probs: (B, T) with gradient.
        old_log_probs, rollout_log_probs: (B, T), used without gradient.
        advantages: (B,) per episode or (B, T) per token.
        loss_mask: (B, T), 1 on trained tokens.
        turns: (B, T) response of each token; None: an episode has one.

    Raises:
        ValueError: shapes that do not fit.
    """
    if log_probs.dim() != 2 or not log_probs.shape == old_log_probs.shape == loss_mask.shape:
        raise ValueError(
            f"log_probs {tuple(log_probs.shape)}, old_log_probs {tuple(old_log_probs.shape)} and loss_mask "
            f"{tuple(loss_mask.shape)} must have one shape (B, T)."
        )
    mask = loss_mask.bool()
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    wanted = _per_token("advantages", advantages, log_probs)
    given = (old_log_probs, rollout_log_probs, wanted)
    old, rollout, wanted = (torch.where(mask, values, 0.0).detach().to(dtype) for values in given)
    numbers = torch.zeros_like(mask, dtype=torch.int64) if turns is None else torch.where(mask, turns, 0)
    return TokenBatch(torch.where(mask, log_probs, 0.0).to(dtype), old, rollout, wanted, mask, numbers)


def _reduced(batch: TokenBatch, terms: Tensor, metrics: dict[str, Tensor], weights: Tensor) -> PolicyLoss:
    """Terms and metrics summed with the weights of their tokens."""
    log_ratio = batch.log_ratio.detach()
    parts = {"pg_loss": terms.detach(), **metrics, "ppo_kl": log_ratio.abs(), "ppo_kl_signed": -log_ratio}
    # One transfer for all numbers: each would otherwise wait for the accelerator on its own.
    numbers = torch.stack([(part * weights).sum() for part in parts.values()]).tolist()
    return PolicyLoss((terms * weights).sum(), dict(zip(parts, numbers, strict=True)))


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
            requires one. Pass the step's count when the samples are one micro-batch of the step.

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

    For layouts that keep only the trained tokens: select the weights at the mask and sum. Arguments as in
    `reduce_tokens`.
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


# Objectives: from the log-probs of a micro-batch to its term of an optimizer step's loss.


class Sample(Protocol):
    """The fields of an episode that an objective reads: (M,) float32 per trained token, as in `TrainSample`."""

    @property
    def targets(self) -> np.ndarray: ...
    @property
    def old_log_probs(self) -> np.ndarray: ...
    @property
    def rollout_log_probs(self) -> np.ndarray: ...
    @property
    def ref_log_probs(self) -> np.ndarray | None: ...
    @property
    def advantages(self) -> np.ndarray: ...
    @property
    def turns(self) -> np.ndarray: ...


@dataclass(frozen=True)
class StepSize:
    """The counts that divide the losses of an optimizer step.

    Attributes:
        samples: episodes of the step, over all its micro-batches and processes.
        tokens: trained tokens of the step.
    """

    samples: int
    tokens: int

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> StepSize:
        """Size of a step with these samples."""
        return cls(len(samples), sum(len(sample.targets) for sample in samples))


class Objective(Protocol):
    """A loss over the trained tokens of a micro-batch; picklable, so that workers can receive it."""

    @property
    def entropy(self) -> EntropyUse:
        """The objective's use of entropies."""

    def __call__(
        self, samples: Sequence[Sample], log_probs: Tensor, entropy: Tensor, mask: Tensor, step: StepSize
    ) -> PolicyLoss:
        """Loss of a micro-batch, and metrics that add up over the step.

        Args:
            samples: of the micro-batch.
            log_probs, entropy, mask: (B, T) of their trained tokens, packed to the left.
            step: size of the optimizer step.
        """


class SftObjective:
    """Negative log-likelihood of the demonstrated tokens, mean over the step's tokens, in nats."""

    entropy: EntropyUse = "none"

    def __call__(
        self, samples: Sequence[Sample], log_probs: Tensor, entropy: Tensor, mask: Tensor, step: StepSize
    ) -> PolicyLoss:
        loss = reduce_tokens(-log_probs, mask, "token_mean", float(step.tokens))
        return PolicyLoss(loss, {"loss": float(loss.detach())})


class GrpoObjective:
    """Policy loss by name, minus the entropy bonus, plus the KL to the reference policy (see `GrpoOptions`)."""

    def __init__(self, options: GrpoOptions) -> None:
        self.options = options
        self.entropy: EntropyUse = "trained" if options.entropy_coefficient > 0 else "reported"

    def __call__(
        self, samples: Sequence[Sample], log_probs: Tensor, entropy: Tensor, mask: Tensor, step: StepSize
    ) -> PolicyLoss:
        options = self.options
        denominator = {
            "constant": options.constant_denominator,
            "token_mean": float(step.tokens),
            "sample_mean": float(step.samples),
        }[options.reduction]
        old = pad([sample.old_log_probs for sample in samples], log_probs)
        rollout = pad([sample.rollout_log_probs for sample in samples], log_probs)
        advantages = pad([sample.advantages for sample in samples], log_probs)
        turns = pad([sample.turns for sample in samples], log_probs).long()
        batch = token_batch(log_probs, old, rollout, advantages, mask, turns)
        terms, further = estimate_loss(load_estimator("loss", options), batch)
        weights = None
        if options.importance != "none":
            rule = load_estimator("importance", options)
            weights = estimate_weights(rule, batch)
            terms = terms * weights
        policy = _reduced(batch, terms, further, reduction_weights(mask, options.reduction, denominator))
        bonus = reduce_tokens(entropy, mask, options.reduction, denominator)
        loss = policy.loss - options.entropy_coefficient * bonus
        gap = reduce_tokens((log_probs.detach() - rollout).abs(), mask, options.reduction, denominator)
        metrics = {
            **policy.metrics,
            "entropy_loss": float(bonus.detach()),
            "train_rollout_logprob_abs_diff": float(gap),
        }
        if weights is not None:
            metrics |= off_policy_metrics(batch, weights, rule.args, step)
        if options.kl_coefficient > 0:
            references = [sample.ref_log_probs for sample in samples if sample.ref_log_probs is not None]
            if len(references) < len(samples):
                raise ValueError(
                    f"grpo.kl_coefficient={options.kl_coefficient} needs ref_log_probs of every sample; "
                    f"{len(samples) - len(references)} of {len(samples)} have none."
                )
            kl = kl_estimate(log_probs, pad(references, log_probs), options.kl_kind, loss_mask=mask)
            kl_mean = reduce_tokens(kl, mask, options.reduction, denominator)
            loss = loss + options.kl_coefficient * kl_mean
            metrics["kl_loss"] = float(kl_mean.detach())
        return PolicyLoss(loss, {"loss": float(loss.detach()), **metrics})


def off_policy_metrics(batch: TokenBatch, weights: Tensor, args: Any, step: StepSize) -> dict[str, float]:
    """Sums over a micro-batch that add up to token means of the step, under slime's names.

    `tis`: the ratio between trainer and engine at the level of the rule; `tis_clipfrac`: the share of tokens that have
    another weight; `tis_abs`: the mean of |ratio - 1|.

    Args:
        weights: (B, T) of the rule.
        args: of the rule; `level` and `per`, where it has them.
    """
    ratio = importance_ratio(batch, getattr(args, "level", "token"), getattr(args, "per", "episode"))
    token = batch.mask.float() / max(step.tokens, 1)
    parts = {"tis": ratio, "tis_clipfrac": (ratio != weights).float(), "tis_abs": (ratio - 1).abs()}
    return {name: float((part * token).sum()) for name, part in parts.items()}


def pad(rows: Sequence[np.ndarray], like: Tensor) -> Tensor:
    """(B, T) float32 tensor of rows of unequal length, right-padded with zeros to the width and device of `like`."""
    table = np.zeros((len(rows), like.shape[1]), np.float32)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return torch.from_numpy(table).to(like.device)
