"""Columns of episodes between Python values and Arrow arrays, built from flat arrays and offsets.

`BUILDERS` and `READERS` hold the columns that need more than Arrow's own conversion; each reader inverts its builder
bit for bit. Equal image bytes are stored once per column (dictionary encoding).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from geo_sokoban_pipeline.contract.columns import Ragged
from geo_sokoban_pipeline.contract.values import PART_COLUMNS, SOLVED, count_replies

Spans = list[tuple[int, int, int]]
DERIVED_COLUMNS = ("success", "n_turns", "optimal_steps", *PART_COLUMNS)  # each repeats a value of a list


def build_column(name: str, values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Arrow array of one column; its type is `kind`, but dictionary-encoded image bytes."""
    return _BUILDERS.get(name, _build_plain)(values, kind)


def read_column(name: str, array: pa.Array) -> list[Any]:
    """Python values of one column, one per row; turns come as dicts of their fields."""
    return _READERS.get(name, pa.Array.to_pylist)(array)


def gather_columns(items: Iterable[Any], names: Sequence[str]) -> list[tuple[Any, ...]]:
    """Values of each attribute over all items.

    Each item is read in one call: one look-up per name and item would be a fifth of the writing.
    """
    return list(zip(*map(attrgetter(*names), items), strict=True)) or [()] * len(names)


def derive_columns(
    metrics: Sequence[dict[str, float]], parts: Sequence[dict[str, float]], turns: pa.Array
) -> dict[str, pa.Array]:
    """The columns of `DERIVED_COLUMNS`, from the lists that they repeat.

    Args:
        turns: the built column.
    """
    solved = [None if (value := row.get("success")) is None else value >= SOLVED for row in metrics]
    fewest = [None if (value := row.get("optimal_steps")) is None else int(value) for row in metrics]
    # Most of these columns are empty: a task has but some of the parts.
    present = set(chain.from_iterable(set(map(tuple, parts))))
    missing = pa.nulls(len(parts), pa.float64())
    return {
        "success": pa.array(solved, pa.bool_()),
        "n_turns": pa.array(count_replies(Ragged.of(turns)), pa.int32()),
        "optimal_steps": pa.array(fewest, pa.int32()),
        **{
            name: pa.array([row.get(name) for row in parts], pa.float64()) if name in present else missing
            for name in PART_COLUMNS
        },
    }


def _build_plain(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    return pa.array(values, kind)


def _build_sampling(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    return pa.array([value if isinstance(value, str) else _to_json(value) for value in values], kind)


def _lists(lengths: Iterable[int], values: pa.Array, kind: pa.DataType, missing: list[bool] | None = None) -> pa.Array:
    offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(np.fromiter(lengths, np.int64))]).astype(np.int32)
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
    inner = _lists([3] * len(flat), pa.array(flat.reshape(-1)), kind.value_type)
    return _lists(map(len, values), inner, kind)


def _build_named(values: Sequence[dict[str, float]], kind: pa.DataType) -> pa.Array:
    # Few sets of names stand in many rows: each is sorted once.
    orders = {names: sorted(names) for names in set(map(tuple, values))}
    ordered = [orders[tuple(value)] for value in values]
    names = pa.array(list(chain.from_iterable(ordered)), pa.string())
    numbers = np.array(
        [value[name] for value, order in zip(values, ordered, strict=True) for name in order], np.float64
    )
    structs = pa.StructArray.from_arrays([names, numbers], fields=list(kind.value_type))
    return _lists(map(len, values), structs, kind)


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
    places: dict[bytes, int] = {}
    indices = [places.setdefault(image, len(places)) for images in values for image in images]
    data = pa.DictionaryArray.from_arrays(pa.array(indices, pa.int32()), pa.array(list(places), pa.binary()))
    fields = [pa.field("bytes", data.type), pa.field("path", pa.string())]
    structs = pa.StructArray.from_arrays([data, pa.nulls(len(indices), pa.string())], fields=fields)
    return _lists(map(len, values), structs, pa.list_(pa.field("element", structs.type)))


