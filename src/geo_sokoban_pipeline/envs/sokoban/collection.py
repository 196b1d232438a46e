"""Collections of levels as they are published: levels between titles, authors and comments, rows ended early.

Read are `.txt`, `.xsb` and `.sok` files: `; number` or `; title` lines, `::` comments, lines such as `Title: …` and
`Comment: … Comment-End:`, plain text, levels with `-` or `_` as floor, with the letters `p P b B o`, with tabs, and
run-length rows such as `4#|#@$.#|4#`, also a level a line. A line is a row of a level if it looks like one, also where
one symbol of it is wrong: then this level is rejected, and the others stay.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from geo_sokoban_pipeline.envs.rows import unique_ids

SUFFIXES = (".sok", ".txt", ".xsb")

_CLASSIC = frozenset("# .*$@+-_")
_ROW = _CLASSIC | frozenset("\t|()0123456789pPbBoO√XS")
_LETTERS = str.maketrans("pPbBo", "@+$*.")
_KEY = re.compile(r"(?!level\b)([a-z][A-Za-z0-9 _/-]{0,30}?)\s*:(?!//)\s*(.*)", re.IGNORECASE)
_COMMENT_END = re.compile(r"comment[ _-]?end\s*:?.*", re.IGNORECASE)
# A row has two walls: one sign with a number behind it, or with a word where no level has begun, makes a heading.
_NUMBERED = re.compile(r"([^#@$*+|\d_-]*#\d+[^#@$*+|_-]*)|#\d+\W?")
_WORDED = re.compile(r"[^#@$*+|\d_-]*#[^#@$*+|_-]*[^\W_][^#@$*+|_-]*")
_NUMBER_AND_TITLE = re.compile(r"""(\d+)(?:\s*[.:)-]\s*|\s+)(?:(?P<quote>['"])(.+)(?P=quote)|([^'"].*))""")
_LEVEL_NUMBER = re.compile(r"level\s*(\d+)", re.IGNORECASE)
_ABOUT = re.compile(r"©|\(c\)|copyright|all rights reserved|https?://|www\.|\S@\S+\.\w", re.IGNORECASE)
_MOVES = re.compile(r"[lurdLURD0-9()\s]{6,}")
_LINE_END = re.compile(r"\r\n?")
_RUN = re.compile(r"(\d*)(\(|\)|[^\d()])|\d+")
_NAMES = ("", "title", "set", "collection")  # keys of notes that may name a collection; remarks have none
_TITLE_LENGTH = 80
# Cells of a level in run-length form: a text of a few bytes may stand for any number.
_MAX_CELLS = 100_000


@dataclass(frozen=True)
class Entry:
    """A level of a collection: its id, the rows as written, and its title, author and comment."""

    row_id: str
    rows: str
    columns: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Note:
    """A line of text between levels."""

    kind: str  # key (`Key: value`), remark (`; text`) or plain
    key: str
    value: str
    paragraph: int  # counted from the level above; 0 touches it
    touches_below: bool = False


def read_collection(text: str) -> list[Entry]:
    """The levels of a file, each with an id of its own: its title, its number, or `level_<place>`."""
    # U+FEFF, a no-break blank without width, is left where files are joined.
    levels, gaps = _part(_LINE_END.sub("\n", text.replace("\ufeff", "")).split("\n"))
    if not levels:
        return []
    notes = [_notes(gap, last=number == len(levels)) for number, gap in enumerate(gaps)]
    above = {kind: _stands_above(notes, kind) for kind in ("key", "remark", "plain")}
    authors = [[note.value for note in gap if note.key == "author"] for gap in notes]
    # An author at the head is that of all levels, unless every level has a head like it.
    everyone = authors[0][0] if authors[0] and not (above["key"] and any(authors[1:])) else ""
    names, entries = [], []
    for number, rows in enumerate(levels):
        own = {
            kind: [note for note in notes[number if is_above else number + 1] if note.kind == kind]
            for kind, is_above in above.items()
        }
        if number == 0:
            own = {kind: _of_first_level(notes, kind) if above[kind] else found for kind, found in own.items()}
        elif number == len(levels) - 1:
            own = {kind: found if above[kind] else _of_last_level(found, notes) for kind, found in own.items()}
        name, columns = _describe(own, above)
        columns["author"] = columns["author"] or everyone
        names.append(name or f"level_{number}")
        entries.append(
            ("\n".join(rows), {key: columns[key] for key in ("title", "author", "comment") if columns.get(key)})
        )
    return [Entry(name, *entry) for name, entry in zip(unique_ids(names), entries, strict=True)]


def classic_rows(text: str) -> str:
    """The rows of a level in plain XSB: run lengths written out, letters replaced, `-` and `_` as blanks.

    Texts in the data set's symbols come back as they are.

    Raises:
        ValueError: run lengths that do not add up to rows, or row numbers.
    """
    text = re.sub(r"[^\S\n\t]", " ", _LINE_END.sub("\n", text))  # no-break and other blanks
    if set(text) & set("pbBo") and not set(text) & set("√XOS" if "\t" in text else "√"):
        text = text.translate(_LETTERS)
    if "\t" in text and not set(text) & set("√XOPS"):
        text = _without_tabs(text)
    if set(text) & set("|()0123456789"):
        text = _write_out(text)
    lines = text.split("\n")
    if set(text) <= _CLASSIC | {"\n"} and all("#" in line for line in lines if line.strip()):
        return text.replace("-", " ").replace("_", " ")
    return text


def _without_tabs(text: str) -> str:
    """Rows of XSB with blanks for tabs: as a terminal shows them, or none where each tab parts two cells."""
    rows = [line.rstrip() for line in text.split("\n")]
    cells = [[cell.strip() for cell in row.split("\t")] for row in rows]
    if all(len(cell) <= 1 for row in cells for cell in row):
        return "\n".join("".join(cell or " " for cell in row) for row in cells)
    return "\n".join(row.expandtabs() for row in rows)


def looks_like_row(line: str, within: bool) -> bool:
    """Whether a line is a row of a level, possibly a faulty one.

    Args:
        within: the line before it is a row.
    """
    symbols = "".join(line.split())
    if symbols.startswith((";", ":", "//")):
        return False
    if "#" in symbols:
        if _NUMBERED.fullmatch(symbols) or (not within and _WORDED.fullmatch(symbols)):
            return False
        known = sum(symbol in _ROW for symbol in symbols)
        return known == len(symbols) or (known * 2 >= len(symbols) and not re.search("[a-zA-Z]{3}", line))
    if set(symbols) <= _CLASSIC:
        return bool(symbols) and (within or bool(set(symbols) & set("@$")))
    return within and set(symbols) <= _ROW and bool(set(line) & set("\t_"))


def _part(lines: Sequence[str]) -> tuple[list[list[str]], list[list[str]]]:
    """Rows of each level, and the lines before, between and after the levels."""
    levels: list[list[str]] = []
    gaps: list[list[str]] = [[]]
    rows: list[str] = []
    comment_until = -1
    for number, line in enumerate([*lines, ""]):
        if number > comment_until and looks_like_row(line, bool(rows)):
            rows.append(line)
            continue
        for level, rule in _at_rules(rows):
            if level:
                levels.append(level)
                gaps.append([])
            gaps[-1] += rule
        rows = []
        if number > comment_until and re.match(r"\s*comment\s*:", line, re.IGNORECASE):
            comment_until = _end_of_comment(lines, number)
        gaps[-1].append(line)
    return levels, gaps


def _at_rules(rows: list[str]) -> list[tuple[list[str], list[str]]]:
    """Rows of each walled level, and apart from them the lines of dashes or stars directly below."""
    if not any("#" in row for row in rows):
        return [(rows, [])]
    if len(rows) > 1 and all("|" in row.strip(" |") and set(row) & set("@+pP") for row in rows):
        return [([row], []) for row in rows]  # a level a line
    parts: list[tuple[list[str], list[str]]] = []
    start = number = 0
    while number < len(rows):
        end = number
        while end < len(rows) and not "".join(rows[end].split()).strip("-_.*+"):
            end += 1
        if number < end and (end == len(rows) or _is_border(rows[start:number], rows[end:])):
            parts.append((rows[start:number], rows[number:end]))
            start = end
        number = end + 1
    return [*parts, (rows[start:], [])]


def _is_border(above: Sequence[str], below: Sequence[str]) -> bool:
    """Whether a line of dashes between rows parts two levels, and is no row of floor.

    It lies between the last wall of one and the first wall of the other, and neither is an ornament of walls alone.
    """
    upper, lower = ("".join(row.split()).strip("|").split("|") for row in ("".join(above[-1:]), below[0]))
    walled = all("#" in edge and set(edge) <= set("#-_0123456789()") for edge in (upper[-1], lower[0]))
    return walled and all(set("".join(rows)) & set("@+$*pPbB") for rows in (above, below))


def _end_of_comment(lines: Sequence[str], start: int) -> int:
    """Number of the line that ends a comment of several lines; -1 for a comment of one line."""
    for number in range(start + 1, len(lines)):
        if _COMMENT_END.fullmatch(lines[number].strip()):
            return number
        if re.match(r"\s*comment\s*:", lines[number], re.IGNORECASE):
            break
    return -1


def _notes(gap: Sequence[str], last: bool) -> list[_Note]:
    """Notes in the lines between two levels; `last`: no level follows."""
    notes: list[_Note] = []
    paragraph, number = 0, 0
    # Without a blank line below them the lines belong to the level that follows.
    below = len(gap)
    while below and gap[below - 1].strip():
        below -= 1
    while number < len(gap):
        line, start = gap[number].strip(), number
        number += 1
        if not line:
            paragraph += 1
            continue
        kind, key, value = "plain", "", line
        if line[0] in ";:" or line.startswith("//"):
            kind, value = "remark", line.lstrip(";:/ ")
        # `; Title: X` means the same as `Title: X`.
        if found := _KEY.fullmatch(value):
            kind, key, value = "key", found[1].lower(), found[2].strip()
            key = "title" if key == "name" else key
        if key == "comment" and (end := _end_of_comment(gap, start)) >= 0:
            value = "\n".join(text for text in (value, *map(str.strip, gap[number:end])) if text)
            number = end + 1
        if key != "comment":
            value = re.sub(r"^[-=*~;:#\s]+|[-=*~;:#\s]+$", "", value)
        if kind != "key" and (numbered := _LEVEL_NUMBER.fullmatch(value)):
            value = numbered[1]
        if kind != "key" and not re.search(r"[^\W_]", value):
            paragraph += 1  # a rule, or the sign of a remark alone
        elif value and not _MOVES.fullmatch(value):
            notes.append(_Note(kind, key, value, paragraph, not last and start >= below))
    return notes


def _stands_above(notes: Sequence[Sequence[_Note]], kind: str) -> bool:
    """Whether notes of a kind describe the level below them.

    They do unless the file begins without one and ends with one. Where it has both (a header, an epilogue), the side
    that they touch decides; without any such sign `Key: value` lines stand below their level, other notes above.
    """
    of_kind = [[note for note in gap if note.kind == kind] for gap in notes]
    if bool(of_kind[0]) != bool(of_kind[-1]):
        return bool(of_kind[0])
    inner = [note for gap in of_kind[1:-1] for note in gap]
    down = sum(note.touches_below for note in inner)
    up = sum(note.paragraph == 0 for note in inner)
    return down > up if down != up else kind != "key"


def _of_first_level(notes: Sequence[Sequence[_Note]], kind: str) -> list[_Note]:
    """The notes at the head of a file without those about the whole collection.

    These stand in paragraphs of their own, are the only ones of their kind, do not touch the level where all others
    do, or end with a copyright, or with the collection's name below one.
    """
    others = [note for gap in notes[1:] for note in gap]
    if not notes[0] or (len(notes) > 2 and not any(note.kind == kind for note in others)):
        return []
    near = [note for note in notes[0] if note.paragraph == notes[0][-1].paragraph]
    touching = [note.touches_below for gap in notes[1:-1] for note in gap if note.kind == kind]
    if len(near) == len(notes[0]) and not near[-1].touches_below and touching and all(touching):
        return []
    about = [place for place, note in enumerate(near) if _is_about(note, kind)]
    if about and not any(_is_about(note, kind) for note in others):
        named = (place for place, note in enumerate(near) if place not in about and note.key in _NAMES)
        name = next(named, -1) if len(notes) > 2 else -1
        near = near[max(about[-1], name - near[name].value.isdigit()) + 1 :]
    return [note for note in near if note.kind == kind]


def _of_last_level(found: list[_Note], notes: Sequence[Sequence[_Note]]) -> list[_Note]:
    """The notes at the end of a file; if no others are of their kind, those that touch the level."""
    if not found or any(note.kind == found[0].kind for gap in notes[:-1] for note in gap):
        return found
    return [note for note in found if note.paragraph == 0]


def _is_about(note: _Note, kind: str) -> bool:
    """Whether a note names an owner, for notes of a kind."""
    return note.key == "copyright" or (note.kind == kind and _ABOUT.search(note.value) is not None)


def _describe(own: dict[str, list[_Note]], above: dict[str, bool]) -> tuple[str, dict[str, str]]:
    """Id of a level (empty without a name for it) and the columns title, author and comment."""
    keyed: dict[str, str] = {}
    said: list[str] = []
    for note in own["key"]:
        if note.key in ("title", "author") and note.key not in keyed:
            keyed[note.key] = note.value
        elif note.key == "comment":
            said.append(note.value)
    title, number = keyed.get("title", ""), ""
    for kind in ("remark", "plain"):
        found = own[kind]
        nearest = [note for note in found if note.paragraph == (found[-1] if above[kind] else found[0]).paragraph]
        numbers = [note for note in nearest if note.value.isdigit()]
        named = [note for note in nearest if not _ABOUT.search(note.value)]
        chosen = numbers[0] if numbers else _title_of(named, above[kind])
        said += [note.value for note in found if note is not chosen]
        if chosen is None:
            continue
        if numbers:
            number = number or chosen.value
        elif title:
            said.append(chosen.value)
        else:
            title = chosen.value
    if parts := _NUMBER_AND_TITLE.fullmatch(title):
        title = parts[3] or parts[4]
    title = " ".join(title.split())
    columns = {"title": title, "author": keyed.get("author", ""), "comment": "\n".join(said)}
    return title[:_TITLE_LENGTH] or number, columns


def _title_of(notes: Sequence[_Note], above: bool) -> _Note | None:
    if not notes:
        return None
    note = notes[-1] if above else notes[0]
    return note if len(note.value) <= _TITLE_LENGTH else None


def _row_number(rows: Sequence[str]) -> str | None:
    """The first row number with the sign behind it: one before `|`, or one before each row, counted in order."""
    found = [re.match(r" *(\d+) *([ |:.)])", row) for row in rows]
    numbers = [int(number[1]) for number in found if number]
    counted = len(numbers) == len(rows) > 2 and numbers == list(range(numbers[0], numbers[0] + len(rows)))
    return next((number[0].strip() for number in found if number and (counted or number[2] == "|")), None)


def _write_out(text: str) -> str:
    """Rows of a text in run-length form, in which `3#` stands for `###`, `2(#-)` for `#-#-` and `|` ends a row.

    A line end, or both signs together, end a row as well.
    """
    if number := _row_number(text.split("\n")):
        raise ValueError(f"a row of the level begins with the number {number!r}; write the rows without row numbers")
    text = re.sub(r"^ *\||\| *$", "", textwrap.dedent(text), flags=re.MULTILINE)
    groups: list[tuple[int, list[str]]] = [(1, [])]
    size = 0
    for found in _RUN.finditer(text):
        times, symbol = int(found[1] or 1) if found[2] else 0, found[2]
        if not times or times > _MAX_CELLS or (found[1] and symbol in "|\n"):
            raise ValueError(
                f"run length {found[0]!r} of the level: a number from 1 stands before a symbol or a bracket"
            )
        if symbol == "(":
            groups.append((times, []))
            continue
        if symbol == ")":
            if len(groups) == 1 or found[1]:
                raise ValueError("brackets of the level's run lengths do not match")
            times, inner = groups.pop()
            symbol = "".join(inner)
        size += times * len(symbol)
        if size > _MAX_CELLS:
            raise ValueError(f"run lengths of the level stand for more than {_MAX_CELLS:,} cells")
        groups[-1][1].append(symbol * times)
    if len(groups) > 1:
        raise ValueError("brackets of the level's run lengths do not match")
    return "".join(groups[0][1]).replace("|", "\n")
