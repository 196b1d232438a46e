"""Rows of a file, one by one: parquet by record batch, JSON lines by line, with the loader's slice in the path; splits.

A row that cannot be decoded becomes a `BadRow` and does not stop the reading; a file that cannot be opened does.
"""

from __future__ import annotations

import json
import random
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from geo_sokoban_pipeline.config.data import SplitShares
from geo_sokoban_pipeline.rewards.math_answer.exact_numbers import decimal_of_json
from geo_sokoban_pipeline.runs.row_stream import open_parquet

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")

_SLICE = re.compile(r"(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]", re.DOTALL)


class DataError(ValueError):
    """An unusable data source: its file, its format, or all of its rows; the message has the way out."""


@dataclass(frozen=True)
class BadRow:
    """A row that could not be decoded: reason and text."""

    reason: str
    raw: str


def split_slice(path: str) -> tuple[Path, slice]:
    """Path and slice of `file@[a:b]`, Python's slice meaning, each side optional and possibly negative.

    A suffix without a colon, such as `@[3]`, is part of the file's name; `~` is the home folder.
    """
    if (match := _SLICE.fullmatch(path)) is None or "-" in (match["start"], match["stop"]):
        return Path(path).expanduser(), slice(None)
    start, stop = (int(match[side]) if match[side] else None for side in ("start", "stop"))
    return Path(match["path"]).expanduser(), slice(start, stop)


def read_rows(path: str, batch_rows: int = 1024) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """Number and row of each row of a `.jsonl` or `.parquet` file; numbers count from the file's start.

    Args:
        path: file with an optional slice; blank lines of `.jsonl` are skipped and not counted.
        batch_rows: rows of a parquet file that are in memory at once.

    Raises:
        FileNotFoundError: no such file; the message names it.
        DataError: another suffix, or a parquet file that cannot be opened.
    """
    file, window = split_slice(path)
    if not file.is_file():
        raise FileNotFoundError(f"no file at {file}; check the path (relative paths start at the working folder).")
    if file.suffix not in (".jsonl", ".parquet"):
        raise DataError(
            f"{file}: rows are read from .jsonl and .parquet, not from {file.suffix or 'a file without suffix'}."
        )
    rows = _json_lines(file) if file.suffix == ".jsonl" else _parquet_rows(file, _open_parquet(file), batch_rows)
    return take_slice(enumerate(rows), window)


def take_slice(items: Iterator[T], window: slice) -> Iterator[T]:
    """Items of a slice; only negative bounds need the whole list in memory."""
    if (window.start or 0) < 0 or (window.stop or 0) < 0:
        return iter(list(items)[window])
    return islice(items, window.start, window.stop)


