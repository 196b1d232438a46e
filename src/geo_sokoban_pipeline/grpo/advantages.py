"""Advantage of an episode: its reward against the other episodes of its group.

All statistics are float64, and a group whose rewards are equal gets exactly 0, never a rounding residue that the
division by a tiny standard deviation would blow up into a signal.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Rewards of a group that differ by no more than this are equal: far below any reward step, far above rounding.
EQUAL_REWARDS = 1e-6
# Added to the standard deviation, as in the seed systems.
STD_EPSILON = 1e-6


def group_advantages(rewards: ArrayLike, group_index: ArrayLike, *, normalize_std: bool = True) -> NDArray[np.float64]:
    """Advantage of each episode within its group (GRPO, arXiv 2402.03300, section 4.1).

    Args:
        rewards: (N,) episode rewards, any finite scale.
        group_index: (N,) integer group of each episode; groups need not be contiguous or equal in size.
        normalize_std: divide by the unbiased standard deviation + 1e-6; off gives Dr. GRPO (arXiv 2503.20783).

    Returns:
        (N,) float64. Exactly 0 where the rewards of a group differ by no more than 1e-6, also for values that binary
        floats cannot hold; so a group of one gets 0.

    Raises:
        ValueError: the shapes differ, or a reward is not finite; the message names its index.
    """
    values, groups = check_rewards(rewards, group_index)
    advantages = np.zeros(len(values), dtype=np.float64)
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        advantages[members] = centred(values[members], normalize_std=normalize_std)
    return advantages


def centred(values: NDArray[np.float64], *, normalize_std: bool = False) -> NDArray[np.float64]:
    """Values minus their mean, (n,) float64, on demand divided by (unbiased std + 1e-6); exactly 0 if all are equal."""
    if len(values) < 2 or is_constant(values):
        return np.zeros(len(values), dtype=np.float64)
    differences: NDArray[np.float64] = values - values.mean()
    if normalize_std:
        differences /= values.std(ddof=1) + STD_EPSILON
    return differences


def is_constant(values: NDArray[np.float64]) -> bool:
    """Whether values span no more than 1e-6; true for none and for one."""
    return bool(len(values) == 0 or values.max() - values.min() <= EQUAL_REWARDS)


def check_rewards(rewards: ArrayLike, group_index: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Rewards as (N,) float64 and groups as (N,) int64, or a ValueError that says which entry is wrong."""
    values = np.asarray(rewards, dtype=np.float64)
    groups = np.asarray(group_index)
    if values.ndim != 1 or groups.shape != values.shape:
        raise ValueError(
            f"rewards has shape {values.shape}, group_index {groups.shape}: both must be (N,), one entry per episode."
        )
    if groups.size and not np.issubdtype(groups.dtype, np.integer):
        raise ValueError(f"group_index has dtype {groups.dtype}: it must hold integers.")
    wrong = np.flatnonzero(~np.isfinite(values))
    if wrong.size:
        index = int(wrong[0])
        raise ValueError(
            f"rewards[{index}]={values[index]}: a reward must be finite. Leave out failed and aborted episodes."
        )
    return values, groups.astype(np.int64)
