"""The figure of a study: the rate on validation prompts over CPU-seconds, as an SVG file that stands alone.

It brings its own colours, for light and dark, and a background, so that it reads on any page that shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from markupsafe import Markup

from geo_sokoban_pipeline.reporting.charts import Series, Shape, draw_chart
from geo_sokoban_pipeline.reporting.labels import policy_label
from geo_sokoban_pipeline.reporting.study_rates import find_rate, mean_share
from geo_sokoban_pipeline.reporting.study_worlds import world_of

Points = list[tuple[float, float]]
_WIDTH, _CHART_HEIGHT, _HEAD, _LEGEND_LINE = 760, 360, 62, 18
CHART_SIZE = (_WIDTH - 20, _CHART_HEIGHT)
_GRID = 24  # points of a mean curve
# Stage and class of its colour.
_STAGES = (("warm_start", "warm"), ("control_optimal", "solver"), ("control_teacher", "greedy"), ("grpo", "final"))
_STYLE = """
.paper{fill:#fff;stroke:#dfe3e8}text{font:12px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;fill:#5b6472}
.title{font-size:15px;font-weight:600;fill:#1c2330}.tick.end{text-anchor:end}.tick.mid{text-anchor:middle}
.grid{stroke:#dfe3e8}.axis{stroke:#5b6472}polyline{fill:none;stroke:var(--c);stroke-width:2.4;stroke-linejoin:round}
.faint{stroke-width:1.1;opacity:.45}.dot{fill:var(--c)}.key{stroke:var(--c);stroke-width:3}
.s-final{--c:#1f66d1}.s-warm{--c:#c2620b}.s-greedy{--c:#0e8a7d}.s-solver{--c:#3d7a2e}.s-legal{--c:#8a5fbf}
.s-training{--c:#7d8793}.s-legal,.s-training{stroke-dasharray:6 4;stroke-width:1.4}
@media (prefers-color-scheme:dark){.paper{fill:#14171c;stroke:#2e343d}text{fill:#9aa4b2}.title{fill:#e6e9ee}
.grid{stroke:#2e343d}.axis{stroke:#9aa4b2}.s-final{--c:#6ea8fe}.s-warm{--c:#f0a04b}.s-greedy{--c:#4cc9ba}
.s-solver{--c:#7fc069}.s-legal{--c:#b794e6}.s-training{--c:#8d97a5}}
"""


def draw_study(results: Mapping[str, Any]) -> str:
    """SVG of a study's curves; lines are means over the seeds, faint lines the seeds themselves.

    Dashed lines are players on the evaluation prompts.
    """
    seeds, world = results["seeds"], world_of(results)
    series, legend = [], []
    for stage, colour in _STAGES:
        name = "GRPO" if stage == "grpo" else policy_label(stage, world.world)
        curves = [curve for seed in seeds if len(curve := stage_curve(seed, stage)) > 1]
        if curves:
            series += [Series(name, colour, curve, style="faint") for curve in curves if len(curves) > 1]
            mean = mean_curve(curves)
            series += [Series(name, colour, mean)] if mean else []
            legend.append((name, colour))
    end = max((x for line in series for x, _ in line.points), default=1.0)
    for player, colour in world.dashed:
        share = mean_share([find_rate(seed["rows"], player, "-") for seed in seeds])
        if share is not None:
            name = policy_label(player, world.world)
            series.insert(0, Series(name, colour, [(0.0, share), (end, share)]))
            legend.append((name, colour))
    top = max((y for line in series for _, y in line.points), default=1.0)
    shape = Shape("CPU-seconds of training", *CHART_SIZE, (0.0, min(1.0, top + 0.08)), shares=True, left=46)
    words = world.words
    chart = draw_chart(f"{words.rate.capitalize()} on validation {words.units}, sampled", series, shape)
    played = f"{results['levels']['validation_count']} validation {words.units}"
    title = f"{results['title']}: {words.rate} on {played}, sampled"
    return frame_chart(title, Markup("") if chart is None else chart.svg, legend)


def stage_curve(seed: Mapping[str, Any], stage: str) -> Points:
    """(CPU-seconds since the start of the warm start, sampled solve rate) of one stage of a seed.

    Loop and controls begin where the warm start ends, in time and in rate.
    """
    warm: Points = [(row[0], row[1]) for row in seed["curves"].get("warm_start", [])]
    if stage == "warm_start":
        return warm
    offset = seed["cpu_seconds"]["warm_start"]
    curve: Points = [(offset + row[0], row[1]) for row in seed["curves"].get(stage, [])]
    begins_with_warm_start = bool(curve) and curve[0][0] <= offset
    return curve if begins_with_warm_start or not curve else [*warm[-1:], *curve]


def mean_curve(curves: Sequence[Points]) -> Points:
    """Mean of curves at equal x, over the span that all of them cover; `[]` where there is none."""
    if len(curves) == 1:
        return list(curves[0])
    begin, end = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    if begin >= end:
        return []
    spots = [begin + (end - begin) * step / _GRID for step in range(_GRID + 1)]
    return [(x, fmean(_at(curve, x) for curve in curves)) for x in spots]


def _at(curve: Points, x: float) -> float:
    """Height of a curve at an x within its span, by straight lines between its points."""
    for (left, low), (right, high) in zip(curve, curve[1:], strict=False):
        if x <= right:
            return low + (x - left) / (right - left) * (high - low) if right > left else high
    return curve[-1][1]


def frame_chart(title: str, chart: Markup, legend: Sequence[tuple[str, str]]) -> str:
    """SVG file of a chart with background, title and legend.

    Args:
        chart: an `<svg>` 740 by 360 pixels in size.
        legend: (name, class of the colour) of each line.
    """
    keys, x, line = [], 14.0, 0
    for name, colour in legend:
        width = 40 + 6.6 * len(name)
        if x + width > _WIDTH - 10:
            x, line = 14.0, line + 1
        y = 46 + _LEGEND_LINE * line
        keys.append(
            Markup('<line class="key s-{}" x1="{}" x2="{}" y1="{}" y2="{}"/><text x="{}" y="{}">{}</text>').format(
                colour, round(x), round(x) + 18, y - 4, y - 4, round(x) + 24, y, name
            )
        )
        x += width
    head = _HEAD + _LEGEND_LINE * line
    height = head + _CHART_HEIGHT + 4
    return str(
        Markup(
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" height="{h}">\n'
            '<style>{style}</style>\n<rect class="paper" x="0.5" y="0.5" width="{rw}" height="{rh}" rx="8"/>\n'
            '<text class="title" x="14" y="25">{title}</text>\n{keys}\n'
            '<svg x="8" y="{head}" width="{cw}" height="{ch}">{chart}</svg>\n</svg>\n'
        ).format(
            w=_WIDTH,
            h=height,
            style=Markup(_STYLE),
            rw=_WIDTH - 1,
            rh=height - 1,
            title=title,
            keys=Markup("\n").join(keys),
            head=head,
            cw=_WIDTH - 20,
            ch=_CHART_HEIGHT,
            chart=chart,
        )
    )
