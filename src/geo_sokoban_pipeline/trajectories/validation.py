"""The trajectory contract as rules, each one a check over whole columns of a table.

`check_episodes` raises for the first broken rule with the column, the trajectory id and the value. No check loops over
episodes: columns are flat arrays with row offsets, unpacked once and shared (`EpisodeTable`), and a position in a flat
array always leads back to its row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Set
from typing import Any, NoReturn, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from geo_sokoban_pipeline.trajectories.arrow import (
    NAMED_COLUMNS,
    Named,
    Ragged,
    count_in_rows,
    find_responses,
    flags,
    list_lengths,
    nulls,
    one_array,
    pick_derived,
)

_NESTED_NULLABLE = frozenset({"turns.action", "turns.reward", "turns.credit", "turns.advantage", "images.path"})
STATUSES = ("completed", "truncated", "aborted", "failed")
ROLES = ("system", "user", "assistant", "tool")
LOG_PROB_SLACK = 1e-6  # float32: the log-prob of a saturated token may come out just above 0
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_CREDIT_TOLERANCE = 1e-6
Check: TypeAlias = "Callable[[EpisodeTable], None]"


class TrajectoryError(ValueError):
    """An episode breaks the trajectory contract.

    Attributes:
        column: name of the column, or of the wrong part of the table.
        trajectory_id: id of the episode; None if the whole table is wrong.
        value: the offending value, or a description of it.
    """

    def __init__(self, column: str, trajectory_id: str | None, value: Any, rule: str) -> None:
        where = "" if trajectory_id is None else f" of trajectory {trajectory_id!r}"
        super().__init__(f"{column}{where} is {value!r}; the contract: {rule}.")
        self.column, self.trajectory_id, self.value = column, trajectory_id, value


def check_episodes(
    table: pa.Table, nullable: Set[str], *, image_pad_id: int, merge_size: int, left_out: Collection[Check] = ()
) -> None:
    """Run every check on a table whose types are already known to be those of the trajectory schema.

    Args:
        table: N episodes.
        nullable: names of the columns that may be null.
        image_pad_id, merge_size: as in the table's context.
        left_out: rules that these episodes need not keep, such as thinned ones.

    Raises:
        TrajectoryError: the first broken rule.
    """
    episodes = EpisodeTable(table, nullable, image_pad_id, merge_size)
    for check in _CHECKS:
        if check not in left_out:
            check(episodes)


class EpisodeTable:
    """A table of episodes with its columns unpacked.

    Args:
        table: types as in the trajectory schema, chunked or not, image bytes dictionary-encoded or not.
        nullable: names of the columns that may be null.
        image_pad_id, merge_size: as in the table's context.

    Attributes:
        token_ids, turns, images, grids: lists of the episodes.
        grid_sizes: of each grid of `grids` its t, h, w.
        responses: (turns of all rows,) bool: the assistant's.
        loss_mask: (tokens of all rows,) int8.
        mask_sums: (tokens + 1,) int64 number of mask-1 tokens before each flat position.
        named: columns of named values.

    Raises:
        TrajectoryError: a field of the contract is null and must not be.
    """

    def __init__(self, table: pa.Table, nullable: Set[str], image_pad_id: int, merge_size: int) -> None:
        self.table = table.unify_dictionaries().combine_chunks()
        self.image_pad_id, self.merge_size = image_pad_id, merge_size
        check_nulls(self, nullable)  # first: unpacked columns do not tell null from empty
        self.token_ids, self.turns = self._lists("token_ids"), self._lists("turns")
        self.images, self.grids = self._lists("images"), self._lists("image_grid_thw")
        self.grid_sizes = Ragged.of(self.grids.values)
        self.responses = find_responses(self.turns)
        self.loss_mask: np.ndarray = self._lists("loss_mask").values
        self.mask_sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.loss_mask, dtype=np.int64)])
        self.named = {name: Named(self.column(name)) for name in NAMED_COLUMNS}

    def _lists(self, name: str) -> Ragged:
        return Ragged.of(self.column(name))

    def column(self, name: str) -> pa.Array:
        """One Arrow array of a column."""
        return one_array(self.table, name)

    def numbers(self, name: str) -> np.ndarray:
        """A top-level number column; NaN where a float is null."""
        return self.column(name).to_numpy(zero_copy_only=False)

    def fail(self, column: str, row: int, value: Any, rule: str) -> NoReturn:
        """Raise for one row."""
        raise TrajectoryError(column, self.column("trajectory_id")[row].as_py(), value, rule)

    def fail_row(self, bad: np.ndarray, column: str, rule: str, value: Callable[[int], Any] | None = None) -> None:
        """Raise for the first flagged row, if any; the message shows `value(row)`, by default the cell."""
        if bad.any():
            row = int(np.argmax(bad))
            self.fail(column, row, self.column(column)[row].as_py() if value is None else value(row), rule)

    def fail_item(
        self,
        bad: np.ndarray,
        column: str,
        items: Ragged,
        rule: str,
        value: Callable[[int, int], Any] | None = None,
    ) -> None:
        """Raise for the first flagged entry of the rows' lists, if any.

        Args:
            value: of an entry, by its flat position and its place in the list; None: the entry itself.
        """
        if bad.any():
            position = int(np.argmax(bad))
            row = items.row_of(position)
            index = position - int(items.offsets[row])
            shown = f"{column}[{index}] = {items.values[position].as_py()}" if value is None else value(position, index)
            self.fail(column, row, shown, rule)

    def fail_token(self, bad: np.ndarray, column: str, values: np.ndarray, rule: str) -> None:
        """Raise for the first flagged token, if any."""
        self.fail_item(bad, column, self.token_ids, rule, lambda at, token: f"{values[at]} at token {token}")


def check_nulls(episodes: EpisodeTable, nullable: Set[str]) -> None:
    """Only nullable fields of the contract are null, at any depth."""
    for name in episodes.table.column_names:
        array = episodes.column(name)
        if array.null_count and name not in nullable:
            episodes.fail_row(nulls(array), name, "never null")
        _check_nested_nulls(episodes, name, array, lambda row: row)


def _check_nested_nulls(episodes: EpisodeTable, path: str, array: pa.Array, to_row: Callable[[int], int]) -> None:
    if pa.types.is_list(array.type):
        children = [(path, array.flatten())]
        outer = to_row
        to_row = lambda position: outer(Ragged.of(array).row_of(position))  # noqa: E731
    elif pa.types.is_struct(array.type):
        children = [(f"{path}.{array.type.field(index).name}", child) for index, child in enumerate(array.flatten())]
    else:
        return
    for name, child in children:
        if child.null_count and name not in _NESTED_NULLABLE:
            position = int(np.argmax(nulls(child)))
            episodes.fail(path.split(".", maxsplit=1)[0], to_row(position), f"null in {name}", "never null")
        _check_nested_nulls(episodes, name, child, to_row)


def check_identity(episodes: EpisodeTable) -> None:
    """Ids are unique and not empty, the status is known, `sampling` and each turn's `info` are JSON objects."""
    counts = pc.value_counts(episodes.column("trajectory_id"))
    for entry in counts.filter(pc.greater(counts.field("counts"), 1))[:1].to_pylist():
        raise TrajectoryError("trajectory_id", entry["values"], f"{entry['counts']} rows' id", "ids are unique")
    for name in ("trajectory_id", "task", "task_id"):
        episodes.fail_row(flags(pc.equal(episodes.column(name), "")), name, "not empty")
    known = pc.is_in(episodes.column("status"), pa.array(STATUSES))
    episodes.fail_row(~flags(known), "status", f"one of {', '.join(STATUSES)}")
    episodes.fail_row(~_is_object(episodes.column("sampling")), "sampling", "a JSON object")
    turns = episodes.turns
    episodes.fail_item(~_is_object(turns.values.field("info")), "turns", turns, "info is a JSON object")


