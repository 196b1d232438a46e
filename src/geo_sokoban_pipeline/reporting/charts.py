"""Charts as SVG, drawn by matplotlib; pages and notebooks show them without a script.

Every colour is written as a CSS variable, so that a chart follows the light or dark scheme of the page, or of the
reader's system if it is a file of its own. The same values always give the same SVG.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from markupsafe import Markup

from geo_sokoban_pipeline.formats import percent, significant

# Light and dark value of each colour; parts.css and report.css have the same ones for the page.
_COLOURS = {
    "final": ("#1f66d1", "#6ea8fe"),
    "warm": ("#c2620b", "#f0a04b"),
    "training": ("#7d8793", "#8d97a5"),
    "greedy": ("#0e8a7d", "#4cc9ba"),
    "legal": ("#8a5fbf", "#b794e6"),
    "random": ("#8a929c", "#7c8591"),
    "solver": ("#3d7a2e", "#7fc069"),
    "ink": ("#1c2330", "#e6e9ee"),
    "soft": ("#5b6472", "#9aa4b2"),
    "line": ("#dfe3e8", "#2e343d"),
    "paper": ("#ffffff", "#14171c"),
}
Style = Literal["line", "faint", "dashed", "dots", "bars"]
_INK, _SOFT, _LINE, _PAPER = (_COLOURS[name][0] for name in ("ink", "soft", "line", "paper"))
_TOP, _RIGHT = 10, 14  # pixels beside the axes
_POINTED = 240  # points with a tooltip; longer curves are thinned out
_HEAD = 66  # pixels above a chart in a file of its own


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    Attributes:
        name: for legend and pointer.
        colour: name of the colour.
        points: (x, y), ascending in x.
        spread: (low, high) per point, or empty.
        style: a line, a faint line of raw values, a dashed line, a line with dots, or dots with error bars.
        shift: to the right, in units of x, so that error bars at one x do not cover each other.
    """

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    spread: Sequence[tuple[float, float]] = ()
    style: Style = "line"
    shift: float = 0.0


@dataclass(frozen=True)
class Shape:
    """Size of a chart in its own pixels, and how its values are written.

    Attributes:
        y_range: ends of the vertical axis; None: fitted to the values.
        shares: values are shares in [0, 1], written in percent.
        y_ticks, x_ticks: marks of an axis at most.
    """

    x_name: str
    width: int = 520
    height: int = 250
    y_range: tuple[float, float] | None = None
    shares: bool = False
    y_ticks: int = 5
    x_ticks: int = 8

    def write(self, value: float) -> str:
        """A value as text."""
        return percent(value) if self.shares else significant(value)


@dataclass(frozen=True)
class Chart:
    """Lines over one axis; it is drawn where a page shows it.

    Attributes:
        title: also its text for people who do not see it, with the last values.
        series: later ones are drawn over earlier ones; each has a point.
        note: one line below the title.
    """

    title: str
    series: Sequence[Series]
    shape: Shape
    note: str = ""

    @property
    def svg(self) -> Markup:
        """The drawing."""
        figure, axes = _plot(self.series, self.shape)
        ends = (f"{line.name}: {self.shape.write(line.points[-1][1])} at the end" for line in self.series)
        body = re.sub(r"^.*?<svg.*?>", "", _write_svg(figure, self.title), flags=re.DOTALL).replace("</svg>", "")
        label, pointed = f"{self.title}. {'; '.join(ends)}", _pointed(self.series, self.shape, axes)
        form = Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}{}</svg>')
        return form.format(self.shape.width, self.shape.height, label, Markup(body), pointed)


def make_chart(title: str, series: Sequence[Series], shape: Shape, note: str = "") -> Chart | None:
    """A chart of the series that have points; None where none has one."""
    shown = [line for line in series if line.points]
    return Chart(title, shown, shape, note) if shown else None


def draw_chart_file(title: str, series: Sequence[Series], shape: Shape) -> str:
    """The same as an SVG file that stands alone, with title and legend; faint lines have no legend."""
    figure, axes = _plot([line for line in series if line.points], shape, _HEAD)
    figure.text(14 / shape.width, 1 - 25 / (shape.height + _HEAD), title, fontsize=15, fontweight="bold", color=_INK)
    if handles := [line for line in axes.get_lines() if not line.get_label().startswith("_")]:
        figure.legend(
            handles=handles,
            loc="upper left",
            bbox_to_anchor=(4 / shape.width, 1 - 28 / (shape.height + _HEAD)),
            ncols=3,
            frameon=False,
            labelcolor=_SOFT,
            fontsize=12,
            handlelength=1.5,
            columnspacing=1.5,
        )
    figure.patch.set(facecolor=_PAPER, edgecolor=_LINE, linewidth=1)
    variables = [";".join(f"--{name}:{values[at]}" for name, values in _COLOURS.items()) for at in (0, 1)]
    style = f"<style>svg{{{variables[0]}}}@media (prefers-color-scheme:dark){{svg{{{variables[1]}}}}}</style>"
    return re.sub(r"(<svg.*?>)", rf"\1\n{style}", _write_svg(figure, title), count=1, flags=re.DOTALL)


