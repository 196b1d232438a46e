"""Data-parallel shards: how the work of one step is split among processes.

A split depends on the work and the number of parts alone, never on timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from geo_sokoban_pipeline.rollout.episode import EpisodeRequest
from geo_sokoban_pipeline.training.batch import TrainSample


def shard_groups(tasks: Sequence[EpisodeRequest], parts: int) -> list[list[int]]:
    """Indices of tasks, whole groups sharded round-robin; at most `parts` shards, none of them empty.

    Neighbouring groups are often alike (levels sorted by length), so a round-robin balances the cost.
    """
    groups = [list(indices) for _, indices in groupby(range(len(tasks)), key=lambda index: tasks[index].group_index)]
    shards = [[index for group in groups[part::parts] for index in group] for part in range(parts)]
    return [shard for shard in shards if shard]


def shard_range(numbers: range, parts: int) -> list[range]:
    """Contiguous shards whose sizes differ by at most one; at most `parts`, none of them empty."""
    count = len(numbers)
    bounds = [count * part // parts for part in range(parts + 1)]
    return [numbers[first:last] for first, last in zip(bounds, bounds[1:], strict=False) if last > first]


def shard_samples(samples: Sequence[TrainSample], parts: int) -> list[list[TrainSample]]:
    """Contiguous shards whose largest is as small as possible; at most `parts`, none of them empty.

    The work of a shard is its input tokens plus the patches of its distinct images. An image that two shards need is
    encoded twice, so a group, whose episodes share images, is split only where that balances the work better.
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
    """Fill shards in order, each up to the limit, with at least one sample."""
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
