"""Log-probs and entropies over a vocabulary that ranks split: each holds the logits of its own rows of the head alone.

The ranks of a group exchange a few numbers a token: the largest logit, sums of exponentials, the logit of the label.
Banned ids, temperature and the entropy at temperature 1 are those of `grpo.loss`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor
from torch.autograd.function import once_differentiable

from geo_sokoban_pipeline.grpo.loss import EntropyUse, chunk_logits


def score_split_states(
    states: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    group: Any,
    chunk: int,
    temperature: float,
    banned_ids: Tensor,
    entropy: EntropyUse = "none",
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies as `grpo.loss.score_states` gives them, equal on all ranks of a group.

    No logits are kept: those of a chunk are computed again in the backward pass.

    Args:
        states: (M, hidden) that predict the labels, equal on all ranks; their gradient is summed over the ranks.
        weight: (V / ranks, hidden), this rank's rows of the output head.
        labels: (M,) int64.
        group: of the ranks.
        chunk: states whose logits are held at once.
        entropy: "none" gives zeros, "reported" values without gradient.

    Returns:
        (M,) float32 each.
    """
    states = copy_to_tensor_model_parallel_region(states, group=group)
    first = group.rank() * len(weight)
    banned = banned_ids[(banned_ids >= first) & (banned_ids < first + len(weight))] - first
    return _SplitScores.apply(states, weight, labels - first, banned, group, chunk, temperature, entropy)


class _SplitScores(torch.autograd.Function):
    """See `score_split_states`; labels and banned ids count from this rank's first row."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        labels: Tensor,
        banned: Tensor,
        group: Any,
        chunk: int,
        temperature: float,
        entropy: EntropyUse,
    ) -> tuple[Tensor, Tensor]:
        device = states.device.type
        kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        matrix = weight.to(kind)
        values, entropies, largest, heated, plain = torch.zeros(5, len(states), device=states.device)
        for begin in range(0, len(states), chunk):
            rows = slice(begin, begin + chunk)
            logits = chunk_logits(states[rows], matrix, banned)
            top = logits.amax(-1)
            dist.all_reduce(top, dist.ReduceOp.MAX, group)
            logits -= top[:, None]
            sums = torch.zeros(4, len(logits), device=logits.device)
            own = (labels[rows] >= 0) & (labels[rows] < len(matrix))
            chosen = logits.gather(-1, labels[rows].clamp(0, len(matrix) - 1)[:, None]).squeeze(-1)
            sums[0] = torch.where(own, chosen, 0.0)
            sums[1] = (logits / temperature).exp_().sum(-1)
            if entropy != "none":
                shares = logits.exp_()
                sums[2] = shares.sum(-1)
                sums[3] = torch.special.entr(shares, out=shares).sum(-1)  # −Σ eˣ x
                del shares
            del logits
            dist.all_reduce(sums, group=group)
            values[rows] = sums[0] / temperature - sums[1].log()
            largest[rows], heated[rows], plain[rows] = top, sums[1], sums[2]
            if entropy != "none":
                entropies[rows] = sums[2].log() + sums[3] / sums[2]
        ctx.save_for_backward(states, weight, labels, banned, entropies, largest, heated, plain)
        ctx.kind, ctx.chunk, ctx.temperature, ctx.entropy = kind, chunk, temperature, entropy
        if entropy != "trained":
            ctx.mark_non_differentiable(entropies)
        return values, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor, entropy_gradients: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, labels, banned, entropies, largest, heated, plain = ctx.saved_tensors
        matrix = weight.to(ctx.kind)
        of_states = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for begin in range(0, len(states), ctx.chunk):
            rows = slice(begin, begin + ctx.chunk)
            logits = chunk_logits(states[rows], matrix, banned).sub_(largest[rows, None])
            own = gradients[rows] / ctx.temperature
            moved = (logits / ctx.temperature).exp_().mul_((-own / heated[rows])[:, None])
            here = (labels[rows] >= 0) & (labels[rows] < len(matrix))
            places = labels[rows].clamp(0, len(matrix) - 1)[:, None]
            moved.scatter_add_(-1, places, torch.where(here, own, 0.0)[:, None])
            if ctx.entropy == "trained":
                # d entropy / d logit = −p (log p + entropy)
                spread = entropy_gradients[rows]
                shares = logits.exp_().div_(plain[rows, None])
                moved.addcmul_(shares, -(spread * entropies[rows])[:, None])
                moved.addcmul_(torch.special.entr(shares, out=shares), spread[:, None])
                del shares
            del logits
            moved = moved.to(ctx.kind)
            if of_states is not None:
                of_states[rows] = moved @ matrix
            if of_weight is not None:
                of_weight += moved.T @ states[rows].to(ctx.kind)
            del moved  # before the next chunk's logits are there
        return of_states, of_weight, None, None, None, None, None, None