def _is_object(text: pa.Array) -> np.ndarray:
    # The braces only: parsing every turn's text would take longer than all other rules together.
    return flags(pc.and_(pc.starts_with(text, "{"), pc.ends_with(text, "}")))


def check_outcome(episodes: EpisodeTable) -> None:
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


def _has_turn_advantage(episodes: EpisodeTable) -> np.ndarray:
    credited = np.zeros(episodes.table.num_rows, bool)
    credited[episodes.turns.rows[~nulls(episodes.turns.values.field("advantage"))]] = True
    return credited


def check_group_advantages(episodes: EpisodeTable) -> None:
    """If all rewards of a group are equal, its advantages are exactly 0.

    Single rewards are exempt, because they may be one episode of a larger group, and so is turn credit.
    """
    rewarded = ~nulls(episodes.column("reward"))
    if not rewarded.any():
        return
    # Both have 32 bits: unique single numbers are found several times faster than unique pairs.
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


def check_named_values(episodes: EpisodeTable) -> None:
    """Reward parts, metrics and timings are finite and strictly sorted by name."""
    for column, named in episodes.named.items():
        items, codes = named.items, named.codes
        episodes.fail_item(~np.isfinite(named.numbers), column, items, "values are finite")
        bad = np.append(False, (codes[1:] <= codes[:-1]) & (items.rows[1:] == items.rows[:-1]))
        episodes.fail_item(bad, column, items, "sorted by name, no name twice")


