"""Batching: episodes into micro-batches of a forward pass.

Every plan is a partition: each index occurs exactly once, and equal lengths give equal plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Order = Literal["length", "given"]


def plan_micro_batches(lengths: Sequence[int], max_tokens: int, order: Order = "length") -> list[list[int]]:
    """Split episodes into right-padded micro-batches under a token budget.

    Args:
        lengths: tokens of each episode, 1 or more.
        max_tokens: budget of one micro-batch, padding included: `episodes * longest`.
        order: "length" sorts episodes, longest first, so that padding is small and memory peaks in the first
            micro-batch; "given" keeps the order.

    Returns:
        Lists of indices. An episode longer than the budget is a micro-batch by itself.

    Raises:
        ValueError: max_tokens or a length is not positive, or the order is unknown.
    """
    _check_lengths(lengths, max_tokens)
    if order not in ("length", "given"):
        raise ValueError(f"order={order!r}: choose 'length' or 'given'.")
    indices = list(range(len(lengths)))
    if order == "length":
        indices.sort(key=lambda index: (-lengths[index], index))
    batches: list[list[int]] = []
    longest = 0
    for index in indices:
        longest = max(longest, lengths[index])
        if batches and (len(batches[-1]) + 1) * longest <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
            longest = lengths[index]
    return batches


def _check_lengths(lengths: Sequence[int], max_tokens: int) -> None:
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens}: the budget must be 1 token or more.")
    for index, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"lengths[{index}]={length}: an episode has 1 token or more.")
