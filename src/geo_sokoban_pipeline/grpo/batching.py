"""Batching: episodes into micro-batches of a forward pass, groups into minibatches of an optimizer step.

Every plan is a partition: each index occurs exactly once, and equal lengths give equal plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, TypeVar

Order = Literal["length", "given"]
Item = TypeVar("Item")


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


def split_steps(
    groups: Sequence[Item], *, steps: int | None = None, groups_per_step: int | None = None
) -> list[list[Item]]:
    """Split the groups of an iteration into minibatches of nearly equal size, one per optimizer step, in order.

    Args:
        groups: trained groups; without any there is no step.
        steps: number of steps, at most one per group; None: derived from `groups_per_step`, or 1.
        groups_per_step: wanted minibatch size; the number of steps is rounded (halves up), at least 1.

    Returns:
        One list per step; sizes differ by at most 1, larger ones first.

    Raises:
        ValueError: both are given, or one is not positive.
    """
    if steps is not None and groups_per_step is not None:
        raise ValueError(f"steps={steps} and groups_per_step={groups_per_step}: give one of them, the other as None.")
    for name, value in (("steps", steps), ("groups_per_step", groups_per_step)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: it must be 1 or more.")
    if groups_per_step is not None:
        steps = (2 * len(groups) + groups_per_step) // (2 * groups_per_step)
    count = min(max(1, steps or 1), len(groups))
    size, extra = divmod(len(groups), count) if count else (0, 0)
    bounds = [part * size + min(part, extra) for part in range(count + 1)]
    return [list(groups[start:end]) for start, end in pairwise(bounds)]


def _check_lengths(lengths: Sequence[int], max_tokens: int) -> None:
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens}: the budget must be 1 token or more.")
    for index, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"lengths[{index}]={length}: an episode has 1 token or more.")
