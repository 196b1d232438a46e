"""Sampling: every draw is a function of the episode's seed and the token's number, never of the rest of the batch.

Token n of an episode takes the n-th number of the episode's random stream and inverts the cumulative distribution at
it. Only float rounding of the logits can differ between batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from geo_sokoban_pipeline.config.rollout import SamplingOptions

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform_draws(seeds: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Numbers of per-episode random streams (SplitMix64, Steele et al. 2014).

    Args:
        seeds: (N,) int64 seeds.
        numbers: (N,) int64 index of the draw within the stream, from 0.

    Returns:
        (N,) float64 in [0, 1), multiples of 2^-53.
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds.astype(np.uint64)) + (numbers.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def sample_tokens(
    logits: Tensor, sampling: Sequence[SamplingOptions], draws: np.ndarray, banned_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Choose the next token of each row.

    Args:
        logits: (N, V) of any float type.
        sampling: N options.
        draws: (N,) float64 in [0, 1), one per row; unused by greedy rows.
        banned_ids: (K,) int64 ids that are never chosen.

    Returns:
        (N,) int64 ids, and (N,) float32 log-probs after temperature (greedy rows: untempered) and banned ids, before
        top-p and top-k.
    """
    scores = logits.float().index_fill(1, banned_ids, -torch.inf)
    greedy = [options.greedy for options in sampling]
    temperature = torch.tensor([1.0 if o.greedy else o.temperature for o in sampling], device=scores.device)
    log_probs = torch.log_softmax(scores / temperature[:, None], dim=-1)
    if all(greedy):
        chosen = scores.argmax(-1)
    else:
        chosen = _invert(_restrict(log_probs.double().exp(), sampling), draws)
        if any(greedy):
            chosen = torch.where(torch.tensor(greedy, device=scores.device), scores.argmax(-1), chosen)
    return chosen, log_probs.gather(1, chosen[:, None]).squeeze(1)


def _invert(probs: Tensor, draws: np.ndarray) -> Tensor:
    """(N,) first token of each row at which the cumulative distribution exceeds the draw."""
    cumulative = probs.cumsum(-1)
    total = cumulative[:, -1:]
    points = torch.from_numpy(draws).to(cumulative)[:, None] * total
    # If the product rounded up to the total, no token would exceed it.
    points = torch.minimum(points, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, points, right=True).squeeze(1)


def _restrict(probs: Tensor, sampling: Sequence[SamplingOptions]) -> Tensor:
    if all(options.top_p == 1.0 and options.top_k == 0 for options in sampling):
        return probs
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    top_p = torch.tensor([options.top_p for options in sampling], device=probs.device, dtype=probs.dtype)
    top_k = torch.tensor([options.top_k or probs.shape[1] for options in sampling], device=probs.device)
    before = ordered.cumsum(-1) - ordered
    keep = (before < top_p[:, None]) & (torch.arange(probs.shape[1], device=probs.device) < top_k[:, None])
    keep[:, 0] = True
    return torch.zeros_like(probs).scatter(1, order, torch.where(keep, ordered, torch.zeros_like(ordered)))
