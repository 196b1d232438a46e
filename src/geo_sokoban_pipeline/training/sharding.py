"""Data-parallel shards: how the work of one step is split among processes.

A split depends on the work and the number of parts alone, never on timing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from geo_sokoban_pipeline.policies.patches import EncodedImage
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


@dataclass(frozen=True)
class StepCost:
    """Multiplications of a forward pass by what passes; a backward pass is in proportion to them.

    Attributes:
        token: of an input token, in the matrices of all decoder layers.
        label: of a trained token, in the output head.
        pair: of two tokens of which one attends to the other, in all layers.
        patch: of an image's patch, in the matrices of the vision tower.
        patch_pair: of two patches of an image, in all vision blocks.
    """

    token: int
    label: int
    pair: int
    patch: int
    patch_pair: int

    @classmethod
    def of(cls, config: Any) -> StepCost:
        """Of a policy with this configuration; of experts those count that a token passes."""
        text, vision = config.text_config, config.vision_config
        hidden = text.hidden_size
        queries, keys = text.num_attention_heads * text.head_dim, text.num_key_value_heads * text.head_dim
        experts = getattr(text, "num_experts_per_tok", 0)
        inner = experts * text.moe_intermediate_size if experts else text.intermediate_size
        layer = hidden * (2 * queries + 2 * keys + 3 * inner)
        block = vision.hidden_size * (4 * vision.hidden_size + 2 * vision.intermediate_size)
        return cls(
            token=text.num_hidden_layers * layer,
            label=hidden * text.vocab_size,
            pair=text.num_hidden_layers * 2 * queries,
            patch=vision.depth * block,
            patch_pair=vision.depth * 2 * vision.hidden_size,
        )

    def of_sample(self, sample: TrainSample) -> int:
        """Of a sample without its images; causal attention has half of all pairs."""
        length = sample.length
        return self.token * length + self.label * len(sample.targets) + self.pair * length * (length + 1) // 2

    def of_image(self, image: EncodedImage) -> int:
        """Of an image, which a part encodes once, however many of its samples show it."""
        count = math.prod(image.grid)
        return self.patch * count + self.patch_pair * count * count


def shard_samples(samples: Sequence[TrainSample], parts: int, cost: StepCost) -> list[list[int]]:
    """Indices of samples by shard, in order; at most `parts` shards, none of them empty, of nearly equal cost.

    Two splits are compared, and the one with the cheaper largest shard is taken. Contiguous shards keep groups
    together, whose episodes share images; but where a shard has few samples, their ends lie far from equal. Samples
    that are dealt one by one, the most expensive first, come near to equal costs.
    """
    items = [
        _Item(cost.of_sample(sample), {image.key: cost.of_image(image) for image in sample.images})
        for sample in samples
    ]
    splits = _fill_evenly(items, parts), _deal(items, parts)
    return min(splits, key=lambda split: max(_costs(items, split), default=0))


@dataclass(frozen=True)
class _Item:
    """Cost of a sample, and of its images by their keys."""

    cost: int
    images: dict[str, int]

    @property
    def alone(self) -> int:
        """Cost in a shard of its own."""
        return self.cost + sum(self.images.values())

    def beside(self, known: AbstractSet[str]) -> int:
        """Cost in a shard that has some images already."""
        return self.cost + sum(cost for key, cost in self.images.items() if key not in known)


def _costs(items: Sequence[_Item], split: Sequence[Sequence[int]]) -> list[int]:
    """Cost of each shard."""
    images = [{key: cost for index in part for key, cost in items[index].images.items()} for part in split]
    return [
        sum(items[index].cost for index in part) + sum(own.values()) for part, own in zip(split, images, strict=True)
    ]


def _fill_evenly(items: Sequence[_Item], parts: int) -> list[list[int]]:
    """Contiguous shards, at most `parts`, whose largest costs as little as possible."""
    # No split is cheaper than all costs, each image once, in equal parts.
    low = -(-sum(_costs(items, [range(len(items))])) // parts)
    low = max([low, *(item.alone for item in items)])
    found, high = None, sum(item.alone for item in items)
    while found is None or low < high:
        filled = _fill(items, (low + high) // 2, parts)
        if isinstance(filled, int):
            low = filled
        else:
            # The largest shard may be below the limit: then no limit in between gives another split.
            found, high = filled, min(high, max(_costs(items, filled), default=0))
    return found


def _fill(items: Sequence[_Item], limit: int, parts: int) -> list[list[int]] | int:
    """Fill shards in order, each up to the limit, with at least one sample.

    Returns:
        The shards. If there would be more than `parts`: the least limit under which another split may be found.
    """
    shards: list[list[int]] = []
    load, known, least = 0, set[str](), sum(item.alone for item in items)
    for index, item in enumerate(items):
        more = item.beside(known)
        if not shards or load + more > limit:
            least = min(least, load + more) if shards else least
            if len(shards) == parts:
                return least
            shards.append([])
            load, known = 0, set()
            more = item.alone
        shards[-1].append(index)
        load += more
        known |= item.images.keys()
    return shards


def _deal(items: Sequence[_Item], parts: int) -> list[list[int]]:
    """Give each sample, the most expensive first, to the shard that then costs least."""
    shards: list[list[int]] = [[] for _ in range(parts)]
    loads, known = [0] * parts, [set[str]() for _ in range(parts)]
    for index in sorted(range(len(items)), key=lambda index: (-items[index].alone, index)):
        totals = [load + items[index].beside(images) for load, images in zip(loads, known, strict=True)]
        part = totals.index(min(totals))
        shards[part].append(index)
        loads[part] = totals[part]
        known[part] |= items[index].images.keys()
    return [sorted(shard) for shard in shards if shard]
