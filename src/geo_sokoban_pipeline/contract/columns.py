"""Columns of episodes as flat arrays with row offsets, each made once and shared by all checks.

A position in a flat array always leads back to its row, so that whatever a check finds is reported by trajectory id.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_NESTED_NULLABLE = frozenset({"turns.action", "turns.reward", "turns.credit", "turns.advantage", "images.path"})


class TrajectoryError(ValueError):
    """An episode breaks the trajectory contract.

    Attributes:
        column: name of the column, or of the part of the table that is wrong.
        trajectory_id: id of the episode; None where the whole table is wrong.
        value: the offending value, or a description of it.
    """

    def __init__(self, column: str, trajectory_id: str | None, value: Any, rule: str) -> None:
        where = "" if trajectory_id is None else f" of trajectory {trajectory_id!r}"
        super().__init__(f"{column}{where} is {value!r}; the contract: {rule}.")
        self.column, self.trajectory_id, self.value = column, trajectory_id, value


@dataclass(frozen=True)
class Ragged:
    """Lists of unequal length: `values` of all rows one after the other, row i at `offsets[i]:offsets[i + 1]`."""

    values: Any
    offsets: np.ndarray

    @classmethod
    def of(cls, column: pa.Array) -> Ragged:
        """From a list array; a null list counts as empty. Numbers become numpy, everything else stays Arrow."""
        values = column.flatten()
        numeric = pa.types.is_integer(values.type) or pa.types.is_floating(values.type)
        return cls(values.to_numpy(zero_copy_only=False) if numeric else values, _offsets(column))

    @property
    def lengths(self) -> np.ndarray:
        """(rows,) int64."""
        return np.diff(self.offsets)

    @cached_property
    def rows(self) -> np.ndarray:
        """(values,) int64 row of each value; for short lists such as turns, too slow for tokens."""
        return np.repeat(np.arange(len(self.offsets) - 1), self.lengths)

    @property
    def starts(self) -> np.ndarray:
        """(values,) int64 flat position at which the row of each value starts."""
        return self.offsets[self.rows]

    def row_of(self, position: int) -> int:
        """Row that holds a flat position."""
        return int(np.searchsorted(self.offsets, position, side="right")) - 1


class Named:
    """Values by name, of one column of lists of (name, value)."""

    def __init__(self, column: pa.Array) -> None:
        self.items = Ragged.of(column)
        self.numbers: np.ndarray = self.items.values.field("value").to_numpy(zero_copy_only=False)

    @cached_property
    def _encoded(self) -> tuple[dict[str, int], np.ndarray]:
        names = self.items.values.field("name")
        names = names if pa.types.is_dictionary(names.type) else names.dictionary_encode()
        texts = names.dictionary.to_pylist()
        ranks = {text: rank for rank, text in enumerate(sorted(set(texts)))}
        codes = np.array([ranks[text] for text in texts], np.int32)
        return ranks, codes[names.indices.to_numpy(zero_copy_only=False)] if texts else np.zeros(0, np.int32)

    @property
    def codes(self) -> np.ndarray:
        """(values,) int32 number of each value's name; the numbers are ordered as the names are.

        Names are few and repeat in every row: comparing numbers is several times quicker than comparing texts.
        """
        return self._encoded[1]

    def pick(self, name: str) -> np.ndarray | None:
        """(rows,) float64 value of a name, NaN in rows that have none; None where no row has it."""
        ranks, codes = self._encoded
        if name not in ranks:
            return None
        found = np.full(len(self.items.offsets) - 1, np.nan)
        places = np.flatnonzero(codes == ranks[name])
        found[self.items.rows[places]] = self.numbers[places]
        return found


class Episodes:
    """A table of episodes, its columns unpacked on first use.

    Args:
        table: types as in the trajectory schema, chunked or not, image bytes dictionary-encoded or not.
        image_pad_id, merge_size: as in the table's context.
    """

    def __init__(self, table: pa.Table, image_pad_id: int, merge_size: int) -> None:
        self.table = table.unify_dictionaries().combine_chunks()
        self.image_pad_id, self.merge_size = image_pad_id, merge_size
        self._named: dict[str, Named] = {}

    def column(self, name: str) -> pa.Array:
        """One Arrow array of a column."""
        return one_array(self.table, name)

    def numbers(self, name: str) -> np.ndarray:
        """A top-level number column; NaN where a float is null."""
        values: np.ndarray = self.column(name).to_numpy(zero_copy_only=False)
        return values

    def named(self, name: str) -> Named:
        """A column of named values, unpacked on first use."""
        if name not in self._named:
            self._named[name] = Named(self.column(name))
        return self._named[name]

    @cached_property
    def token_ids(self) -> Ragged:
        return Ragged.of(self.column("token_ids"))

    @cached_property
    def loss_mask(self) -> np.ndarray:
        """(tokens of all rows,) int8."""
        mask: np.ndarray = Ragged.of(self.column("loss_mask")).values
        return mask

    @cached_property
    def mask_sums(self) -> np.ndarray:
        """(tokens + 1,) int64 number of mask-1 tokens before each flat position."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.loss_mask, dtype=np.int64)])

    @cached_property
    def turns(self) -> Ragged:
        return Ragged.of(self.column("turns"))

    @cached_property
    def replies(self) -> np.ndarray:
        """(turns of all rows,) bool: the assistant's."""
        return find_replies(self.turns)

    @cached_property
    def images(self) -> Ragged:
        return Ragged.of(self.column("images"))

    @cached_property
    def grids(self) -> Ragged:
        return Ragged.of(self.column("image_grid_thw"))

    @cached_property
    def grid_sizes(self) -> Ragged:
        """Of each grid of `grids` its t, h, w."""
        return Ragged.of(self.grids.values)

    def fail(self, column: str, row: int, value: Any, rule: str) -> NoReturn:
        """Raise for one row."""
        raise TrajectoryError(column, self.column("trajectory_id")[row].as_py(), value, rule)

    def fail_row(self, bad: np.ndarray, column: str, rule: str, value: Callable[[int], Any] | None = None) -> None:
        """Raise for the first flagged row, if any; `value(row)` is what the message shows, by default the cell."""
        if bad.any():
            row = int(np.argmax(bad))
            self.fail(column, row, self.column(column)[row].as_py() if value is None else value(row), rule)

    def fail_token(self, bad: np.ndarray, column: str, values: np.ndarray, rule: str) -> None:
        """Raise for the first flagged token, if any."""
        if bad.any():
            position = int(np.argmax(bad))
            row = self.token_ids.row_of(position)
            token = position - int(self.token_ids.offsets[row])
            self.fail(column, row, f"{values[position]} at token {token}", rule)

    def fail_item(self, bad: np.ndarray, column: str, items: Ragged, rule: str) -> None:
        """Raise for the first flagged entry of a list of structs, if any."""
        if bad.any():
            position = int(np.argmax(bad))
            row = int(items.rows[position])
            index = position - int(items.offsets[row])
            self.fail(column, row, f"{column}[{index}] = {items.values[position].as_py()}", rule)


