"""Markers: the parts of a document that are written by the program, between two comments; all else is left as it is."""

from __future__ import annotations

from pathlib import Path


class MarkerError(ValueError):
    """A document has not exactly one pair of the markers; the message names them and what to write."""


def replace_section(text: str, name: str, content: str, place: Path) -> str:
    """The document with new content between `<!-- name:begin -->` and `<!-- name:end -->`.

    Args:
        place: the document's path, for the message.

    Raises:
        MarkerError: a marker is missing, repeated, or the end comes first.
    """
    before, _, after = _split(text, name, place)
    return f"{before}{content.strip()}{after}"


def read_section(text: str, name: str, place: Path) -> str:
    """What stands between the markers, without surrounding blank lines.

    Raises:
        MarkerError: as in `replace_section`.
    """
    return _split(text, name, place)[1].strip()


def _split(text: str, name: str, place: Path) -> tuple[str, str, str]:
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    start, stop = text.find(begin) + len(begin), text.find(end)
    if text.count(begin) != 1 or text.count(end) != 1 or stop < start:
        raise MarkerError(
            f"{place}: there must be one line `{begin}` and, below it, one line `{end}`; what stands between them is "
            "written by the program. Add them where it is to appear."
        )
    return text[:start] + "\n\n", text[start:stop], "\n\n" + text[stop:]
