"""Group-in-group advantages (GiGPO, arXiv 2505.10978): of the episode in its group, and of the turn in its state."""

from __future__ import annotations

from geo_sokoban_pipeline.config.estimators import GigpoArguments
from geo_sokoban_pipeline.grpo.groups import (
    Episodes,
    Floats,
    advantage,
    centred,
    group_advantages,
    returns_to_go,
    within_cells,
)


@advantage(zero_on_equal_groups=True, turn_rewards=True)
def gigpo(episodes: Episodes, args: GigpoArguments) -> list[Floats]:
    """`(R_i − mean R) / F + omega (G_ik − mean G) / F`; one (n_e,) float64 per episode.

    The first mean is over the episodes of the group, and R is not discounted; the second is over the turns of the group
    in the same state, and G is the discounted return from the turn on. F is the unbiased standard deviation of the same
    values + 1e-6, or 1. A group or a state with one member, or with equal values, gives exactly 0.

    As in the paper, an episode that visits a state twice is in that state's mean twice, so its own later return is part
    of its baseline; `turn_return` with `leave_one_out` has no such bias.

    Raises:
        ValueError: the episodes have no turn rewards, or not one state per turn.
    """
    normalize = args.scale == "std"
    of_episodes = group_advantages(episodes.reward, episodes.group, normalize_std=normalize)
    of_turns = within_cells(
        returns_to_go(episodes, args.gamma),
        episodes.group,
        episodes.state_keys,
        lambda values, owners: centred(values, normalize_std=normalize),
    )
    return [whole + args.omega * own for whole, own in zip(of_episodes, of_turns, strict=True)]