def check_value_columns(episodes: EpisodeTable) -> None:
    """`success`, `optimal_steps` and the reward parts equal the lists' values of their name, null where there is none;
    `n_turns` counts the assistant turns.
    """
    sources = {"success": "metrics.success >= 0.5", "optimal_steps": "metrics.optimal_steps"}
    for name, wanted in pick_derived(episodes.named["metrics"], episodes.named["reward_parts"]).items():
        _compare(episodes, name, wanted, sources.get(name, f"reward_parts.{name}"))
    counts = count_in_rows(episodes.responses, episodes.turns)
    episodes.fail_row(episodes.numbers("n_turns") != counts, "n_turns", "the number of assistant turns")


def _compare(episodes: EpisodeTable, column: str, wanted: np.ndarray | None, source: str) -> None:
    array = episodes.column(column)
    if wanted is None and array.null_count == len(array):
        return  # most parts belong to other tasks
    numbers = array.cast(pa.int8()) if pa.types.is_boolean(array.type) else array
    found = numbers.to_numpy(zero_copy_only=False)  # null becomes NaN
    values = np.full(len(found), np.nan) if wanted is None else wanted
    bad = found != values
    if bad.any():
        bad &= ~(np.isnan(found) & np.isnan(values))
    episodes.fail_row(bad, column, f"equal to {source}, null where that is unknown")


def check_credits(episodes: EpisodeTable) -> None:
    """Only responses have credit, and it adds up to the episode's reward."""
    turns = episodes.turns
    field = turns.values.field("credit")
    given = ~nulls(field)
    if not given.any():
        return
    episodes.fail_item(given & ~episodes.responses, "turns", turns, "credit is of assistant turns")
    credited = count_in_rows(given, turns) > 0
    total = np.bincount(turns.rows[given], field.to_numpy(zero_copy_only=False)[given], minlength=len(credited))
    rewards = episodes.numbers("reward")
    is_equal = np.abs(total - rewards) <= _CREDIT_TOLERANCE * np.maximum(1.0, np.abs(rewards))
    episodes.fail_row(
        credited & ~is_equal,
        "turns",
        "the credit of an episode's turns adds up to its reward",
        lambda row: f"credit of {total[row]} in total, reward {rewards[row]}",
    )


def check_lengths(episodes: EpisodeTable) -> None:
    """Ids, mask and log-probs of every kind are equally long; the prompt lies within them."""
    lengths = episodes.token_ids.lengths
    for name in ("loss_mask", "rollout_log_probs", "old_log_probs", "ref_log_probs"):
        column = episodes.column(name)
        if column.null_count == len(column):
            continue
        found = list_lengths(column)
        text = lambda row, found=found: f"{found[row]} entries for {lengths[row]} token_ids"  # noqa: E731
        episodes.fail_row((found != lengths) & ~nulls(column), name, "as long as token_ids", text)
    prompt = episodes.numbers("prompt_length")
    episodes.fail_row((prompt < 0) | (prompt > lengths), "prompt_length", "from 0 to the number of token_ids")


