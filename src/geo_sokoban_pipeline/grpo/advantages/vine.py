"""Advantages from continuations: the value after a response less the value before it (VinePPO, arXiv 2410.01679)."""

from __future__ import annotations

import numpy as np

from geo_sokoban_pipeline.config.estimators import VineArguments
from geo_sokoban_pipeline.grpo.groups import Episodes, Floats, advantage, group_advantages


@advantage(zero_on_equal_groups=True)
def vine(episodes: Episodes, args: VineArguments) -> list[Floats]:
    """Gain of value from the last measured state to the next one, for each response; one (n_e,) float64 per episode.

    The value of an episode's end is its reward. Each response between two measured states has the difference of these
    (segments of SPO, arXiv 2505.23564): the expectation of the policy gradient is that of the true advantages where a
    state is measured or not by what has led to it. A prompt that is not measured has the mean reward of its group as
    its value, so without any measured state the advantages are those of Dr. GRPO.
    """
    whole = group_advantages(episodes.reward, episodes.group, normalize_std=False)
    found = []
    for reward, less_mean, measured in zip(episodes.reward, whole, episodes.state_values, strict=True):
        values = np.append(measured, reward)
        if np.isnan(values[0]):
            values[0] = reward - less_mean
        known = np.flatnonzero(np.isfinite(values))
        found.append(np.repeat(np.diff(values[known]), np.diff(known)))
    return found