def _to_native(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"turn info holds a {type(value).__name__} ({value!r}); only JSON values can be stored")


_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False, default=_to_native).encode
_PLAIN = orjson.OPT_SORT_KEYS | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME


def _to_json(value: dict[str, Any]) -> str:
    try:
        text = orjson.dumps(value, option=_PLAIN)
    except TypeError:  # NumPy's numbers among them, which orjson would round
        return _encode(value)
    # A number that is none becomes null there; it may not be stored, and the slower encoder says so.
    return _encode(value) if b"null" in text else text.decode()


def _to_texts(cells: Sequence[dict[str, Any]]) -> list[str]:
    # Turns whose environment said the same may share one dict, which is then encoded once.
    different = {id(cell): cell for cell in cells if cell}
    texts = {key: _to_json(cell) for key, cell in different.items()}
    return [texts[id(cell)] if cell else "{}" for cell in cells]


_NUMBER_COLUMNS = ("token_ids", "loss_mask", "rollout_log_probs", "old_log_probs", "ref_log_probs")
_BUILDERS: dict[str, Callable[[Sequence[Any], pa.DataType], pa.Array]] = {
    **dict.fromkeys(_NUMBER_COLUMNS, _build_numbers),
    **dict.fromkeys(("reward_parts", "metrics", "timings"), _build_named),
    "sampling": _build_sampling,
    "weight_spans": _build_weight_spans,
    "turns": _build_turns,
    "images": _build_images,
    "image_grid_thw": _build_grids,
}


def _split(flat: Any, offsets: np.ndarray) -> list[Any]:
    return [flat[start:end] for start, end in pairwise(offsets.tolist())]


def _read_numbers(array: pa.Array) -> list[np.ndarray | None]:
    ragged = Ragged.of(array)
    rows = _split(ragged.values.copy(), ragged.offsets)
    if not array.null_count:
        return rows
    return [row if valid else None for row, valid in zip(rows, array.is_valid().to_pylist(), strict=True)]


def _read_spans(array: pa.Array) -> list[Spans]:
    ragged = Ragged.of(array)
    columns = [ragged.values.field(name).to_pylist() for name in ("version", "start", "end")]
    return _split(list(zip(*columns, strict=True)), ragged.offsets)


def _read_grids(array: pa.Array) -> list[list[tuple[int, int, int]]]:
    ragged = Ragged.of(array)
    return _split([tuple(grid) for grid in ragged.values.to_pylist()], ragged.offsets)


def _read_named(array: pa.Array) -> list[dict[str, float]]:
    ragged = Ragged.of(array)
    pairs = zip(ragged.values.field("name").to_pylist(), ragged.values.field("value").to_pylist(), strict=True)
    return [dict(row) for row in _split(list(pairs), ragged.offsets)]


def _read_turns(array: pa.Array) -> list[list[dict[str, Any]]]:
    ragged = Ragged.of(array)
    names = [spec.name for spec in ragged.values.type]
    columns = [ragged.values.field(name).to_pylist() for name in names]
    columns[names.index("info")] = [json.loads(text) for text in columns[names.index("info")]]
    turns = [dict(zip(names, cells, strict=True)) for cells in zip(*columns, strict=True)]
    return _split(turns, ragged.offsets)


def _read_images(array: pa.Array) -> list[list[bytes]]:
    ragged = Ragged.of(array)
    data = ragged.values.field("bytes")
    if not pa.types.is_dictionary(data.type):
        data = data.dictionary_encode()
    unique = data.dictionary.to_pylist()
    return _split([unique[index] for index in data.indices.to_pylist()], ragged.offsets)


_READERS: dict[str, Callable[[pa.Array], list[Any]]] = {
    **dict.fromkeys(_NUMBER_COLUMNS, _read_numbers),
    **dict.fromkeys(("reward_parts", "metrics", "timings"), _read_named),
    "weight_spans": _read_spans,
    "turns": _read_turns,
    "images": _read_images,
    "image_grid_thw": _read_grids,
}
