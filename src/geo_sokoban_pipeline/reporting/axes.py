"""Axes of charts: round tick marks, and the way from values to pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass

from geo_sokoban_pipeline.reporting.formats import number


@dataclass(frozen=True)
class Axis:
    """A straight scale.

    Attributes:
        low, high: values at its ends, low < high.
        start, end: pixels at its ends; a vertical axis runs upwards, from a larger pixel to a smaller one.
    """

    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        """Pixel of a value, with one decimal; values beyond an end are kept at it."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self, most: int, whole: bool = False) -> list[float]:
        """Round values within the axis, about `most` of them.

        Args:
            whole: whole numbers only.
        """
        step = round_step((self.high - self.low) / max(1, most))
        step = max(1.0, math.ceil(step)) if whole else step
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [at * step for at in range(first, last + 1)]


def round_step(least: float) -> float:
    """Smallest of 1, 2, 2.5, 5 times a power of ten that is not below a positive number."""
    power = 10.0 ** math.floor(math.log10(least))
    return next((factor * power for factor in (1, 2, 2.5, 5) if factor * power >= least * (1 - 1e-9)), 10 * power)


def padded_range(values: list[float], share: float = 0.06) -> tuple[float, float]:
    """Ends of an axis that holds all values with room around them; a single value gets room too."""
    low, high = min(values), max(values)
    # Relative to the size of the values: a constant 1e-9 must not be drawn on an axis from -1 to 1.
    room = (high - low) * share or abs(high) * 0.1 or 1.0
    return (0.0 if 0 <= low < high * 0.3 else low - room), high + room


def tick_texts(ticks: list[float]) -> tuple[list[str], str]:
    """Texts of an axis' ticks, and the power of ten that all of them are to be multiplied by, such as `×10⁻⁷`.

    All ticks of an axis are written in one way: thousands as `75k`, very small numbers without their power of ten.
    """
    step = ticks[1] - ticks[0] if len(ticks) > 1 else abs(ticks[0] if ticks else 1.0) or 1.0
    size = max((abs(tick) for tick in ticks), default=0.0)
    if size >= 1e4 and step >= 10:
        return [f"{tick_text(tick / 1000, step / 1000)}k" if abs(tick) >= step / 2 else "0" for tick in ticks], ""
    if 0 < size < 1e-3:
        power = math.floor(math.log10(size))
        raised = str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        return [tick_text(tick / 10.0**power, step / 10.0**power) for tick in ticks], f"×10{raised}"
    return [tick_text(tick, step) for tick in ticks], ""


def tick_text(value: float, step: float) -> str:
    """Text of a tick with as many decimals as its neighbours need."""
    if step >= 1e4 or (value and abs(value) < 1e-3):
        return f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e")
    decimals = 0 if step >= 1 and step == int(step) else min(4, max(1, -math.floor(math.log10(step) + 1e-9)))
    if step * 10**decimals != round(step * 10**decimals):
        decimals += 1
    return number(0.0 if abs(value) < step * 1e-9 else value, decimals)
