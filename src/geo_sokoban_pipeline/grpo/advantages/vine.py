"""Advantages from continuations: the value after a response less the value before it (VinePPO, arXiv 2410.01679)."""

from __future__ import annotations

import numpy as np

from geo_sokoban_pipeline.config.estimators import NoArguments, VineArguments
from geo_sokoban_pipeline.grpo.advantages.rloo import rloo
from geo_sokoban_pipeline.grpo.groups import Episodes, Floats, advantage


@advantage(zero_on_equal_groups=True, forks=True)
def vine(episodes: Episodes, args: VineArguments) -> list[Floats]:
    """Gain of value from the last measured state to the next one, for each response; one (n_e,) float64 per episode.

    The value of an episode's end is its reward, and that of its prompt the mean reward of the other episodes of its
    group. Each response between two measured states has the difference of these (segments of SPO, arXiv 2505.23564), so
    without any measured state the advantages are those of RLOO. The expectation of the policy gradient is that of the
    true advantages where what has led to a state decides alone whether it is measured.
    """
    found = []
    leads = rloo(episodes, NoArguments())  # over the other episodes
    for reward, lead, measured in zip(episodes.reward, leads, episodes.state_values, strict=True):
        values = np.append(measured, reward)
        values[0] = reward - lead if len(measured) else reward
        known = np.flatnonzero(np.isfinite(values))
        found.append(np.repeat(np.diff(values[known]), np.diff(known)))
    return found
