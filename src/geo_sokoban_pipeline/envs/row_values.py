"""Rows of a source as values that can be written: JSON and UTF-8 whatever a foreign row holds, and rows left out.

A table of what was read, and of what was refused, can therefore always be saved and read again.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RejectedRow:
    """A row that was left out: its id, the reason, what it held as text, and its source."""

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
        ValueError: a text that is no Unicode.
    """
    return dict(json.loads(check_unicode(json.dumps(dict(columns), ensure_ascii=False, default=_plain))))


def row_as_text(row: Any) -> str:
    """Readable JSON of a row as it was read, bytes as base64, for tables of rejected rows; never fails on odd
    characters.
    """
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
    return value.tolist() if hasattr(value, "tolist") else str(value)
