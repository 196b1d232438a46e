"""Regrading: stored episodes under another reward and other advantages, without a model.

Each episode is replayed from its stored responses with the new options, so rewards come from the same code as in a
rollout. Tokens, mask and images must come out as stored: options that change what the policy saw are refused, since
it would have answered otherwise. Log-probs, seeds and timings stay those of the rollout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from geo_sokoban_pipeline.config.grpo import GrpoOptions
from geo_sokoban_pipeline.evaluation.replay import Replayer
from geo_sokoban_pipeline.grpo.scoring import apply_scores, score_groups
from geo_sokoban_pipeline.trajectories.types import Trajectory


class RegradeError(ValueError):
    """A stored episode cannot be graded again under these options."""


def regrade_episodes(
    stored: Sequence[Trajectory],
    replayer: Replayer,
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    grpo: GrpoOptions,
) -> tuple[list[Trajectory], dict[str, float]]:
    """The episodes of one iteration with new rewards and advantages, and how far they differ.

    Args:
        replayer: with the new options of environment and reward.
        rows: prompts of the split that the episodes belong to, see `prompts_by_key`.
        grpo: new options of the advantages.

    Returns:
        New episodes in order; failed ones are as they were. `regrade/*`: episodes; how many rewards, signs of
        advantages and choices for the update changed; means of the old and the new rewards.

    Raises:
        RegradeError: an episode's prompt is missing, its replay fails, or the policy would have seen something else.
    """
    replayed = replayer.replay(stored, rows)
    regraded = [_merge(episode, replayed.get(episode.trajectory_id)) for episode in stored]
    apply_scores(regraded, score_groups(regraded, grpo, replayer.task, replayer.reward.args))
    pairs = list(zip(stored, regraded, strict=True))
    graded = [(old, new) for old, new in pairs if old.reward is not None and new.reward is not None]
    return regraded, {
        "regrade/episodes": float(len(pairs)),
        "regrade/changed_rewards": float(sum(old.reward != new.reward for old, new in pairs)),
        "regrade/changed_signs": float(sum(_sign(old) != _sign(new) for old, new in graded)),
        "regrade/changed_trained": float(sum(old.trained != new.trained for old, new in pairs)),
        "regrade/old_reward": float(np.mean([old.reward for old, _ in graded])) if graded else 0.0,
        "regrade/new_reward": float(np.mean([new.reward for _, new in graded])) if graded else 0.0,
    }


def _merge(stored: Trajectory, replayed: Trajectory | str | None) -> Trajectory:
    """The stored episode with what the replay has graded."""
    if replayed is None:  # it had failed
        return replace(stored)
    if isinstance(replayed, str):
        raise RegradeError(f"{stored.trajectory_id}: {replayed}")
    if replayed.status == "failed":
        raise RegradeError(f"{stored.trajectory_id}: the replay failed: {replayed.error}")
    same = np.array_equal(stored.token_ids, replayed.token_ids) and stored.images == replayed.images
    if not same or stored.status != replayed.status:
        raise RegradeError(
            f"{stored.trajectory_id}: with these options the policy would have seen something else than what is "
            "stored. Regrading takes options that change rewards and advantages alone: leave those out that change "
            "observations, limits or the end of an episode, and roll out again with rollout_* to try them."
        )
    return replace(
        stored,
        turns=[
            replace(old, reward=new.reward, info=new.info, credit=None, advantage=None)
            for old, new in zip(stored.turns, replayed.turns, strict=True)
        ],
        reward=replayed.reward,
        reward_parts=replayed.reward_parts,
        metrics=replayed.metrics,
    )


def _sign(episode: Trajectory) -> float:
    return float(np.sign(episode.advantage or 0.0))
