"""Data-parallel shards: how the work of one step is cut among processes.

A cut depends on the work and the number of parts alone, never on timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from geo_sokoban_pipeline.rollout.episode import EpisodeTask
from geo_sokoban_pipeline.training.batch import TrainSample


def deal_groups(tasks: Sequence[EpisodeTask], parts: int) -> list[list[int]]:
    """Numbers of tasks, dealt out group by group like cards; at most `parts` lists, none of them empty.

    Neighbouring groups are often alike (levels sorted by length), so dealing evens out what they cost.
    """
    groups = [list(members) for _, members in groupby(range(len(tasks)), key=lambda index: tasks[index].group_index)]
    dealt = [[index for group in groups[part::parts] for index in group] for part in range(parts)]
    return [numbers for numbers in dealt if numbers]


def cut_range(numbers: range, parts: int) -> list[range]:
    """Contiguous parts of sizes that differ by at most one; at most `parts`, none of them empty."""
    count = len(numbers)
    bounds = [count * part // parts for part in range(parts + 1)]
    return [numbers[first:last] for first, last in zip(bounds, bounds[1:], strict=False) if last > first]


def cut_samples(samples: Sequence[TrainSample], parts: int) -> list[list[TrainSample]]:
    """Contiguous parts whose largest is as small as possible; at most `parts`, none of them empty.

    The work of a part is its input tokens and the patches of its distinct images: an image that two parts need is
    encoded in both, so the groups, which share images, stay together unless cutting one evens out more.
    """
    low, high = 0, _work(samples)
    while low < high:
        limit = (low + high) // 2
        if len(_fill(samples, limit)) <= parts:
            high = limit
        else:
            low = limit + 1
    return _fill(samples, high)


def _work(samples: Sequence[TrainSample]) -> int:
    images = {image.key: len(image.patches) for sample in samples for image in sample.images}
    return sum(sample.length for sample in samples) + sum(images.values())


def _fill(samples: Sequence[TrainSample], limit: int) -> list[list[TrainSample]]:
    """Fill parts in order, each up to the limit, with one sample at least."""
    parts: list[list[TrainSample]] = []
    work, known = 0, set[str]()
    for sample in samples:
        images = {image.key: len(image.patches) for image in sample.images}
        more = sample.length + sum(patches for key, patches in images.items() if key not in known)
        if not parts or work + more > limit:
            parts.append([])
            work, known = 0, set()
            more = sample.length + sum(images.values())
        parts[-1].append(sample)
        work += more
        known |= images.keys()
    return parts