def check_mask(episodes: EpisodeTable) -> None:
    """The mask is 0 or 1, and 0 in the prompt."""
    mask = episodes.loss_mask
    episodes.fail_token((mask != 0) & (mask != 1), "loss_mask", mask, "0 or 1")
    starts = episodes.token_ids.offsets[:-1]
    early = episodes.mask_sums[starts + episodes.numbers("prompt_length")] - episodes.mask_sums[starts]
    episodes.fail_row(early > 0, "loss_mask", "0 before prompt_length", lambda row: f"1 on {early[row]} prompt tokens")


def check_log_probs(episodes: EpisodeTable) -> None:
    """Rollout log-probs are exactly 0.0 off the mask; every kind is finite and at most 1e-6 on it."""
    off = episodes.loss_mask == 0
    for name in ("rollout_log_probs", "old_log_probs", "ref_log_probs"):
        column = episodes.column(name)
        values = Ragged.of(column).values
        if name == "rollout_log_probs":
            episodes.fail_token(off & (values != 0), name, values, "exactly 0.0 where loss_mask is 0")
        elif column.null_count == len(column):
            continue
        elif column.null_count:
            whole = np.zeros(len(off), values.dtype)
            whole[np.repeat(~nulls(column), episodes.token_ids.lengths)] = values
            values = whole
        inside = (values <= LOG_PROB_SLACK) & (values > -np.inf)  # false for NaN too
        episodes.fail_token(~off & ~inside, name, values, "finite and at most 1e-6 where loss_mask is 1")


def check_images(episodes: EpisodeTable) -> None:
    """Images are PNG files with one grid of three positive sizes each."""
    images, grids, sizes = episodes.images, episodes.grids, episodes.grid_sizes
    signed = _starts_as_png(images.values.field("bytes"))
    episodes.fail_row(_any_in_row(~signed, images), "images", "PNG files", lambda row: "other bytes than a PNG's")
    episodes.fail_row(
        grids.lengths != images.lengths,
        "image_grid_thw",
        "one grid per image",
        lambda row: f"{grids.lengths[row]} grids for {images.lengths[row]} images",
    )
    episodes.fail_row(_any_in_row(sizes.lengths != 3, grids), "image_grid_thw", "three sizes t, h, w per image")
    positive = (sizes.values.reshape(-1, 3) > 0).all(axis=1)
    episodes.fail_row(_any_in_row(~positive, grids), "image_grid_thw", "positive sizes")


def _starts_as_png(data: pa.Array) -> np.ndarray:
    if pa.types.is_dictionary(data.type):
        return _starts_as_png(data.dictionary)[data.indices.to_numpy(zero_copy_only=False)]
    return flags(pc.equal(pc.binary_slice(data, 0, len(PNG_SIGNATURE)), pa.scalar(PNG_SIGNATURE, pa.binary())))


def _any_in_row(bad: np.ndarray, items: Ragged) -> np.ndarray:
    return np.bincount(items.rows[bad], minlength=len(items.lengths)) > 0


def check_image_pads(episodes: EpisodeTable) -> None:
    """The number of image pads equals the sum of t·h·w / merge_size² over the grids."""
    ids, grids = episodes.token_ids, episodes.grids
    found = np.diff(np.searchsorted(np.flatnonzero(ids.values == episodes.image_pad_id), ids.offsets))
    patches = episodes.grid_sizes.values.reshape(-1, 3).astype(np.int64).prod(axis=1)
    total = np.bincount(grids.rows, weights=patches, minlength=len(ids.lengths))  # float64: exact below 2**53
    expected = total / episodes.merge_size**2
    episodes.fail_row(
        found != expected,
        "token_ids",
        "sum of t*h*w / merge_size**2 image pads",
        lambda row: f"{found[row]} image pads, {expected[row]:g} by image_grid_thw",
    )


