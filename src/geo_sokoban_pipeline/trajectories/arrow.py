"""Columns of episodes between Python values, Arrow arrays and flat numpy arrays with row offsets.

Each reader inverts its builder bit for bit. Equal image bytes are stored once per column (dictionary encoding).
`Ragged` and `Named` are the views of built columns that checks and reports compute on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from geo_sokoban_pipeline.formats import type_name

# Parts that the rewards of this project give; parts of a reward of one's own are in `reward_parts` alone, unless they
# have one of these names. A fixed set, because all files of all tasks share one schema.
PART_COLUMNS = ("correct", "distance_delta", "final_bonus", "format", "turn_reward_avg", "turn_reward_total")
SOLVED = 0.5  # least value of the metric `success` that counts as solved
Spans = list[tuple[int, int, int]]
NAMED_COLUMNS = ("reward_parts", "metrics", "timings")
DERIVED_COLUMNS = ("success", "n_turns", "optimal_steps", *PART_COLUMNS)  # each repeats a value of a list


def build_column(name: str, values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Arrow array of one column; its type is `kind`, but image bytes and names of values are dictionary-encoded."""
    return _BUILDERS.get(name, pa.array)(values, kind)


def read_column(name: str, array: pa.Array) -> list[Any]:
    """Python values of one column, one per row; turns come as dicts of their fields."""
    if name not in _READERS:
        return array.to_pylist()
    ragged = Ragged.of(array)
    rows = _split(_READERS[name](ragged.values), ragged.offsets)
    if array.null_count:
        rows = [row if valid else None for row, valid in zip(rows, array.is_valid().to_pylist(), strict=True)]
    return [dict(row) for row in rows] if name in NAMED_COLUMNS else rows


def gather_columns(items: Iterable[Any], names: Sequence[str]) -> list[tuple[Any, ...]]:
    """Values of each attribute over all items.

    Each item is read in one call: one look-up per name and item would be a fifth of the writing.
    """
    return list(zip(*map(attrgetter(*names), items), strict=True)) or [()] * len(names)


def derive_columns(metrics: pa.Array, parts: pa.Array, turns: pa.Array) -> dict[str, pa.Array]:
    """The columns of `DERIVED_COLUMNS`, from the built columns that they repeat."""
    known, spoken = pick_derived(Named(metrics), Named(parts)), Ragged.of(turns)
    count = len(spoken.offsets) - 1
    kinds = {"success": pa.bool_(), "optimal_steps": pa.int32()}
    built = {name: _build_known(values, count, kinds.get(name, pa.float64())) for name, values in known.items()}
    return built | {"n_turns": pa.array(count_in_rows(find_responses(spoken), spoken), pa.int32())}


def pick_derived(metrics: Named, parts: Named) -> dict[str, np.ndarray | None]:
    """(rows,) float64 values of the columns of `DERIVED_COLUMNS`, without the number of turns.

    NaN where a row has none; None: no row has one.
    """
    success = metrics.pick("success")
    solved = None if success is None else np.where(np.isnan(success), success, success >= SOLVED)
    given = {name: parts.pick(name) for name in PART_COLUMNS}
    return {"success": solved, "optimal_steps": metrics.pick("optimal_steps"), **given}


def _build_known(values: np.ndarray | None, count: int, kind: pa.DataType) -> pa.Array:
    # Most of these columns are empty: a task has only some of the parts.
    if values is None:
        return pa.nulls(count, kind)
    missing = np.isnan(values)
    if not pa.types.is_floating(kind):
        # A number that does not fit changes here; the check of the column reports it.
        with np.errstate(invalid="ignore"):
            values = np.where(missing, 0, values).astype(kind.to_pandas_dtype())
    return pa.array(values, kind, mask=missing)


def decode_names(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """A built column of `NAMED_COLUMNS` as tables hold it: of type `kind`, names as plain texts."""
    names, values = array.values.field("name"), array.values.field("value")
    structs = pa.StructArray.from_arrays([names.dictionary_decode(), values], fields=list(kind.value_type))
    return pa.ListArray.from_arrays(array.offsets, structs, type=kind)


def _lists(lengths: Iterable[int], values: pa.Array, kind: pa.DataType, missing: list[bool] | None = None) -> pa.Array:
    counts = lengths if isinstance(lengths, np.ndarray) else np.fromiter(lengths, np.int64)
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    mask = pa.array(missing) if missing is not None and any(missing) else None
    return pa.ListArray.from_arrays(pa.array(offsets), values, type=kind, mask=mask)


def _build_numbers(values: Sequence[np.ndarray | None], kind: pa.DataType) -> pa.Array:
    parts = [np.asarray(value) for value in values if value is not None]
    dtype = kind.value_type.to_pandas_dtype()
    flat = np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)
    lengths = (0 if value is None else len(value) for value in values)
    return _lists(lengths, pa.array(flat, kind.value_type), kind, [value is None for value in values])