def check_nulls(episodes: Episodes, nullable: Set[str]) -> None:
    """Nothing is null but what the contract marks so, at any depth."""
    for name in episodes.table.column_names:
        array = episodes.column(name)
        if array.null_count and name not in nullable:
            episodes.fail_row(nulls(array), name, "never null")
        _check_nested_nulls(episodes, name, array, lambda row: row)


def _check_nested_nulls(episodes: Episodes, path: str, array: pa.Array, to_row: Callable[[int], int]) -> None:
    if pa.types.is_list(array.type):
        children = [(path, array.flatten())]
        outer = to_row
        to_row = lambda position: outer(Ragged.of(array).row_of(position))  # noqa: E731
    elif pa.types.is_struct(array.type):
        flat = array.flatten()
        children = [(f"{path}.{array.type.field(index).name}", child) for index, child in enumerate(flat)]
    else:
        return
    for name, child in children:
        if child.null_count and name not in _NESTED_NULLABLE:
            position = int(np.argmax(nulls(child)))
            episodes.fail(path.split(".", maxsplit=1)[0], to_row(position), f"null in {name}", "never null")
        _check_nested_nulls(episodes, name, child, to_row)


def find_replies(turns: Ragged) -> np.ndarray:
    """(turns of all rows,) bool: the assistant's."""
    return flags(pc.equal(turns.values.field("role"), "assistant"))


def list_lengths(column: pa.Array) -> np.ndarray:
    """(rows,) int64 length of each list; a null list counts as empty."""
    return np.diff(_offsets(column))


def _offsets(column: pa.Array) -> np.ndarray:
    if column.null_count:
        lengths = pc.fill_null(column.value_lengths(), 0).to_numpy(zero_copy_only=False)
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    stored: np.ndarray = column.offsets.to_numpy().astype(np.int64)
    return stored - stored[0]


def one_array(table: pa.Table, name: str) -> pa.Array:
    """A column as one array, whatever its chunks; dictionaries of the chunks must be equal."""
    chunks = table.column(name)
    return chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()


def nulls(array: pa.Array) -> np.ndarray:
    """(N,) bool: where an array is null."""
    if not array.null_count:
        return np.zeros(len(array), bool)
    flags: np.ndarray = array.is_null().to_numpy(zero_copy_only=False)
    return flags


def flags(array: pa.Array) -> np.ndarray:
    """(N,) bool: a boolean array with null as False."""
    filled = pc.fill_null(array, False) if array.null_count else array
    values: np.ndarray = filled.to_numpy(zero_copy_only=False)
    return values
