"""Shape: what kind of thing a normalised text is, so that who commits to nothing is refused before any algebra.

One value is an answer. A choice, a range, several values, an equation between values or a text is one only where the
label is of that shape too.
"""

from __future__ import annotations

import re

_MACRO = r"\\[A-Za-z]+"
# One letter at a time: two ways to split a word would be exponentially many for a sentence.
_NAME = re.compile(
    r"(?:[A-Za-z]|\\(?:angle|triangle|alpha|beta|gamma|delta|epsilon|theta|lambda|mu|sigma|phi|omega|sin|cos|tan|odot)"
    r"(?![A-Za-z])|(?<=\\angle) ?\d+|_(?:\{\w+\}|\w)|'|\s)+"
)
# Capitals are names of points and lines.
_NO_NAME = re.compile(r"(?<![A-Za-z\\])(?:or|and|either|neither|nor|not|no|never)(?![A-Za-z])")
_EQUALS = re.compile(r"(?<![<>!])=|\\approx(?![A-Za-z])")
_MARKS = (
    re.compile(r"(?<![A-Za-z\\])(?:or|and|either|between|to)(?![A-Za-z])", re.IGNORECASE),
    re.compile(r"\\(?:pm|mp|lor|land|vee|wedge|cup|cap)(?![A-Za-z])"),
    re.compile(r":"),
    re.compile(r"[|\[\]]|\\[{}|]"),
    re.compile(r"(?<!_)\d (?=\d)"),
)
_RELATION = re.compile(r"[<>]|\\(?:leq|geq|neq|ne)(?![A-Za-z])")
_MIXED = re.compile(r"(?<![\w.^])(\d+) (\d+)/(\d+)(?!\d)")  # 7 3/4
_ROOT_DEGREE = re.compile(r"(?<=\\sqrt)\s*\[\w+\]")
_SEPARATOR = re.compile(r"[,;]")
_TOKEN = re.compile(
    r"\s+|\d+(?:\.\d*)?|\.\d+|[-+*/^(){}=<>,:|\[\]]|\\[{}]|(?<=[A-Za-z])['_]"
    r"|\\(?:frac|sqrt|cdot|times|div|pi|infty|leq|geq|neq|pm|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|log|ln"
    r"|alpha|beta|gamma|delta|epsilon|theta|lambda|mu|sigma|phi|omega|cup|cap|in)(?![A-Za-z])"
    r"|(?<![A-Za-z\\])[A-Za-z]{1,2}(?![A-Za-z])"
)
_HUGE = re.compile(r"\d{31}|\^\s*[{(]?\s*-?\s*\d{3}|\^[^+\-*/=,<>]*\^|\*\s*\*")


def value_side(text: str) -> str:
    """What stands behind a name and one equals sign, or behind an approximation sign; else the text as it is."""
    parts = _EQUALS.split(text)
    if len(parts) != 2:
        return text
    name, value = (part.strip() for part in parts)
    is_name = _NAME.fullmatch(name) and not _NO_NAME.search(name)
    if not value or not (is_name or (not name and "=" not in text)):
        return text
    return value


def is_relation(text: str) -> bool:
    """Whether a text says that something equals, approximates, exceeds or differs from something."""
    return _EQUALS.search(text) is not None or _RELATION.search(text) is not None


def is_hedge(answer: str, label: str) -> bool:
    """Whether an answer names a choice, a range or another number of values, and the label does not."""
    answer, label = (_MIXED.sub(_without_fraction, _ROOT_DEGREE.sub("", text)) for text in (answer, label))
    if len(_SEPARATOR.findall(answer)) != len(_SEPARATOR.findall(label)):
        return True
    if _SEPARATOR.search(label) and (split_tuple(answer) is None) != (split_tuple(label) is None):
        return True
    return any(mark.search(answer) and not mark.search(label) for mark in _MARKS)


def _without_fraction(mixed: re.Match[str]) -> str:
    return mixed[1] if int(mixed[2]) < int(mixed[3]) else mixed[0]


def is_formula(text: str) -> bool:
    """Whether a text is built from what labels are built from, in sizes that algebra can handle.

    Words, unknown macros, factorials, sums, integrals and huge or stacked powers are not.
    """
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            return False
        at = found.end()
    return bool(text) and _HUGE.search(text) is None


def has_letters(text: str) -> bool:
    """Whether letters that are no macros are in a text."""
    return re.search("[A-Za-z]", re.sub(_MACRO, "", text)) is not None


def split_tuple(text: str) -> tuple[str, list[str]] | None:
    """Brackets and elements of a text such as `(1, 2)`; None: it is no tuple."""
    inner = text[1:-1]
    brackets = text[:1] + text[-1:]
    if brackets not in ("()", "[]", "(]", "[)") or "," not in inner or any(bracket in inner for bracket in "()[]"):
        return None
    return brackets, [element.strip() for element in inner.split(",")]
