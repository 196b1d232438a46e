"""Raw rows: what a source holds, in one schema, before anybody looks into it.

Pictures stay the bytes or the text they came as. A row that has not the shape of a problem is kept with the reason in
`error`, so that the raw table holds every row that was read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from geo_sokoban_pipeline.envs.row_files import BadRow
from geo_sokoban_pipeline.envs.row_values import check_unicode, json_columns, row_as_text
from geo_sokoban_pipeline.row_stream import Row

_KNOWN = ("images", "problem", "answer")
# What a prompts table of our own says of a problem, and what it says anew each time it is made.
_KEPT = ("id", "data_source", "family", "difficulty", "candidates")
_OWN_MARK = "problem_hash"


@dataclass
class RowIds:
    """Ids without repetition: the row's own, else split and number; a repeated one gets `_2`, `_3`, …"""

    taken: set[str] = field(default_factory=set)

    def give(self, own: Any, split: str, number: int) -> str:
        """An id that no other row has."""
        base = f"{split}_{number:05d}" if own is None else str(own).encode("utf-8", "replace").decode("utf-8")
        name, times = base, 1
        while name in self.taken:
            times += 1
            name = f"{base}_{times}"
        self.taken.add(name)
        return name


def raw_rows(
    rows: Iterable[tuple[int, Mapping[str, Any] | BadRow]], source: str, split: str, ids: RowIds
) -> Iterator[Row]:
    """Rows of `geo3k.raw_problems`.

    Args:
        rows: number and row, as they were read.
        source: hub id or file name, for the record.
        split: train, validation or eval.
        ids: of all splits together.
    """
    for number, row in rows:
        own = None if isinstance(row, BadRow) else row.get("id")
        head = {"row_id": ids.give(own, split, number), "source": source, "source_split": split}
        try:
            yield head | _read_row(row)
        except ValueError as error:
            raw = row.raw if isinstance(row, BadRow) else row_as_text(row)
            yield head | _nothing(str(error), {"row": raw})


def _read_row(row: Mapping[str, Any] | BadRow) -> Row:
    if isinstance(row, BadRow):
        raise ValueError(row.reason)
    return {
        "images": _read_images(row.get("images")),
        "problem": _read_text(row, "problem"),
        "answer": _read_text(row, "answer"),
        "columns": json.dumps(json_columns(_read_columns(row)), ensure_ascii=False),
        "error": None,
    }


def _nothing(error: str, columns: Mapping[str, str]) -> Row:
    return {
        "images": [],
        "problem": None,
        "answer": None,
        "columns": json.dumps(columns, ensure_ascii=False),
        "error": error,
    }


def _read_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """All other columns; of our own prompts those that came with the problem, so that they stay what they were."""
    if _OWN_MARK not in row or not isinstance(row.get("columns"), str):
        return {name: value for name, value in row.items() if name not in _KNOWN}
    kept = {name: row[name] for name in _KEPT if row.get(name) is not None}
    return {**json.loads(row["columns"]), **kept}


def _read_text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    # Labels of other sets may be numbers.
    if isinstance(value, int | float) and not isinstance(value, bool) and name == "answer":
        return str(value)
    if not isinstance(value, str):
        state = "missing" if value is None else f"a {type(value).__name__}"
        raise ValueError(f"{name} is {state}; a text is expected")
    return check_unicode(value)


def _read_images(images: Any) -> list[Row]:
    """Pictures as `{bytes, path}`.

    Raises:
        ValueError: something that is neither bytes, text, nor such a pair.
    """
    if images is None:
        return []
    single = isinstance(images, str | bytes | Mapping)
    if not single and not isinstance(images, list | tuple):
        raise ValueError(f"images is a {type(images).__name__}; a list of pictures is expected")
    return [_read_image(image) for image in ([images] if single else images)]


def _read_image(image: Any) -> Row:
    if isinstance(image, Mapping):
        raw, path = image.get("bytes"), image.get("path")
        if (raw is None or isinstance(raw, bytes)) and (path is None or isinstance(path, str)):
            return {"bytes": raw, "path": path if path is None else check_unicode(path)}
    if isinstance(image, bytes):
        return {"bytes": image, "path": None}
    if isinstance(image, str):
        return {"bytes": None, "path": check_unicode(image)}
    raise ValueError(f"picture is a {type(image).__name__}; bytes, a data: URI, or both as bytes and path are expected")
