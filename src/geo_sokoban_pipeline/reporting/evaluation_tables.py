"""The evaluation as tables and a chart: one row per policy and mode, and solve rates by optimal length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from geo_sokoban_pipeline.reporting.charts import Chart, Series, Shape, draw_chart
from geo_sokoban_pipeline.reporting.formats import DASH, is_number, number, percent, percent_range
from geo_sokoban_pipeline.reporting.headline import find_row
from geo_sokoban_pipeline.reporting.labels import policy_colour, policy_label, row_label

_SHIFT = 7.0  # pixels between the error bars of two policies at one length


@dataclass(frozen=True)
class EvaluationRow:
    """One line of the table: texts, and the interval in percent for its bar (None without one)."""

    label: str
    colour: str
    is_policy: bool
    episodes: str
    rate: str
    interval: str
    bar: tuple[float, float, float] | None
    mean_return: str
    detour: str
    invalid: str
    pass_at_k: list[str]


@dataclass(frozen=True)
class LengthTable:
    """Solve rates by optimal length: the policies' names, and (length, [(rate, interval, episodes)]) per line."""

    names: list[str]
    lines: list[tuple[int, list[tuple[str, str, str]]]]


def evaluation_rows(summary: Mapping[str, Any]) -> tuple[list[EvaluationRow], list[str]]:
    """Lines of the evaluation table, and the values of k for which some row has pass@k."""
    rows = list(summary.get("rows") or [])
    ks = sorted({k for row in rows for k in row.get("pass_at_k") or {}}, key=int)
    policies = set(summary.get("policies") or [])
    return [_line(row, ks, row.get("policy") in policies) for row in rows], ks


def _line(row: Mapping[str, Any], ks: list[str], is_policy: bool) -> EvaluationRow:
    rate, low, high = row.get("solve_rate"), row.get("low"), row.get("high")
    known = is_number(rate) and is_number(low) and is_number(high)
    passes = row.get("pass_at_k") or {}
    return EvaluationRow(
        label=row_label(str(row.get("policy", DASH)), str(row.get("mode", "-"))),
        colour=policy_colour(str(row.get("policy", ""))),
        is_policy=is_policy,
        episodes=number(row.get("episodes"), 0),
        rate=percent(rate),
        interval=percent_range(low, high),
        bar=(100 * low, 100 * rate, 100 * high) if known else None,  # type: ignore[operator]
        mean_return=number(row.get("mean_return")),
        detour=number(row.get("steps_over_optimal")),
        invalid=percent(row.get("invalid_share")),
        pass_at_k=[percent(passes.get(k)) for k in ks],
    )


def length_rows(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows that are compared by length: each policy sampled, then random legal moves."""
    chosen = [find_row(summary, str(name), "sampled") for name in summary.get("policies") or []]
    chosen.append(find_row(summary, "random_legal", "-"))
    return [row for row in chosen if row and row.get("by_length")]


def length_chart(summary: Mapping[str, Any]) -> Chart | None:
    """Solve rate by optimal length with Wilson intervals."""
    rows = length_rows(summary)
    series = []
    for at, row in enumerate(rows):
        cells = [cell for cell in row["by_length"] if is_number(cell.get("solve_rate"))]
        series.append(
            Series(
                name=row_label(row["policy"], row["mode"]),
                colour=policy_colour(row["policy"]),
                points=[(float(cell["length"]), float(cell["solve_rate"])) for cell in cells],
                spread=[(float(cell["low"]), float(cell["high"])) for cell in cells],
                style="bars",
                shift=(at - (len(rows) - 1) / 2) * _SHIFT,
            )
        )
    shape = Shape("fewest moves to solve the level", width=560, height=300, y_range=(0.0, 1.0), shares=True, x_ticks=12)
    return draw_chart("Solve rate by optimal length", series, shape, "Bars are 95 % Wilson intervals.")


def length_table(summary: Mapping[str, Any]) -> LengthTable | None:
    """The same as a table; None where no row knows lengths."""
    rows = length_rows(summary)
    by_row = [{cell["length"]: cell for cell in row["by_length"]} for row in rows]
    lengths = sorted({length for cells in by_row for length in cells})
    if not lengths:
        return None
    names = [policy_label(row["policy"]) for row in rows]
    return LengthTable(names, [(length, [_cell(cells.get(length)) for cells in by_row]) for length in lengths])


def _cell(cell: Mapping[str, Any] | None) -> tuple[str, str, str]:
    if cell is None:
        return DASH, "", ""
    counts = f"{cell.get('solved')} of {cell.get('episodes')}"
    return percent(cell.get("solve_rate")), percent_range(cell.get("low"), cell.get("high"), 0), counts
