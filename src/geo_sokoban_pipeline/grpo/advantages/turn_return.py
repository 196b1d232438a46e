"""Return of a turn less the mean return of comparable turns of its group."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from geo_sokoban_pipeline.config.estimators import TurnReturnArguments
from geo_sokoban_pipeline.grpo.groups import (
    STD_EPSILON,
    Episodes,
    Floats,
    advantage,
    centred,
    is_constant,
    returns_to_go,
    within_cells,
)


@advantage(zero_on_equal_groups=True, turn_rewards=True)
def turn_return(episodes: Episodes, args: TurnReturnArguments) -> list[Floats]:
    """`G_ik − mean G` of its cell, over a scale or not; one (n_e,) float64 per episode.

    `G_ik` is the discounted sum of the rewards of this and later turns. A cell is the turns of the group with one turn
    index, in one state (GiGPO, arXiv 2505.10978), or both. A cell with equal returns gives exactly 0, as does one of a
    single episode where episodes are left out of their own baseline.

    With a turn index, the number of baselines that are subtracted from a turn does not depend on when its episode ends.
    A state alone may be visited twice: then an episode's own later return is in its baseline, unless `leave_one_out`.

    Raises:
        ValueError: the episodes have no turn rewards, or not one state per turn.
    """
    to_go = returns_to_go(episodes, args.gamma)
    keys: Sequence[Sequence[Hashable]] = episodes.state_keys
    if args.baseline == "turn":
        keys = [range(len(row)) for row in to_go]
    elif args.baseline == "state_turn":
        keys = [list(enumerate(row)) for row in keys]
    advantages = within_cells(to_go, episodes.group, keys, _less_others if args.leave_one_out else _less_mean)
    return _divide_by_std(advantages, episodes.group) if args.scale == "std" else advantages


def _less_mean(values: Floats, owners: NDArray[np.int64]) -> Floats:
    return centred(values)


def _less_others(values: Floats, owners: NDArray[np.int64]) -> Floats:
    """Values less the mean of those of other episodes: an episode's own later turns would bias its baseline."""
    results = np.zeros(len(values))
    for owner in np.unique(owners):
        own = owners == owner
        if not (own.all() or is_constant(values)):
            results[own] = values[own] - values[~own].mean()
    return results


def _divide_by_std(advantages: Sequence[Floats], groups: NDArray[np.int64]) -> list[Floats]:
    """Advantages over the unbiased standard deviation of their group's turns + 1e-6."""
    results = list(advantages)
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group).tolist()
        pool = np.concatenate([advantages[member] for member in members])
        if not is_constant(pool):
            scale = pool.std(ddof=1) + STD_EPSILON
            for member in members:
                results[member] = advantages[member] / scale
    return results
