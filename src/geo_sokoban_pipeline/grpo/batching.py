"""Batching: which episodes share a forward pass, which groups share an optimizer step, which rank gets what.

Every plan is a permutation of its input, cut into parts: each index occurs exactly once, and the same lengths always
give the same plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, TypeVar

Order = Literal["length", "given"]
Item = TypeVar("Item")


def plan_micro_batches(lengths: Sequence[int], max_tokens: int, order: Order = "length") -> list[list[int]]:
    """Cut episodes into right-padded micro-batches under a token budget.

    Args:
        lengths: tokens of each episode, 1 or more.
        max_tokens: budget of one micro-batch, padding counted: `episodes * longest`.
        order: "length" puts episodes of similar length together, longest first, so padding is small and memory peaks in
            the first micro-batch; "given" keeps the order.

    Returns:
        Lists of indices. An episode longer than the budget has a micro-batch of its own.

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
    """Cut the groups of an iteration into optimizer steps of nearly equal size, in order.

    Args:
        groups: the groups that are trained; none gives no step.
        steps: number of steps, at most one per group; None: derived from `groups_per_step`, or 1.
        groups_per_step: wanted size of a step; the number of steps is the nearest one (halves round up), at least 1.

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


def first_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Pack episodes without padding: each goes, in order, into the first pack with room; a longer one sits alone."""
    _check_lengths(lengths, max_tokens)
    packs: list[list[int]] = []
    totals: list[int] = []
    for index, length in enumerate(lengths):
        for place, total in enumerate(totals):
            if total + length <= max_tokens:
                packs[place].append(index)
                totals[place] += length
                break
        else:
            packs.append([index])
            totals.append(length)
    return packs


def partition_balanced(lengths: Sequence[int], parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Cut episodes into parts of nearly equal token sums (largest differencing method of Karmarkar and Karp, 1982).

    Args:
        lengths: tokens of each episode.
        parts: number of parts; some are empty where there are fewer episodes.
        equal_size: all parts hold equally many episodes; their number must then be a multiple of `parts`.

    Returns:
        One sorted list of indices per part, parts sorted.
    """
    if parts < 1:
        raise ValueError(f"parts={parts}: it must be 1 or more.")
    if equal_size and len(lengths) % parts:
        raise ValueError(f"{len(lengths)} episodes cannot be cut into {parts} parts of equal size.")
    ordered = sorted(range(len(lengths)), key=lambda index: (lengths[index], index))
    width = parts if equal_size else 1
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for number, start in enumerate(range(0, len(ordered), width)):
        cells = [(lengths[index], [index]) for index in ordered[start : start + width]]
        cells += [(0, [])] * (parts - len(cells))
        _push(heap, number, cells)
    serial = len(ordered)
    while len(heap) > 1:
        heavy, light = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        # The largest part of one joins the smallest of the other, which cancels their differences.
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(heavy, reversed(light), strict=True)]
        _push(heap, serial, merged)
        serial += 1
    return sorted(sorted(cell[1]) for cell in heap[0][2]) if heap else [[] for _ in range(parts)]


@dataclass(frozen=True)
class RankSchedule:
    """What the data-parallel ranks do in one iteration.

    Attributes:
        micro_batches: [rank][step][micro-batch] lists of episode indices.
    """

    micro_batches: list[list[list[list[int]]]] = field(default_factory=list)

    @property
    def partitions(self) -> list[list[int]]:
        """All episodes of each rank, sorted."""
        return [sorted(index for step in rank for batch in step for index in batch) for rank in self.micro_batches]

    @property
    def micro_batch_counts(self) -> list[int]:
        """Micro-batches per step, the same on every rank, so that collective operations meet."""
        return [len(step) for step in self.micro_batches[0]] if self.micro_batches else []


def schedule_ranks(lengths: Sequence[int], *, ranks: int, max_tokens: int, global_batch: int) -> RankSchedule:
    """Give each rank equally many packs in every step: first-fit packs, the largest halved until they divide evenly.

    Args:
        lengths: tokens of each episode, in training order.
        ranks: data-parallel size.
        max_tokens: tokens of one pack (packed, without padding); a longer episode sits alone.
        global_batch: episodes per optimizer step, a multiple of `ranks`; a rest that does not fill one is left out.

    Raises:
        ValueError: a size is not positive, or `global_batch` is not a multiple of `ranks`.
    """
    if ranks < 1 or global_batch < 1 or global_batch % ranks:
        raise ValueError(f"global_batch={global_batch} with ranks={ranks}: it must be a positive multiple of ranks.")
    schedule: list[list[list[list[int]]]] = [[] for _ in range(ranks)]
    for start in range(0, len(lengths) - global_batch + 1, global_batch):
        packs = first_fit(lengths[start : start + global_batch], max_tokens)
        packs = [[start + index for index in pack] for pack in packs]
        while len(packs) % ranks:
            _halve_largest(packs, lengths)
        for rank in range(ranks):
            schedule[rank].append(packs[rank::ranks])
    return RankSchedule(schedule)


def _halve_largest(packs: list[list[int]], lengths: Sequence[int]) -> None:
    """Move the second half of the largest pack that has two episodes or more into a new pack at the end, in place."""
    sizes = {place: sum(lengths[index] for index in pack) for place, pack in enumerate(packs) if len(pack) > 1}
    place = max(sizes, key=lambda key: (sizes[key], -key))
    middle = (len(packs[place]) + 1) // 2
    packs.append(packs[place][middle:])
    packs[place] = packs[place][:middle]


def _push(
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]], number: int, cells: list[tuple[int, list[int]]]
) -> None:
    """Add a partial solution, largest sum first; the heap yields the widest spread, then the newest."""
    cells = sorted(cells, key=lambda cell: (-cell[0], cell[1]))
    heapq.heappush(heap, (cells[-1][0] - cells[0][0], -number, cells))


def _check_lengths(lengths: Sequence[int], max_tokens: int) -> None:
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens}: the budget must be 1 token or more.")
    for index, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"lengths[{index}]={length}: an episode has 1 token or more.")
