"""REINFORCE leave-one-out (arXiv 2402.14740): the other episodes of the group are the baseline, which is unbiased."""

from __future__ import annotations

import numpy as np

from geo_sokoban_pipeline.config.estimators import NoArguments
from geo_sokoban_pipeline.grpo.groups import Episodes, Floats, advantage, group_advantages


@advantage(zero_on_equal_groups=True)
def rloo(episodes: Episodes, args: NoArguments) -> Floats:
    """`R_i − mean of the others' R`, (N,), computed as `n / (n − 1) (R_i − mean)`; a group of one gives 0."""
    _, place, counts = np.unique(episodes.group, return_inverse=True, return_counts=True)
    sizes = counts[place]
    return group_advantages(episodes.reward, episodes.group, normalize_std=False) * sizes / np.maximum(sizes - 1, 1)
