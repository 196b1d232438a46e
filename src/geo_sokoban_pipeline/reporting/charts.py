"""Axes of charts: round tick marks, and the way from values to pixels."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from markupsafe import Markup, escape

from geo_sokoban_pipeline.reporting.formats import number, percent, significant


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


# Charts as inline SVG: no script is needed to see them, and colours come from the page's style sheet.


_TOP, _RIGHT = 10, 14
_DOT = 3.5  # radius in pixels
_CAP = 4  # half width of an error bar's end


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    Attributes:
        name: for legend and pointer.
        colour: CSS class of the colour (`s-<colour>` in parts.css).
        points: (x, y), ascending in x.
        spread: (low, high) per point, or empty.
        style: a line, a faint line of raw values, a line with dots, or dots with error bars.
        shift: pixels to the right, so that error bars at one x do not cover each other.
    """

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    spread: Sequence[tuple[float, float]] = ()
    style: Literal["line", "faint", "dots", "bars"] = "line"
    shift: float = 0.0


@dataclass(frozen=True)
class Chart:
    """A drawn chart: title, picture, what a pointer shows, (name, colour, style) per series."""

    title: str
    svg: Markup
    hover: dict[str, Any]
    legend: Sequence[tuple[str, str, str]]
    note: str = ""


@dataclass(frozen=True)
class Shape:
    """Size of a chart in its own pixels, and how its values are written.

    Attributes:
        y_range: ends of the vertical axis; None: fitted to the values.
        shares: values are shares in [0, 1], written in percent.
    """

    x_name: str
    width: int = 520
    height: int = 250
    y_range: tuple[float, float] | None = None
    shares: bool = False
    whole_x: bool = True
    left: int = 50
    bottom: int = 38
    y_ticks: int = 5
    x_ticks: int = field(default=8)

    def write(self, value: float) -> str:
        """A value as text."""
        return percent(value) if self.shares else significant(value)


def draw_chart(title: str, series: Sequence[Series], shape: Shape, note: str = "") -> Chart | None:
    """Draw lines over one axis; None where no series has a point.

    Args:
        title: also the picture's text for people who do not see it, with the last values.
        series: later ones are drawn over earlier ones; those without points are left out.
        note: one line below the title.
    """
    series = [line for line in series if line.points]
    if not series:
        return None
    xs = [x for line in series for x, _ in line.points]
    ys = [y for line in series for _, y in line.points] + [
        end for line in series for ends in line.spread for end in ends
    ]
    low, high = shape.y_range or padded_range(ys)
    if shape.shares:
        high = min(high, 1.0)
    single = min(xs) == max(xs)
    # Error bars need room at both sides; a single x has no width of its own.
    room = 0.5 if single or any(line.style == "bars" for line in series) else 0.0
    x_axis = Axis(min(xs) - room, max(xs) + room, shape.left, shape.width - _RIGHT)
    y_axis = Axis(low, high, shape.height - shape.bottom, _TOP)
    parts = [
        *_draw_axes(x_axis, y_axis, shape),
        *(part for line in series for part in _draw_series(line, x_axis, y_axis)),
    ]
    label = f"{title}. " + "; ".join(f"{line.name}: {shape.write(line.points[-1][1])} at the end" for line in series)
    svg = Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        shape.width, shape.height, label, Markup("").join(parts)
    )
    legend = [(line.name, line.colour, line.style) for line in series]
    return Chart(title, svg, _hover(series, x_axis, shape), legend, note)


def smooth(points: Sequence[tuple[float, float]], window: int) -> list[tuple[float, float]]:
    """Running mean over `window` points, an odd number; at the ends over those that there are."""
    half = window // 2
    ys = [y for _, y in points]
    return [(x, statistics.fmean(ys[max(0, at - half) : at + half + 1])) for at, (x, _) in enumerate(points)]


