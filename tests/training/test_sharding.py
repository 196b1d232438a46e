"""Shards: groups stay whole, ranges and samples are split in order, and no shard is empty."""

from __future__ import annotations

import numpy as np
import pytest

from geo_sokoban_pipeline.policies.patches import EncodedImage
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest
from geo_sokoban_pipeline.training.batch import TrainSample
from geo_sokoban_pipeline.training.sharding import shard_groups, shard_range, shard_samples


def sample(length: int, *names: str) -> TrainSample:
    """So many tokens and images of ten patches each."""
    none = np.zeros(0, np.int64)
    images = [EncodedImage(name, b"", np.zeros((10, 1), np.uint8), (1, 2, 5)) for name in names]
    return TrainSample(np.zeros(length, np.int64), none, none, none, images)


@pytest.mark.parametrize(
    ("groups", "parts", "dealt"),
    [
        ([0, 0, 1, 1, 2, 2], 2, [[0, 1, 4, 5], [2, 3]]),
        ([0, 0, 1], 3, [[0, 1], [2]]),
        ([7, 7], 2, [[0, 1]]),
        ([], 2, []),
    ],
)
def test_groups_stay_together(groups: list[int], parts: int, dealt: list[list[int]]) -> None:
    tasks = [EpisodeRequest(str(index), {}, group, index, 0) for index, group in enumerate(groups)]
    assert shard_groups(tasks, parts) == dealt


@pytest.mark.parametrize(
    ("numbers", "parts", "cut"),
    [
        (range(10, 17), 2, [range(10, 13), range(13, 17)]),
        (range(5), 5, [range(0, 1), range(1, 2), range(2, 3), range(3, 4), range(4, 5)]),
        (range(3, 4), 2, [range(3, 4)]),
    ],
)
def test_ranges_are_cut_in_order(numbers: range, parts: int, cut: list[range]) -> None:
    assert shard_range(numbers, parts) == cut


@pytest.mark.parametrize(
    ("samples", "parts", "lengths"),
    [
        ([sample(9), sample(1), sample(4), sample(5)], 2, [[9, 1], [4, 5]]),
        ([sample(9), sample(1), sample(4), sample(5)], 3, [[9], [1, 4], [5]]),
        ([sample(3)], 2, [[3]]),
        # Alone the tokens would be cut in the middle; then both parts would encode image b.
        ([sample(2, "a"), sample(3, "b"), sample(1, "b")], 2, [[2], [3, 1]]),
        # An image that comes again in a part costs nothing there.
        ([sample(2, "a"), sample(2, "a"), sample(2, "a"), sample(2, "b")], 2, [[2, 2, 2], [2]]),
        # The image of a shard's first sample counts too: both cuts give 24, so the first shard is filled.
        ([sample(12), sample(2, "a"), sample(12)], 2, [[12, 2], [12]]),
    ],
)
def test_the_largest_part_is_as_small_as_possible(
    samples: list[TrainSample], parts: int, lengths: list[list[int]]
) -> None:
    assert [[member.length for member in part] for part in shard_samples(samples, parts)] == lengths
