"""Values as text for people: one way to write a share, an interval, a duration, a type.

Missing and non-finite numbers become a dash, never 0 and never `nan`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

DASH = "–"
_NARROW_SPACE = "\u202f"  # does not break, so that a number keeps its unit
_MINUS = "\u2212"
PERCENT = f"{_NARROW_SPACE}%"


def is_number(value: Any) -> bool:
    """Whether a value is a finite number; booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def in_percent(share: float, digits: int = 1) -> str:
    """A share as `66.3`, without its sign.

    The one rounding of percentages, as in the browser (`fixed`): a tie goes to the even digit, 264 of 640 is 41.2.
    """
    return f"{share * 100:.{digits}f}"


def percent(share: float | None, digits: int = 1) -> str:
    """A share in [0, 1] as `66.3 %`."""
    return f"{in_percent(share, digits)}{PERCENT}" if share is not None and is_number(share) else DASH


def percent_range(low: float | None, high: float | None, digits: int = 1) -> str:
    """An interval of shares as `62.5–69.8 %`."""
    if low is None or high is None or not (is_number(low) and is_number(high)):
        return DASH
    return f"{in_percent(low, digits)}–{in_percent(high, digits)}{PERCENT}"


def number(value: float | None, digits: int = 2) -> str:
    """A number with a fixed count of decimals and a real minus sign; whole numbers above 999 in groups of three."""
    if value is None or not is_number(value):
        return DASH
    return f"{value:,.{digits}f}".replace("-", _MINUS).replace(",", _NARROW_SPACE)


def count(value: float | None) -> str:
    """A count, in groups of three digits."""
    return number(value, 0)


def signed(value: float | None, digits: int = 2) -> str:
    """A number with its sign, `+0.12`."""
    text = number(value, digits)
    return f"+{text}" if value is not None and is_number(value) and value > 0 else text


def significant(value: float | None, digits: int = 3) -> str:
    """A number with so many significant digits: `0.0123`, `4.5e-06`."""
    if value is None or not is_number(value):
        return DASH
    return f"{value:.{digits}g}".replace("-", _MINUS)


def duration(seconds: float | None) -> str:
    """Seconds as `850 ms`, `3.2 s`, `4 min 10 s` or `1 h 5 min`."""
    if seconds is None or not is_number(seconds):
        return DASH
    if seconds < 1:
        return f"{seconds * 1000:.0f}{_NARROW_SPACE}ms"
    if seconds < 99.5:
        return f"{seconds:.1f}{_NARROW_SPACE}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}{_NARROW_SPACE}min {rest}{_NARROW_SPACE}s"
    return f"{minutes // 60}{_NARROW_SPACE}h {minutes % 60}{_NARROW_SPACE}min"


def joined(words: list[str]) -> str:
    """Words as a list in a sentence: `a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def plural(value: float | None, one: str, several: str | None = None) -> str:
    """A count with its noun: `1 level`, `640 levels`; `several` where an s does not make the plural."""
    return f"{count(value)} {one if value == 1 else several or f'{one}s'}"


def points(difference: float, low: float, high: float) -> str:
    """A difference of two shares with its interval, as `+31.4 points [27.2 to 35.5]`."""
    return f"{signed(100 * difference, 1)} points [{number(100 * low, 1)} to {number(100 * high, 1)}]"


def p_value(value: float) -> str:
    """`p = 0.032`, or `p < 0.001`."""
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"


def shorten(text: str, limit: int = 6000) -> str:
    """A text, cut after `limit` characters, with the number of characters left out."""
    left_out = len(text) - limit
    return text if left_out <= 0 else f"{text[:limit]}\n… {number(left_out, 0)} more characters"


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of nested mappings; an empty mapping is a value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def type_name(value: Any) -> str:
    """The type of a value with its article, for sentences such as "it returned an int": `a list`, `an int`, `None`."""
    if value is None:
        return "None"
    name = type(value).__name__
    # Types with a u at the start are spoken with a consonant: a uint8, a UUID.
    return f"an {name}" if name[0].lower() in "aeio" else f"a {name}"


START = "start"  # the first policy of a run without a warm start


# Which policy an evaluation summary is of.


def describe_policy(summary: Mapping[str, Any], name: str) -> str:
    """An evaluated policy: `after 3 iterations, content 1f0c2a9b4d6e`; a dash where the summary does not say."""
    if (found := (summary.get("checkpoints") or {}).get(name)) is None:
        return DASH
    iteration, content = found.get("iteration"), f"content {found['hash'][:12]}"
    return content if iteration is None else f"after {plural(iteration + 1, 'iteration')}, {content}"


def find_stale(summary: Mapping[str, Any], stored: int) -> str | None:
    """Name the evaluated checkpoint if it is not the newest one: `the checkpoint after 1 of 4 iterations`.

    Args:
        stored: iterations that the run's checkpoints hold; 0: it has none.

    Returns:
        None where it is the newest one, or where nothing was evaluated.
    """
    if not (names := summary.get("policies") or []) or not stored:
        return None
    iteration = (summary.get("checkpoints") or {}).get(names[-1], {}).get("iteration")
    if iteration is None:
        return "an unknown checkpoint"
    if iteration + 1 == stored:
        return None
    if iteration + 1 > stored:
        return f"a checkpoint (after {plural(iteration + 1, 'iteration')}) that is no longer stored"
    what = "the checkpoint" if iteration >= 0 else "the policy that GRPO started from,"
    return f"{what} after {count(iteration + 1)} of {plural(stored, 'iteration')}"


# Rows of an evaluation summary, looked up by policy or baseline; None where it was not evaluated.


Row = dict[str, Any]


def find_row(summary: Mapping[str, Any], policy: str, mode: str) -> Row | None:
    """Row of a policy in a mode, if it was evaluated on any episode."""
    rows = (row for row in summary.get("rows") or [] if row.get("policy") == policy and row.get("mode") == mode)
    return next((row for row in rows if row.get("solve_rate") is not None), None)


def find_baseline(summary: Mapping[str, Any], name: str) -> Row | None:
    """Row of a baseline; the name of the expert's row begins with `teacher` and ends with the kind of expert."""
    if (exact := find_row(summary, name, "-")) is not None or name != "teacher":
        return exact
    names = (str(row.get("policy")) for row in summary.get("rows") or [])
    return next((find_row(summary, one, "-") for one in names if one.startswith("teacher")), None)


def write_rate(row: Mapping[str, Any]) -> str:
    """`66.3 % [62.5–69.8 %]`."""
    return f"{percent(row['solve_rate'])} [{percent_range(row.get('low'), row.get('high'))}]"


def size(count: float) -> str:
    """Bytes as text with a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
