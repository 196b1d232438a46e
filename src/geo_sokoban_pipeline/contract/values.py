"""Rules on named values (metrics, reward parts, timings), on the columns that repeat some of them, and on credit.

A column that repeats a list equals it bit for bit, so a query may use either.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from geo_sokoban_pipeline.contract.columns import Episodes, Ragged, nulls

# Parts that the rewards of this project give; parts of a reward of one's own are in `reward_parts` alone, unless they
# have one of these names. A fixed set, because all files of all tasks share one schema.
PART_COLUMNS = ("correct", "distance_delta", "final_bonus", "format", "turn_reward_avg", "turn_reward_total")
SOLVED = 0.5  # least value of the metric `success` that counts as solved
_CREDIT_TOLERANCE = 1e-6


def check_named_values(episodes: Episodes) -> None:
    """Reward parts, metrics and timings are finite and strictly sorted by name."""
    for column in ("reward_parts", "metrics", "timings"):
        named = episodes.named(column)
        items, codes = named.items, named.codes
        episodes.fail_item(~np.isfinite(named.numbers), column, items, "values are finite")
        bad = np.zeros(len(codes), bool)
        bad[1:] = (codes[1:] <= codes[:-1]) & (items.rows[1:] == items.rows[:-1])
        episodes.fail_item(bad, column, items, "sorted by name, no name twice")


def check_value_columns(episodes: Episodes) -> None:
    """`success`, `optimal_steps` and the reward parts equal the lists' values of their name, null where there is none;
    `n_turns` counts the assistant turns.
    """
    metrics, parts = episodes.named("metrics"), episodes.named("reward_parts")
    success = metrics.pick("success")
    solved = None if success is None else np.where(np.isnan(success), success, success >= SOLVED)
    _compare(episodes, "success", solved, "metrics.success >= 0.5")
    _compare(episodes, "optimal_steps", metrics.pick("optimal_steps"), "metrics.optimal_steps")
    for name in PART_COLUMNS:
        _compare(episodes, name, parts.pick(name), f"reward_parts.{name}")
    counts = count_in_rows(episodes.replies, episodes.turns)
    episodes.fail_row(episodes.numbers("n_turns") != counts, "n_turns", "the number of assistant turns")


def count_in_rows(flagged: np.ndarray, items: Ragged) -> np.ndarray:
    """(rows,) int64 number of flagged entries."""
    before = np.zeros(len(flagged) + 1, np.int64)
    np.cumsum(flagged, out=before[1:])
    counts: np.ndarray = np.diff(before[items.offsets])
    return counts


def _compare(episodes: Episodes, column: str, wanted: np.ndarray | None, source: str) -> None:
    array = episodes.column(column)
    if wanted is None and array.null_count == len(array):
        return  # most parts are of other tasks
    numbers = array.cast(pa.int8()) if pa.types.is_boolean(array.type) else array
    found = numbers.to_numpy(zero_copy_only=False)  # null becomes NaN
    values = np.full(len(found), np.nan) if wanted is None else wanted
    bad = found != values
    if bad.any():
        bad &= ~(np.isnan(found) & np.isnan(values))
    episodes.fail_row(bad, column, f"equal to {source}, null where that is unknown")


def check_credits(episodes: Episodes) -> None:
    """Where turns have credit, only replies have it, and it adds up to the episode's reward."""
    turns = episodes.turns
    field = turns.values.field("credit")
    given = ~nulls(field)
    if not given.any():
        return
    episodes.fail_item(given & ~episodes.replies, "turns", turns, "credit is of assistant turns")
    credited = count_in_rows(given, turns) > 0
    credit = field.to_numpy(zero_copy_only=False)[given]
    total = np.bincount(turns.rows[given], credit, minlength=len(credited))
    rewards = episodes.numbers("reward")
    gap = np.abs(total - rewards)
    bad = credited & ~(gap <= _CREDIT_TOLERANCE * np.maximum(1.0, np.abs(rewards)))
    text = lambda row: f"credit of {total[row]} in all, reward {rewards[row]}"  # noqa: E731
    episodes.fail_row(bad, "turns", "the credit of an episode's turns adds up to its reward", text)
