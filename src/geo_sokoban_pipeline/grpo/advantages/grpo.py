"""Reward of an episode less the mean of its group: GRPO (arXiv 2402.03300) and Dr. GRPO (2503.20783)."""

from __future__ import annotations

from geo_sokoban_pipeline.config.estimators import NoArguments
from geo_sokoban_pipeline.grpo.groups import Episodes, Floats, advantage, group_advantages


@advantage(zero_on_equal_groups=True)
def grpo(episodes: Episodes, args: NoArguments) -> Floats:
    """`(R_i − mean) / (std + 1e-6)` with the group's unbiased standard deviation, (N,); a group of one gives 0."""
    return group_advantages(episodes.reward, episodes.group)


@advantage(zero_on_equal_groups=True)
def dr_grpo(episodes: Episodes, args: NoArguments) -> Floats:
    """`R_i − mean`, (N,): a group with a small spread counts no more than another. A group of one gives 0."""
    return group_advantages(episodes.reward, episodes.group, normalize_std=False)
