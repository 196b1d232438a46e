"""Reward of a Sokoban episode: mean turn reward, success bonus, and how much nearer the boxes came to the targets.

The parts are returned beside the total, so that a stored trajectory explains its reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

from pydantic import Field

from geo_sokoban_pipeline.config.base import Reward, StrictModel, validate_parameters


class SokobanRewardOptions(StrictModel):
    """Arguments of Sokoban's reward."""

    aggregate: Literal["mean", "sum"] = Field(
        "mean", description="How turn rewards add up: `mean` (slime's rule) or `sum`."
    )
    distance_weight: Reward = Field(1.0, description="Worth of each cell by which boxes come nearer to targets.")


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
    """
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


def turn_values(
    turn_rewards: Sequence[float],
    distances: Sequence[float] | None,
    success_bonus: float,
    aggregate: Literal["mean", "sum"] = "mean",
    distance_weight: float = 1.0,
) -> list[float]:
    """Worth of each of the n turns of one episode: `r_s / n + weight * (d_s - d_{s+1})`, plus the bonus in the last.

    Args:
        turn_rewards: (n,) sum of the step rewards in each turn.
        distances: (n + 1,) distance of boxes and targets before the first turn and after each turn, in cells;
            None: no distance term.
        success_bonus: added to the last turn; 0 where the episode was not solved.
        aggregate: "mean" divides the turn rewards by n (slime's reward); "sum" does not.
        distance_weight: reward per cell of reduced distance.

    Returns:
        (n,) values that add up to the episode's reward; empty for an episode without turns.

    Raises:
        ValueError: the number of distances is not that of the rewards plus 1.
    """
    count = len(turn_rewards)
    if count == 0:
        return []
    values = [reward / count if aggregate == "mean" else reward for reward in turn_rewards]
    if distances is not None:
        if len(distances) != count + 1:
            raise ValueError(
                f"distances has {len(distances)} entries for {count} turns: give one before the first and one after "
                "each."
            )
        nearer = [before - after for before, after in pairwise(distances)]
        values = [value + distance_weight * cells for value, cells in zip(values, nearer, strict=True)]
    values[-1] += success_bonus
    return values


def compute_reward(result: Any, args: Mapping[str, Any]) -> dict[str, float]:
    """Reward function of the Sokoban task, as `reward.function` names it.

    Args:
        result: finished episode; `result.env` holds `turn_rewards`, `final_bonus`, `dist0`, `dist1`.
        args: fields of `SokobanRewardOptions`.

    Returns:
        The parts of `sokoban_reward`, with the total as `reward` too.

    Raises:
        ParameterError: an argument is unknown or out of range; the message names it.
    """
    options = validate_parameters(args, SokobanRewardOptions, prefix="reward.args")
    env = result.env
    parts = sokoban_reward(env["turn_rewards"], env["final_bonus"], env["dist0"], env["dist1"], **dict(options))
    return {"reward": float(parts["total_reward"] or 0.0), **{k: float(v) for k, v in parts.items() if v is not None}}


# Credit per turn takes such a reward apart without trying it first.
compute_reward.made_of_turns = compute_reward  # type: ignore[attr-defined]