def _build_integers(rows: Sequence[Sequence[Sequence[int]]], width: int) -> np.ndarray:
    # Flattened to numbers first: NumPy looks for a shape in every tuple of a list of tuples.
    return np.fromiter(chain.from_iterable(chain.from_iterable(rows)), np.int32).reshape(-1, width)


def _build_weight_spans(values: Sequence[Spans], kind: pa.DataType) -> pa.Array:
    flat = _build_integers(values, 3)
    columns = [pa.array(np.ascontiguousarray(flat[:, index])) for index in range(3)]
    return _lists(map(len, values), pa.StructArray.from_arrays(columns, fields=list(kind.value_type)), kind)


def _build_grids(values: Sequence[list[tuple[int, int, int]]], kind: pa.DataType) -> pa.Array:
    flat = _build_integers(values, 3)
    return _lists(map(len, values), _lists(np.full(len(flat), 3), pa.array(flat.reshape(-1)), kind.value_type), kind)


def _build_named(values: Sequence[dict[str, float]], kind: pa.DataType) -> pa.Array:
    # Many rows share few sets of names: each set is sorted once, and the names are stored once.
    sets: dict[tuple[str, ...], int] = {}
    chosen = np.array([sets.setdefault(tuple(value), len(sets)) for value in values], np.intp)
    orders = [sorted(names) for names in sets]
    places: dict[str, int] = {name: place for place, name in enumerate(sorted(set(chain.from_iterable(orders))))}
    lengths = np.array([len(order) for order in orders], np.int64)[chosen] if orders else np.zeros(0, np.int64)
    codes = np.full((len(orders), max(map(len, orders), default=0)), -1, np.int32)
    for row, order in zip(codes, orders, strict=True):
        row[: len(order)] = [places[name] for name in order]
    indices = codes[chosen].reshape(-1)
    indices = indices[indices >= 0]
    getters = [_get_all(order) for order in orders]
    rows = [getters[index](value) for index, value in zip(chosen.tolist(), values, strict=True)]
    numbers = np.fromiter(chain.from_iterable(rows), np.float64, len(indices))
    names = pa.DictionaryArray.from_arrays(pa.array(indices), pa.array(list(places), pa.string()))
    fields = [pa.field("name", names.type), kind.value_type.field("value")]
    structs = pa.StructArray.from_arrays([names, pa.array(numbers)], fields=fields)
    return _lists(lengths, structs, pa.list_(pa.field("element", structs.type)))


def _get_all(names: Sequence[str]) -> Callable[[dict[str, float]], Sequence[float]]:
    # For one name `itemgetter` does not give a tuple.
    return itemgetter(*names) if len(names) > 1 else lambda value: [value[name] for name in names]


def _build_turns(values: Sequence[list[Any]], kind: pa.DataType) -> pa.Array:
    fields = list(kind.value_type)
    columns = gather_columns(chain.from_iterable(values), [spec.name for spec in fields])
    children = []
    for spec, cells in zip(fields, columns, strict=True):
        if spec.name == "image_indices":
            flat = np.fromiter(chain.from_iterable(cells), np.int32)
            children.append(_lists(map(len, cells), pa.array(flat), spec.type))
        else:
            children.append(pa.array(_to_texts(cells) if spec.name == "info" else cells, spec.type))
    return _lists(map(len, values), pa.StructArray.from_arrays(children, fields=fields), kind)


def _build_images(values: Sequence[list[bytes]], kind: pa.DataType) -> pa.Array:
    flat = list(chain.from_iterable(values))
    places = {image: place for place, image in enumerate(dict.fromkeys(flat))}
    indices = np.fromiter(map(places.__getitem__, flat), np.int32, len(flat))
    data = pa.DictionaryArray.from_arrays(pa.array(indices), pa.array(list(places), pa.binary()))
    fields = [pa.field("bytes", data.type), pa.field("path", pa.string())]
    structs = pa.StructArray.from_arrays([data, pa.nulls(len(indices), pa.string())], fields=fields)
    return _lists(map(len, values), structs, pa.list_(pa.field("element", structs.type)))


def _to_native(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"turn info holds {type_name(value)} ({value!r}); only JSON values can be stored")


_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False, default=_to_native).encode
_PLAIN = orjson.OPT_SORT_KEYS | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME


def to_json(value: dict[str, Any]) -> bytes:
    """JSON of a turn's info as it is stored: sorted by name, numbers of NumPy as plain ones.

    Raises:
        TypeError, ValueError: a value is not JSON, NaN included.
    """
    try:
        text = orjson.dumps(value, option=_PLAIN)
    except TypeError:  # NumPy's numbers among them, which orjson would round
        return _encode(value).encode()
    # orjson writes NaN as null; the slower encoder raises, because NaN must not be stored.
    return _encode(value).encode() if b"null" in text else text


def _to_texts(cells: Sequence[dict[str, Any]]) -> list[bytes]:
    # Turns with equal info may share one dict, which is then encoded once. A dict has no hash; `cells` keeps all of
    # them alive, so their ids are unique.
    different = {id(cell): cell for cell in cells if cell}
    texts = {name: to_json(cell) for name, cell in different.items()}
    return [texts[id(cell)] if cell else b"{}" for cell in cells]


_NUMBER_COLUMNS = ("token_ids", "loss_mask", "rollout_log_probs", "old_log_probs", "ref_log_probs")
_BUILDERS: dict[str, Callable[[Sequence[Any], pa.DataType], pa.Array]] = {
    **dict.fromkeys(_NUMBER_COLUMNS, _build_numbers),
    **dict.fromkeys(NAMED_COLUMNS, _build_named),
    "sampling": lambda values, kind: pa.array([v if isinstance(v, str) else to_json(v) for v in values], kind),
    "weight_spans": _build_weight_spans,
    "turns": _build_turns,
    "images": _build_images,
    "image_grid_thw": _build_grids,
}


def _split(flat: Any, offsets: np.ndarray) -> list[Any]:
    return [flat[start:end] for start, end in pairwise(offsets.tolist())]


def _read_fields(structs: pa.StructArray, *names: str) -> list[tuple[Any, ...]]:
    return list(zip(*(structs.field(name).to_pylist() for name in names), strict=True))


def _read_turns(structs: pa.StructArray) -> list[dict[str, Any]]:
    names = [spec.name for spec in structs.type]
    turns = [dict(zip(names, cells, strict=True)) for cells in _read_fields(structs, *names)]
    return [turn | {"info": json.loads(turn["info"])} for turn in turns]


def _read_images(structs: pa.StructArray) -> list[bytes]:
    data = structs.field("bytes")
    if not pa.types.is_dictionary(data.type):
        data = data.dictionary_encode()
    unique = data.dictionary.to_pylist()
    return [unique[index] for index in data.indices.to_pylist()]


# Values of all rows of a column, one after the other.
_READERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(_NUMBER_COLUMNS, np.copy),
    **dict.fromkeys(NAMED_COLUMNS, lambda structs: _read_fields(structs, "name", "value")),
    "weight_spans": lambda structs: _read_fields(structs, "version", "start", "end"),
    "turns": _read_turns,
    "images": _read_images,
    "image_grid_thw": lambda lists: list(map(tuple, lists.to_pylist())),
}


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
        """(rows,) float64 value of a name, NaN in rows without it; None if no row has it."""
        ranks, codes = self._encoded
        if name not in ranks:
            return None
        found = np.full(len(self.items.offsets) - 1, np.nan)
        places = np.flatnonzero(codes == ranks[name])
        found[self.items.rows[places]] = self.numbers[places]
        return found


def find_responses(turns: Ragged) -> np.ndarray:
    """(turns of all rows,) bool: the assistant's."""
    return flags(pc.equal(turns.values.field("role"), "assistant"))


def list_lengths(column: pa.Array) -> np.ndarray:
    """(rows,) int64 length of each list; a null list counts as empty."""
    return np.diff(_offsets(column))


def count_in_rows(flagged: np.ndarray, items: Ragged) -> np.ndarray:
    """(rows,) int64 number of flagged entries."""
    before = np.zeros(len(flagged) + 1, np.int64)
    np.cumsum(flagged, out=before[1:])
    return np.diff(before[items.offsets])


def one_array(table: pa.Table, name: str) -> pa.Array:
    """A column as one array, whatever its chunks; dictionaries of the chunks must be equal."""
    chunks = table.column(name)
    return chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()


def nulls(array: pa.Array) -> np.ndarray:
    """(N,) bool: the nulls of an array."""
    if not array.null_count:
        return np.zeros(len(array), bool)
    return array.is_null().to_numpy(zero_copy_only=False)


def flags(array: pa.Array) -> np.ndarray:
    """(N,) bool: a boolean array with null as False."""
    return (pc.fill_null(array, False) if array.null_count else array).to_numpy(zero_copy_only=False)


def _offsets(column: pa.Array) -> np.ndarray:
    if column.null_count:
        lengths = pc.fill_null(column.value_lengths(), 0).to_numpy(zero_copy_only=False)
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    stored: np.ndarray = column.offsets.to_numpy().astype(np.int64)
    return stored - stored[0]
