"""Rules on whole episodes: identity, outcome, and advantages within a group."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from geo_sokoban_pipeline.contract.columns import Episodes, TrajectoryError, flags, nulls

STATUSES = ("completed", "truncated", "aborted", "failed")


def check_identity(episodes: Episodes) -> None:
    """Ids are unique and not empty, the status is known, `sampling` and each turn's `info` are JSON objects."""
    counts = pc.value_counts(episodes.column("trajectory_id"))
    repeated = counts.filter(pc.greater(counts.field("counts"), 1))
    for entry in repeated[:1].to_pylist():
        raise TrajectoryError("trajectory_id", entry["values"], f"{entry['counts']} rows' id", "ids are unique")
    for name in ("trajectory_id", "task", "task_id"):
        episodes.fail_row(flags(pc.equal(episodes.column(name), "")), name, "not empty")
    known = pc.is_in(episodes.column("status"), pa.array(STATUSES))
    episodes.fail_row(~flags(known), "status", f"one of {', '.join(STATUSES)}")
    episodes.fail_row(~_is_object(episodes.column("sampling")), "sampling", "a JSON object")
    bad = ~_is_object(episodes.turns.values.field("info"))
    episodes.fail_item(bad, "turns", episodes.turns, "info is a JSON object")


def _is_object(text: pa.Array) -> np.ndarray:
    # The braces only: parsing every turn's text would take longer than all other rules together.
    return flags(pc.and_(pc.starts_with(text, "{"), pc.ends_with(text, "}")))


def check_outcome(episodes: Episodes) -> None:
    """Rewards and advantages are finite, and absent exactly where they must be; errors belong to failed episodes."""
    status = episodes.column("status")
    broken = flags(pc.is_in(status, pa.array(["aborted", "failed"])))
    trained = flags(episodes.column("trained"))
    has = {name: ~nulls(episodes.column(name)) for name in ("reward", "advantage", "error", "drop_reason")}
    episodes.fail_row(has["reward"] & broken, "reward", "null for aborted and failed episodes")
    episodes.fail_row(~has["reward"] & ~broken, "reward", "null only for aborted and failed episodes")
    episodes.fail_row(has["advantage"] & broken, "advantage", "null for aborted and failed episodes")
    for name in ("reward", "advantage"):
        episodes.fail_row(has[name] & ~np.isfinite(episodes.numbers(name)), name, "finite or null")
    failed = flags(pc.equal(status, "failed"))
    episodes.fail_row(has["error"] != failed, "error", "a text for failed episodes, null for all others")
    episodes.fail_row(trained & broken, "trained", "false for aborted and failed episodes")
    episodes.fail_row(trained & has["drop_reason"], "drop_reason", "null for trained episodes")
    missing = trained & ~has["advantage"] & ~_has_turn_advantage(episodes)
    episodes.fail_row(missing, "advantage", "a trained episode has one, or its turns have")


def _has_turn_advantage(episodes: Episodes) -> np.ndarray:
    credited = np.zeros(episodes.table.num_rows, bool)
    credited[episodes.turns.rows[~nulls(episodes.turns.values.field("advantage"))]] = True
    return credited


def check_group_advantages(episodes: Episodes) -> None:
    """Where all rewards of a group are equal, its advantages are exactly 0.

    Not for a single reward, which may be one episode cut out of its group, nor for turn credit.
    """
    rewarded = ~nulls(episodes.column("reward"))
    if not rewarded.any():
        return
    # Both are of 32 bits: one number for both is found several times quicker than pairs are.
    keys = (episodes.numbers("iteration").astype(np.int64) << 32) + episodes.numbers("group_index")
    groups, group = np.unique(keys, return_inverse=True)
    rewards = episodes.numbers("reward")
    several = np.bincount(group[rewarded], minlength=len(groups)) > 1
    lowest, highest = np.full(len(groups), np.inf), np.full(len(groups), -np.inf)
    np.minimum.at(lowest, group[rewarded], rewards[rewarded])
    np.maximum.at(highest, group[rewarded], rewards[rewarded])
    advantages = episodes.numbers("advantage")
    nonzero = ~nulls(episodes.column("advantage")) & (advantages != 0) & ~_has_turn_advantage(episodes)
    bad = nonzero & (several & (lowest == highest))[group]
    episodes.fail_row(bad, "advantage", "exactly 0 where all rewards of a group are equal")