def _open_parquet(path: Path) -> Any:
    import pyarrow as pa

    try:
        return open_parquet(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(
            f"{path} is not a readable parquet file ({error}); it may be torn: fetch or write it again."
        ) from error


def _parquet_rows(path: Path, opened: Any, batch_rows: int) -> Iterator[dict[str, Any]]:
    import pyarrow as pa

    with opened as file:
        try:
            for batch in file.iter_batches(batch_size=batch_rows):
                yield from plain_rows(batch)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{path} is torn ({error}); fetch or write it again.") from error


def plain_rows(batch: Any) -> list[dict[str, Any]]:
    """Rows of an Arrow table or batch; labels of single precision keep their digits (0.1, not 0.10000000149011612)."""
    import pyarrow as pa

    at = batch.schema.get_field_index("answer")
    if at >= 0 and pa.types.is_float32(batch.schema.field(at).type):
        batch = batch.set_column(at, "answer", batch.column(at).cast("string").cast("float64"))
    return batch.to_pylist()


def _json_lines(path: Path) -> Iterator[dict[str, Any] | BadRow]:
    with path.open("rb") as lines:
        for line in lines:
            if not line.strip():
                continue
            try:
                row = json.loads(line, parse_float=decimal_of_json)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                yield BadRow(f"line is not JSON: {error}", line.decode("utf-8", "replace").rstrip("\n"))
                continue
            yield row if isinstance(row, dict) else BadRow("line is not a JSON object", line.decode().rstrip("\n"))


# Rows of a source as JSON and UTF-8, whatever they hold, and rejected rows.


@dataclass(frozen=True)
class RejectedRow:
    """A rejected row: its id, the reason, its content as text, and its source."""

    row_id: str
    reason: str
    raw: str
    source: str


def check_unicode(text: str) -> str:
    """The text, if it can be written as UTF-8; JSON may hold halves of surrogate pairs, which cannot.

    Raises:
        ValueError: it cannot.
    """
    text.encode("utf-8")
    return text


def json_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Pass-through columns as JSON values, bytes as base64.

    Raises:
        ValueError: a text is not valid Unicode.
    """
    return dict(json.loads(check_unicode(json.dumps(dict(columns), ensure_ascii=False, default=_plain))))


def row_as_text(row: Any) -> str:
    """JSON of a row as it was read, bytes as base64, for tables of rejected rows; never fails on odd characters."""
    return json.dumps(row, ensure_ascii=False, default=_plain).encode("utf-8", "replace").decode("utf-8")


def unique_ids(ids: Sequence[str]) -> list[str]:
    """Ids with `_2`, `_3`, … behind repeated ones; sources joined from several splits repeat theirs."""
    seen: Counter[str] = Counter()
    taken = set(ids)
    unique = []
    for name in ids:
        seen[name] += 1
        new = name
        while seen[name] > 1 and new in taken:
            new = f"{name}_{seen[name]}"
            seen[name] += new in taken
        taken.add(new)
        unique.append(new)
    return unique


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return b64encode(value).decode("ascii")
    if isinstance(value, Decimal):  # only labels need all digits of a number of JSON
        return float(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)


def as_frame(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> pd.DataFrame:
    """Frame with object columns: the pinned ones first, then all further ones."""
    import pandas as pd

    further = dict.fromkeys(name for row in rows for name in row if name not in names)
    return pd.DataFrame({name: pd.Series([row.get(name) for row in rows], dtype=object) for name in [*names, *further]})


@dataclass(frozen=True)
class HubReader:
    """Reader of hub rows, from the caller: tasks do not import a hub client.

    Attributes:
        names: names of a data set's splits, of options that name it (`dataset`, `revision`).
        rows: gives the rows of one split, or an error before the first one.
    """

    names: Callable[[Any], Sequence[str]]
    rows: Callable[[Any, str], Iterable[Mapping[str, Any]]]


SPLITS: tuple[str, ...] = ("train", "validation", "eval")


def share_out(items: Sequence[T], shares: SplitShares, generator: random.Random) -> dict[str, list[T]]:
    """Assign distinct items to the splits in random order, as near to the shares as whole items allow.

    Every split with a share above 0 gets at least one item if there are enough.
    """
    order = list(items)
    generator.shuffle(order)
    sizes = _sizes(len(order), {split: getattr(shares, split) for split in SPLITS})
    assigned, start = {}, 0
    for split in SPLITS:
        assigned[split] = order[start : start + sizes[split]]
        start += sizes[split]
    return assigned


def wanted_splits(shares: SplitShares) -> list[str]:
    """Splits with a share above 0."""
    return [split for split in SPLITS if getattr(shares, split) > 0]


def overlaps(rows: Mapping[str, Iterable[str]]) -> int:
    """How many keys (hashes of layouts, levels or problems) occur in more than one split."""
    return sum(1 for times in Counter(key for keys in rows.values() for key in set(keys)).values() if times > 1)


def _sizes(count: int, shares: Mapping[str, float]) -> dict[str, int]:
    """Whole numbers nearest to the shares that add up to `count` (largest remainders)."""
    exact = {split: share * count for split, share in shares.items()}
    sizes = {split: int(value + 1e-9) for split, value in exact.items()}
    for split in sorted(shares, key=lambda name: sizes[name] - exact[name])[: count - sum(sizes.values())]:
        sizes[split] += 1
    for split, share in shares.items():
        if share > 0 and sizes[split] == 0:
            largest = max(sizes, key=lambda name: sizes[name])
            if sizes[largest] > 1:
                sizes[largest] -= 1
                sizes[split] = 1
    return sizes