def check_turns(episodes: EpisodeTable) -> None:
    """Turns are in order, do not overlap and lie within the tokens; roles, numbers and image indices are sound."""
    turns = episodes.turns
    _check_order(episodes, "turns", turns, "token_start", "token_end")
    known = pc.is_in(turns.values.field("role"), pa.array(ROLES))
    episodes.fail_item(~flags(known), "turns", turns, f"role is one of {', '.join(ROLES)}")
    for name in ("reward", "credit", "advantage"):
        field = turns.values.field(name)
        bad = ~nulls(field) & ~np.isfinite(field.to_numpy(zero_copy_only=False))
        episodes.fail_item(bad, "turns", turns, f"{name} is finite or null")
    indices = Ragged.of(turns.values.field("image_indices"))
    available = episodes.images.lengths[turns.rows][indices.rows]
    bad = np.zeros(len(turns.values), bool)
    bad[indices.rows[(indices.values < 0) | (indices.values >= available)]] = True
    episodes.fail_item(bad, "turns", turns, "image_indices point into images")


def _check_order(episodes: EpisodeTable, column: str, spans: Ragged, start: str, end: str) -> None:
    starts, ends = bounds(spans, start, end)
    limit = episodes.token_ids.lengths[spans.rows]
    inside = (starts >= 0) & (starts <= ends) & (ends <= limit)
    episodes.fail_item(~inside, column, spans, f"0 <= {start} <= {end} <= number of token_ids")
    same = spans.rows[1:] == spans.rows[:-1]
    episodes.fail_item(np.append(False, same & (starts[1:] < ends[:-1])), column, spans, "in order, no overlap")


def bounds(spans: Ragged, start: str, end: str) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of each span within its episode, int64."""
    first, last = (spans.values.field(name).to_numpy(zero_copy_only=False).astype(np.int64) for name in (start, end))
    return first, last


def check_generated_runs(episodes: EpisodeTable) -> None:
    """Each run of mask-1 tokens lies in one assistant turn."""
    turns = episodes.turns
    starts, ends = bounds(turns, "token_start", "token_end")
    base = episodes.token_ids.offsets[turns.rows]
    assistant = episodes.responses
    inside = np.where(assistant, episodes.mask_sums[base + ends] - episodes.mask_sums[base + starts], 0)
    covered, total = _count_covered(episodes, turns, inside)
    episodes.fail_row(
        covered != total,
        "loss_mask",
        "1 only within assistant turns",
        lambda row: f"1 on {int(total[row] - covered[row])} tokens outside assistant turns",
    )
    # Two assistant turns may adjoin; a run across the border would lie in both.
    border = assistant & (ends > starts) & (ends > 0) & (ends < episodes.token_ids.lengths[turns.rows])
    before = (base + ends - 1)[border]
    crossing = np.zeros(len(border), bool)
    crossing[border] = (episodes.loss_mask[before] == 1) & (episodes.loss_mask[before + 1] == 1)
    episodes.fail_item(crossing, "turns", turns, "each run of generated tokens lies in one assistant turn")


def _count_covered(episodes: EpisodeTable, spans: Ragged, inside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows,) generated tokens that lie in spans, of which each holds `inside` many, and all of them."""
    offsets = episodes.token_ids.offsets
    covered = np.bincount(spans.rows, weights=inside, minlength=len(offsets) - 1)
    return covered, episodes.mask_sums[offsets[1:]] - episodes.mask_sums[offsets[:-1]]


def check_weight_spans(episodes: EpisodeTable) -> None:
    """Weight spans are in order, do not overlap, and every generated token has its weights."""
    spans = Ragged.of(episodes.column("weight_spans"))
    _check_order(episodes, "weight_spans", spans, "start", "end")
    starts, ends = bounds(spans, "start", "end")
    base = episodes.token_ids.offsets[spans.rows]
    covered, total = _count_covered(
        episodes, spans, episodes.mask_sums[base + ends] - episodes.mask_sums[base + starts]
    )
    episodes.fail_row(
        covered != total,
        "weight_spans",
        "every generated token lies in a span",
        lambda row: f"{int(covered[row])} of {total[row]} generated tokens covered",
    )


_CHECKS: tuple[Check, ...] = (
    check_identity,
    check_outcome,
    check_named_values,
    check_value_columns,
    check_lengths,
    check_mask,
    check_log_probs,
    check_images,
    check_image_pads,
    check_turns,
    check_credits,
    check_generated_runs,
    check_weight_spans,
    check_group_advantages,
)
