"""Shards: groups stay whole, ranges are cut in order, samples are dealt by cost, and no shard is empty."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from geo_sokoban_pipeline.policies.patches import EncodedImage
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest
from geo_sokoban_pipeline.training.batch import TrainSample, split_steps
from geo_sokoban_pipeline.training.sharding import StepCost, shard_groups, shard_range, shard_samples
from policies.mixtures import EXPERTS, build_mixture

# Trained episodes of the first iteration of the default run, seed 0.
RECORDED = Path(__file__).parent / "recorded_episodes.json"
TOKENS_AND_PATCHES = StepCost(token=1, label=0, pair=0, patch=1, patch_pair=0)


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
    ("samples", "parts", "shards"),
    [
        ([sample(9), sample(1), sample(4), sample(5)], 2, [[0, 1], [2, 3]]),
        ([sample(9), sample(1), sample(4), sample(5)], 3, [[0], [1, 2], [3]]),
        ([sample(3)], 2, [[0]]),
        ([], 2, []),
        # Contiguous shards would be 16 and 8.
        ([sample(4), sample(4), sample(8), sample(8)], 2, [[0, 2], [1, 3]]),
        # Both splits cost 17 at most: the contiguous one keeps groups together.
        ([sample(9), sample(9), sample(8)], 2, [[0], [1, 2]]),
        # Alone the tokens would be cut in the middle; then both parts would encode image b.
        ([sample(2, "a"), sample(3, "b"), sample(1, "b")], 2, [[0], [1, 2]]),
        # An image that comes again in a part costs nothing there.
        ([sample(2, "a"), sample(2, "a"), sample(2, "a"), sample(2, "b")], 2, [[0, 1, 2], [3]]),
        # The image of a shard's first sample counts too: both cuts give 24, so the first shard is filled.
        ([sample(12), sample(2, "a"), sample(12)], 2, [[0, 1], [2]]),
    ],
)
def test_the_largest_part_is_as_small_as_possible(
    samples: list[TrainSample], parts: int, shards: list[list[int]]
) -> None:
    assert shard_samples(samples, parts, TOKENS_AND_PATCHES) == shards


def test_pairs_and_trained_tokens_count() -> None:
    """One long sample costs as much as several short ones with more tokens."""
    short = [sample(10) for _ in range(4)]
    assert shard_samples([sample(20), *short], 2, TOKENS_AND_PATCHES) == [[0, 1], [2, 3, 4]]
    attention = StepCost(token=0, label=0, pair=1, patch=0, patch_pair=0)
    assert shard_samples([sample(20), *short], 2, attention) == [[0], [1, 2, 3, 4]]
    labels = StepCost(token=1, label=100, pair=0, patch=0, patch_pair=0)
    answered = [TrainSample(**{**vars(one), "targets": np.arange(1, 3)}) for one in short[:2]]
    assert shard_samples([sample(20), *answered], 2, labels) == [[0, 1], [2]]


def test_costs_are_counts_of_weights(tiny_policy: Policy) -> None:
    cost, weights = StepCost.of(tiny_policy.model.config), dict(tiny_policy.model.named_parameters())

    def count(part: str, weights: dict[str, torch.Tensor]) -> int:
        return sum(weight.numel() for name, weight in weights.items() if part in name and weight.ndim >= 2)

    assert cost.token == count("language_model.layers.", weights)
    assert cost.patch == count("visual.blocks.", weights)
    assert cost.label == tiny_policy.model.lm_head.weight.numel()
    mixture = build_mixture(tiny_policy)
    weights = dict(mixture.model.named_parameters())
    experts = count(".mlp.experts.", weights)
    others = count("language_model.layers.", weights) - experts - count(".mlp.gate.", weights)
    assert StepCost.of(mixture.model.config).token == others + experts * 2 // EXPERTS, "two experts for each token"


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_recorded_episodes_are_dealt_evenly(tiny_policy: Policy, ranks: int) -> None:
    stored = json.loads(RECORDED.read_text(encoding="utf-8"))
    groups: dict[int, list[TrainSample]] = {}
    for group, length, trained, names in stored["episodes"]:
        images = [EncodedImage(str(name), b"", np.zeros((36, 1), np.uint8), tuple(stored["grid"])) for name in names]
        none, targets = np.zeros(0, np.int64), np.arange(1, trained + 1)
        episode = TrainSample(np.zeros(length, np.int64), none, targets, targets, images)
        groups.setdefault(group, []).append(episode)
    cost = StepCost.of(tiny_policy.model.config)
    for chosen in split_steps(list(groups.values()), groups_per_step=5):
        samples = [episode for group in chosen for episode in group]
        shards = shard_samples(samples, ranks, cost)
        assert sorted(index for shard in shards for index in shard) == list(range(len(samples)))
        tokens = [sum(samples[index].length for index in shard) for shard in shards]
        assert sum(tokens) == sum(episode.length for episode in samples)
        assert max(tokens) <= 1.1 * sum(tokens) / ranks, tokens
