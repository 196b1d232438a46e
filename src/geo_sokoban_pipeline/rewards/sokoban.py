"""Reward of a Sokoban episode: mean turn reward, success bonus, and how much nearer the boxes came to the targets.

The parts are returned beside the total, so that a stored trajectory explains its reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from geo_sokoban_pipeline.config.base import REWARD_BOUNDS, Bounds, check_number, checked_arguments

BOUNDS: Mapping[str, Bounds] = {"distance_weight": REWARD_BOUNDS}


def sokoban_reward(
    turn_rewards: Sequence[float],
    final_bonus: float | None,
    dist0: int | None,
    dist1: int | None,
    *,
    aggregate: Literal["mean", "sum"] = "mean",
    distance_weight: float = 1.0,
) -> dict[str, float | None]:
    """Reward with its parts; by default the original's, `mean(turn_rewards) + final_bonus + (dist0 − dist1)`.

    Args:
        turn_rewards: one per turn, possibly none.
        final_bonus: bonus for success; None counts as 0.
        dist0: distance of boxes to targets at the start, in cells; None: unknown, no distance term.
        dist1: the same at the end.
        aggregate: whether the mean or the sum of the turn rewards enters the total. Use the sum where single moves are
            rewarded or charged.
        distance_weight: reward per cell that the boxes came nearer.

    Returns:
        turn_reward_avg, turn_reward_total, final_bonus, dist0, dist1, distance_delta (unweighted), total_reward. The
        distances stay None where they are unknown.

    Raises:
        ValueError: aggregate is neither `mean` nor `sum`, or distance_weight is out of its bounds.
    """
    if aggregate not in ("mean", "sum"):
        raise ValueError(f"aggregate={aggregate!r}: must be 'mean' or 'sum'")
    check_number("distance_weight", distance_weight, BOUNDS["distance_weight"])
    total = float(sum(turn_rewards))
    mean = total / len(turn_rewards) if len(turn_rewards) else 0.0
    bonus = float(final_bonus or 0.0)
    delta = 0.0 if dist0 is None or dist1 is None else float(dist0 - dist1)
    return {
        "turn_reward_avg": mean,
        "turn_reward_total": total,
        "final_bonus": bonus,
        "dist0": dist0,
        "dist1": dist1,
        "distance_delta": delta,
        "total_reward": (mean if aggregate == "mean" else total) + bonus + distance_weight * delta,
    }


def compute_reward(outcome: Any, args: Mapping[str, Any]) -> dict[str, float]:
    """Reward function of the Sokoban task, as `reward.function` names it.

    Args:
        outcome: finished episode; `outcome.env` holds `turn_rewards`, `final_bonus`, `dist0`, `dist1`.
        args: `aggregate` and `distance_weight` of `sokoban_reward`.

    Returns:
        The parts of `sokoban_reward`, with the total as `reward` too.

    Raises:
        ValueError: an argument is unknown or out of range; the message names it.
    """
    known = checked_arguments("reward.args", args, ("aggregate", "distance_weight"))
    env = outcome.env
    parts = sokoban_reward(env["turn_rewards"], env["final_bonus"], env["dist0"], env["dist1"], **known)
    return {"reward": float(parts["total_reward"] or 0.0), **{k: float(v) for k, v in parts.items() if v is not None}}


# Credit per turn takes such a reward apart without trying it first.
compute_reward.made_of_turns = compute_reward  # type: ignore[attr-defined]