def _draw_axes(x_axis: Axis, y_axis: Axis, shape: Shape) -> list[Markup]:
    left, right, bottom = shape.left, shape.width - _RIGHT, shape.height - shape.bottom
    y_ticks = y_axis.ticks(shape.y_ticks)
    step = y_ticks[1] - y_ticks[0] if len(y_ticks) > 1 else abs(y_axis.high - y_axis.low)
    digits = 0 if step >= 0.00999 else 1
    texts, power = ([percent(y, digits) for y in y_ticks], "") if shape.shares else tick_texts(y_ticks)
    parts = []
    for tick, text in zip(y_ticks, texts, strict=True):
        y = y_axis.place(tick)
        parts.append(_tag("line", "grid", x1=left, x2=right, y1=y, y2=y))
        parts.append(_tag("text", "tick end", text, x=left - 7, y=y + 4))
    if power:
        parts.append(_tag("text", "tick", power, x=left + 4, y=_TOP + 4))
    x_ticks = x_axis.ticks(shape.x_ticks, shape.whole_x)
    x_step = x_ticks[1] - x_ticks[0] if len(x_ticks) > 1 else 1.0
    parts += [
        _tag("text", "tick mid", tick_text(tick, x_step), x=x_axis.place(tick), y=bottom + 16) for tick in x_ticks
    ]
    parts.append(_tag("line", "axis", x1=left, x2=right, y1=bottom, y2=bottom))
    parts.append(_tag("text", "tick mid name", shape.x_name, x=(left + right) / 2, y=bottom + 33))
    return parts


def _draw_series(line: Series, x_axis: Axis, y_axis: Axis) -> list[Markup]:
    places = [(x_axis.place(x) + line.shift, y_axis.place(y)) for x, y in line.points]
    spread = [(y_axis.place(low), y_axis.place(high)) for low, high in line.spread]
    colour = f"s-{line.colour}"
    parts = []
    if spread and line.style == "bars":
        parts += [part for (x, _), ends in zip(places, spread, strict=True) for part in _error_bar(x, *ends, colour)]
    elif len(spread) > 1:
        upper = [(x, high) for (x, _), (_, high) in zip(places, spread, strict=True)]
        lower = [(x, low) for (x, _), (low, _) in zip(places, spread, strict=True)]
        parts.append(_tag("polygon", f"band {colour}", points=_path([*upper, *reversed(lower)])))
    if len(places) > 1:
        parts.append(_tag("polyline", f"{line.style} {colour}", points=_path(places)))
    if line.style in ("dots", "bars") or len(places) == 1:
        parts += [_tag("circle", f"dot {colour}", cx=x, cy=y, r=_DOT) for x, y in places]
    return parts


def _error_bar(x: float, low: float, high: float, colour: str) -> list[Markup]:
    ends = [_tag("line", f"whisker {colour}", x1=x - _CAP, x2=x + _CAP, y1=y, y2=y) for y in (low, high)]
    return [_tag("line", f"whisker {colour}", x1=x, x2=x, y1=low, y2=high), *ends]


def _path(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in places)


def _tag(name: str, style: str, text: str | None = None, **attributes: float | str) -> Markup:
    written = Markup("").join(
        Markup(' {}="{}"').format(key, f"{value:g}" if isinstance(value, float) else value)
        for key, value in attributes.items()
    )
    body = Markup("/>") if text is None else Markup(">{}</{}>").format(escape(text), Markup(name))
    return Markup('<{} class="{}"{}{}').format(Markup(name), style, written, body)


def _hover(series: Sequence[Series], x_axis: Axis, shape: Shape) -> dict[str, Any]:
    """What a pointer shows: per x its place, its name, and [series, value] of every series that has one there."""
    rows: dict[float, list[tuple[int, str]]] = {}
    for at, line in enumerate(series):
        for index, (x, y) in enumerate(line.points):
            text = shape.write(y)
            if line.spread:
                text += f" [{shape.write(line.spread[index][0])} – {shape.write(line.spread[index][1])}]"
            rows.setdefault(x, []).append((at, text))
    return {
        "top": _TOP,
        "bottom": shape.height - shape.bottom,
        "names": [line.name for line in series],
        "colours": [line.colour for line in series],
        "x": [x_axis.place(x) for x in sorted(rows)],
        "labels": [f"{shape.x_name}: {x:g}" for x in sorted(rows)],
        "rows": [rows[x] for x in sorted(rows)],
    }
