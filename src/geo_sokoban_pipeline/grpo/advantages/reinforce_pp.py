"""REINFORCE++ (arXiv 2501.03262): rewards are whitened over the tokens of the whole batch, not within a group."""

from __future__ import annotations

import numpy as np

from geo_sokoban_pipeline.config.estimators import NoArguments
from geo_sokoban_pipeline.grpo.groups import Episodes, Floats, advantage, group_advantages, is_constant


@advantage(zero_on_equal_groups=False, reads_tokens=True)
def reinforce_pp(episodes: Episodes, args: NoArguments) -> Floats:
    """Whitened reward, (N,): without discount the return of every token is the reward of its episode."""
    return _whiten(episodes.reward, episodes)


@advantage(zero_on_equal_groups=False, reads_tokens=True)
def reinforce_pp_baseline(episodes: Episodes, args: NoArguments) -> Floats:
    """Whitened `R_i − mean` of the group, (N,).

    Weighted by tokens the mean of these is not 0, so whitening shifts them: an episode of a group with equal rewards
    gets a number other than 0, and a small advantage can change its sign.
    """
    return _whiten(group_advantages(episodes.reward, episodes.group, normalize_std=False), episodes)


def _whiten(values: Floats, episodes: Episodes) -> Floats:
    """`(x − mean) / sqrt(var + 1e-8)` over the sampled tokens of the trained episodes; 0 where these have equal values.

    Each token has the value of its episode; the variance is unbiased.
    """
    trained = values[episodes.trained]
    tokens = np.array([row.sum() for row in episodes.lengths])[episodes.trained]
    if is_constant(trained) or tokens.sum() < 2:
        return np.zeros(len(values))
    mean = np.average(trained, weights=tokens)
    variance = float(tokens @ (trained - mean) ** 2) / (tokens.sum() - 1)
    whitened: Floats = (values - mean) / np.sqrt(variance + 1e-8)
    return whitened
