"""Estimated advantages against the true ones: one table and three charts, on a page and in the docs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.config.credit import CEILING, RECIPE, standard_advantages
from geo_sokoban_pipeline.envs.base import Task
from geo_sokoban_pipeline.formats import DASH, count, number, percent, percent_range
from geo_sokoban_pipeline.reporting.charts import Chart, Series, Shape, draw_chart_file, make_chart
from geo_sokoban_pipeline.reporting.curves import COLOURS
from geo_sokoban_pipeline.reporting.pages import render_page
from geo_sokoban_pipeline.reporting.study_docs import replace_section
from geo_sokoban_pipeline.reporting.study_tables import markdown_table
from geo_sokoban_pipeline.runs.storage import to_json

HEAD = (
    *("advantage", "correlation", "cosine", "sign errors", "zero", "scale"),
    *("state offset", "action bias", "within prompts", "noise"),
)
_PARTS = (
    ("offset", "State offset", "Wrong as an advantage, harmless for the gradient."),
    ("bias", "Action bias", "A bias of the gradient."),
    ("noise", "Noise", "What differs between visits of a state with one response."),
)
# Lines of the charts: few enough to be told apart. Those of the user come before them.
_DRAWN = ("dr_grpo", "turn_return gamma=1.0", "turn_return gamma=1.0 baseline=state", "gigpo", CEILING)
# The mean of the group at the same turn, and that without the own episode: their scales by turn stand in the docs.
_SCALED = ("turn_return gamma=1.0", "turn_return gamma=1.0 leave_one_out=True")
# Rows of the docs beside advantages from continuations: the best baseline possible, one by state and turn, RLOO.
_BESIDE_CONTINUATIONS = (CEILING, "turn_return gamma=1.0 baseline=state_turn leave_one_out=True", "rloo")
_SCALED_HEAD = ("turn", "visits", "scale", "without the own episode", "ratio")


def render_credit(credit: Mapping[str, Any], task: Task) -> str:
    """The page, HTML5 as text; it is self-contained.

    Args:
        credit: see `evaluation.credit.compare_estimators`.
    """
    rows = credit_rows(credit)
    return render_page(
        "credit.html.j2",
        credit=credit,
        words=task.words,
        head=HEAD,
        rows=rows,
        charts=credit_charts(credit),
    )


def credit_rows(credit: Mapping[str, Any]) -> list[list[str]]:
    """Cells of the table below `HEAD`, the highest correlation first."""
    found = credit["estimators"]

    def rank(name: str) -> float:
        return -(found[name]["correlation"]["value"] or 0.0)

    return [
        [
            name,
            _interval(row["correlation"]),
            number(row["cosine"]),
            _shares(row["sign_errors"]),
            percent(row["zeros"]["value"], 0),
            _interval(row["scale"]),
            *(_interval(row[part]) for part in ("offset", "bias", "bias_within", "noise")),
        ]
        for name, row in sorted(found.items(), key=lambda item: rank(item[0]))
    ]


def _interval(figure: Mapping[str, float | None]) -> str:
    if figure["value"] is None:
        return DASH
    return f"{number(figure['value'])} [{number(figure['low'])}, {number(figure['high'])}]"


def _shares(share: Mapping[str, float | None]) -> str:
    return f"{percent(share['value'], 0)} [{percent_range(share['low'], share['high'], 0)}]"


def credit_charts(credit: Mapping[str, Any]) -> list[Chart]:
    """The three parts by the number of the response."""
    found = [make_chart(title, _lines(credit, name), Shape("turn", height=230), note) for name, title, note in _PARTS]
    return [chart for chart in found if chart is not None]


def _drawn(credit: Mapping[str, Any]) -> list[str]:
    """Names of the rows that the charts show."""
    known, standard = credit["estimators"], {*standard_advantages(), RECIPE, CEILING}
    return [name for name in [*(name for name in known if name not in standard), *_DRAWN] if name in known]


def _lines(credit: Mapping[str, Any], part: str) -> list[Series]:
    known = credit["estimators"]
    least = 0.01 * credit["turns"]  # few visits are no curve
    return [
        Series(
            name,
            colour,
            [
                (row["turn"], row[part]["value"])
                for row in known[name]["by_turn"]
                if row["visits"] >= least and row[part]["value"] is not None
            ],
            style="dots",
        )
        for colour, name in zip(COLOURS, _drawn(credit), strict=False)
    ]


def render_credit_docs(credit: Mapping[str, Any], docs: Path, name: str = "credit") -> dict[Path, str]:
    """Texts of the files that follow from a table: its results, the tables of `credit.md`, the figures.

    The results have numbers by turn only of the rows that need them here.

    Args:
        name: `credit_vine`: a table that was made with advantages from continuations gives a few rows, and no figures.
    """
    page, is_whole = docs / "credit.md", name == "credit"
    shown = list(credit["estimators"]) if is_whole else [RECIPE, *_BESIDE_CONTINUATIONS]
    by_turn = {*_drawn(credit), *_SCALED} if is_whole else set()
    known = {one: credit["estimators"][one] for one in shown}
    known = {one: {**row, "by_turn": row["by_turn"] if one in by_turn else []} for one, row in known.items()}
    kept = {**credit, "estimators": known}
    text = replace_section(page.read_text(encoding="utf-8"), name, markdown_table(HEAD, credit_rows(kept)), page)
    found = {docs / "results" / f"{name}.json": to_json(kept)}
    if is_whole:
        text = replace_section(text, "credit:scales", markdown_table(_SCALED_HEAD, _scale_rows(credit)), page)
        for part, title, _ in _PARTS:
            lines, shape = _lines(credit, part), Shape("turn", 760, 300)
            found[docs / "img" / f"credit_{part}.svg"] = draw_chart_file(f"{title}, by turn", lines, shape)
    return {**found, page: text}


def _scale_rows(credit: Mapping[str, Any]) -> list[list[str]]:
    """Cells below `_SCALED_HEAD`."""
    own, without = (credit["estimators"][name]["by_turn"] for name in _SCALED)
    return [
        [
            str(row["turn"]),
            count(row["visits"]),
            _interval(row["scale"]),
            _interval(other["scale"]),
            number(row["scale"]["value"] / other["scale"]["value"]),
        ]
        for row, other in zip(own, without, strict=True)
        if row["scale"]["value"] is not None and other["scale"]["value"]
    ]


def write_credit_docs(credit: Mapping[str, Any], docs: Path, name: str = "credit") -> None:
    """Write what `render_credit_docs` makes."""
    for path, text in render_credit_docs(credit, docs, name).items():
        path.write_text(text, encoding="utf-8")