def _plot(series: Sequence[Series], shape: Shape, head: int = 0) -> tuple[Any, Any]:
    """Figure, with `head` pixels above its one axes, and the axes; a pixel is a point, at 72 of them in an inch."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter, ScalarFormatter

    height, left, bottom = shape.height + head, 44 if shape.width < 400 else 50, 38
    figure = Figure(figsize=(shape.width / 72, height / 72), dpi=72, facecolor="none")
    axes = figure.add_axes(
        (
            left / shape.width,
            bottom / height,
            (shape.width - left - _RIGHT) / shape.width,
            (shape.height - bottom - _TOP) / height,
        ),
        facecolor="none",
    )
    for at, line in enumerate(series):
        _plot_line(axes, line, 2 + at / 100)
    low, high = axes.get_ylim()
    if shape.y_range:
        axes.set_ylim(*shape.y_range)
    elif 0 <= min((y for line in series for _, y in line.points), default=0.0) < 0.3 * high:
        axes.set_ylim(0.0, min(high, 1.0) if shape.shares else high)
    elif shape.shares:
        axes.set_ylim(low, min(high, 1.0))
    xs = [x for line in series for x, _ in line.points] or [0.0, 1.0]
    # Error bars need room at both sides; a single x has no width of its own.
    room = 0.5 if min(xs) == max(xs) or any(line.style == "bars" for line in series) else 0.0
    axes.set_xlim(min(xs) - room, max(xs) + room)
    steps = [1, 2, 2.5, 5, 10]
    axes.set_xlabel(shape.x_name, color=_SOFT, fontsize=12)
    axes.xaxis.set_major_locator(MaxNLocator(shape.x_ticks, steps=steps, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(shape.y_ticks, steps=steps))
    plain = ScalarFormatter(useOffset=False)
    plain.set_powerlimits((-3, 5))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol="\u202f%") if shape.shares else plain)
    axes.yaxis.get_offset_text().set(color=_SOFT, fontsize=11)
    axes.tick_params(length=0, pad=7, labelcolor=_SOFT, labelsize=12)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(_SOFT)
    axes.grid(axis="y", color=_LINE, linewidth=1)
    axes.set_axisbelow(True)
    return figure, axes


def _plot_line(axes: Any, line: Series, order: float) -> None:
    xs, ys = ([*values] for values in zip(*((x + line.shift, y) for x, y in line.points), strict=True))
    common = {"color": _COLOURS[line.colour][0], "clip_on": False, "zorder": order}
    if line.style == "bars" and line.spread:
        errors = [[y - low for y, (low, _) in zip(ys, line.spread, strict=True)]]
        errors.append([high - y for y, (_, high) in zip(ys, line.spread, strict=True)])
        axes.plot(xs, ys, linewidth=1.2, alpha=0.45, label="_", **common)
        axes.errorbar(xs, ys, errors, fmt="o", markersize=7, capsize=4, capthick=1.5, elinewidth=1.5, **common)
        return
    if len(line.spread) > 1:
        lows, highs = zip(*line.spread, strict=True)
        axes.fill_between(xs, lows, highs, **{**common, "alpha": 0.14, "linewidth": 0})
    faint = line.style == "faint"
    axes.plot(
        xs,
        ys,
        linewidth={"faint": 1.0, "dashed": 1.4}.get(line.style, 2.2),
        linestyle=(0, (4, 3)) if line.style == "dashed" else "-",
        alpha=0.38 if faint else 1.0,
        marker="o" if line.style in ("dots", "bars") or len(xs) == 1 else None,
        markersize=7,
        markeredgewidth=0,
        label="_" if faint else line.name,
        solid_capstyle="round",
        **common,
    )


def _write_svg(figure: Any, salt: str) -> str:
    """SVG with real text and colours as variables, without anything that would reach beyond it into a page."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = buffer.getvalue()
    # Styles and clip paths would reach beyond this chart, into the page; nothing here is drawn outside its axes.
    for what in (r"<defs>\s*<style.*?</defs>", r"<defs>\s*<clipPath.*?</defs>", r' clip-path="[^"]*"', r"<g/>"):
        text = re.sub(what, "", text, flags=re.DOTALL)
    text = re.sub(r' id="[\w.]+_[\w]+"| transform="rotate\(-0 [^"]*"', "", text)
    text = re.sub(r' (d|x|y)="[^"]*"', lambda found: re.sub(r"(\.\d)\d+", r"\1", found[0]), text)
    text = re.sub(r"\s*\n\s*", " ", text).replace("> <", "><").strip() + "\n"
    text = re.sub(r"font-family: [^;\"]*", "font-family: system-ui, sans-serif", text)
    text = re.sub(r"font: ([^;\"']*)'[^;\"]*", r"font: \1system-ui, sans-serif", text)
    for name, (light, _) in _COLOURS.items():
        text = text.replace(light, f"var(--{name})")
    return text


def _pointed(series: Sequence[Series], shape: Shape, axes: Any) -> Markup:
    """Strips of the chart that a pointer can be on: a line at their x, and what the page shows beside it.

    `data-at` holds one line for the x and one for each series: colour, name and value with tabs between them.
    """
    rows: dict[float, list[str]] = {}
    for line in series:
        for index, (x, y) in enumerate(line.points):
            text = shape.write(y)
            if line.spread:
                text += f" [{shape.write(line.spread[index][0])} – {shape.write(line.spread[index][1])}]"
            rows.setdefault(x, [f"{shape.x_name}: {x:g}"]).append(f"{line.colour}\t{line.name}\t{text}")
    xs = sorted(rows)[:: -(-len(rows) // _POINTED)]
    places = [float(axes.transData.transform((x, 0.0))[0]) for x in xs]
    box = axes.bbox
    ends = [box.x0, *((left + right) / 2 for left, right in zip(places, places[1:], strict=False)), box.x1]
    top, bottom = shape.height - box.y1, shape.height - box.y0
    strip = Markup('<g class="at" data-at="{}"><path d="M{} {}H{}V{}H{}Z"/><path class="cursor" d="M{} {}V{}"/></g>')
    return Markup("").join(
        strip.format("\n".join(rows[x]), *(f"{value:g}" for value in (left, top, right, bottom, left, at, top, bottom)))
        for x, at, left, right in zip(xs, places, ends, ends[1:], strict=False)
    )
