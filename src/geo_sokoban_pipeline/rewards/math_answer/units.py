"""Units: what may stand behind a number without being part of it.

An answer is granted whatever its unit, for labels have none. One letter is a unit only where the label holds no letter,
since in algebra it is a factor.
"""

from __future__ import annotations

import re

_LONG = (
    "degrees?|deg|radians?|rad|units?|(?:centi|milli|kilo|deci)?met(?:er|re)s?|inch(?:es)?|feet|foot|yards?|miles?"
    "|[cmkd]m|in|ft|yds?|mi|mph|(?:kilo)?grams?|kg|lbs?|pounds?|hours?|hrs?|min(?:ute)?s?|sec(?:ond)?s?|dollars?|cents?"
    "|lit(?:er|re)s?|gallons?"
)
_SHORT = "[msghL]"
_PREFIX = r"(?:(?:square|sq\.?|cubic|cu\.?)\s*)?"
_POWER = r"(?:\s*(?:\^\s*\{?\s*[23]\s*\}?|squared|cubed))?"


def _pattern(words: str) -> re.Pattern[str]:
    unit = rf"{_PREFIX}(?:{words})\.?{_POWER}"
    # A unit follows a number: a digit, a closed group, a percent sign or π.
    behind = r"(?:(?<=[\d.)}%])|(?<=\\pi))"
    return re.compile(rf"{behind}\s*{unit}(?:\s*(?:/|per)\s*{unit})?$", re.IGNORECASE)


_ANY = _pattern(f"{_LONG}|{_SHORT}")
_UNMISTAKABLE = _pattern(_LONG)


def strip_unit(text: str, *, letters: bool) -> str:
    """A normalised text without the unit at its end.

    Args:
        letters: whether the label holds letters that are factors, so that a single one is no unit.
    """
    return (_UNMISTAKABLE if letters else _ANY).sub("", text).rstrip()
