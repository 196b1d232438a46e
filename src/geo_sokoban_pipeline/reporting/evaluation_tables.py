"""The evaluation as tables and a chart: one row per policy and mode, and rates by the kind of prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from geo_sokoban_pipeline.reporting.charts import Chart, Series, Shape, draw_chart
from geo_sokoban_pipeline.reporting.formats import DASH, is_number, number, percent, percent_range
from geo_sokoban_pipeline.reporting.labels import policy_colour, policy_label, row_label
from geo_sokoban_pipeline.reporting.run_worlds import Column, Cut, RunWorld, columns_of, run_world
from geo_sokoban_pipeline.reporting.summaries import find_player, find_row
from geo_sokoban_pipeline.tasks import World

_SHIFT = 7.0  # pixels between the error bars of two policies at one length


@dataclass(frozen=True)
class EvaluationRow:
    """One line of the table: texts, the interval in percent for its bar (None without one), the world's own columns."""

    label: str
    colour: str
    is_policy: bool
    episodes: str
    rate: str
    interval: str
    bar: tuple[float, float, float] | None
    mean_return: str
    further: list[str]
    pass_at_k: list[str]


@dataclass(frozen=True)
class KindTable:
    """Rates by the kind of prompt: what it is by, the policies, and (kind, [(rate, interval, episodes)]) per line."""

    by: str
    names: list[str]
    lines: list[tuple[Any, list[tuple[str, str, str]]]]


def evaluation_rows(summary: Mapping[str, Any]) -> tuple[list[EvaluationRow], list[str]]:
    """Lines of the evaluation table, and the values of k for which some row has pass@k."""
    rows = list(summary.get("rows") or [])
    ks = sorted({k for row in rows for k in row.get("pass_at_k") or {}}, key=int)
    policies, columns = set(summary.get("policies") or []), columns_of(summary)
    world = run_world(summary.get("task")).world
    return [_line(row, ks, row.get("policy") in policies, world, columns) for row in rows], ks


def evaluation_columns(summary: Mapping[str, Any]) -> list[str]:
    """Headings of the columns that are the world's own."""
    return [column.heading for column in columns_of(summary)]


def _line(
    row: dict[str, Any], ks: list[str], is_policy: bool, world: World, columns: Sequence[Column]
) -> EvaluationRow:
    rate, low, high = row.get("solve_rate"), row.get("low"), row.get("high")
    known = is_number(rate) and is_number(low) and is_number(high)
    passes = row.get("pass_at_k") or {}
    return EvaluationRow(
        label=row_label(str(row.get("policy", DASH)), str(row.get("mode", "-")), world),
        colour=policy_colour(str(row.get("policy", ""))),
        is_policy=is_policy,
        episodes=number(row.get("episodes"), 0),
        rate=percent(rate),
        interval=percent_range(low, high),
        bar=(100 * low, 100 * rate, 100 * high) if known else None,  # type: ignore[operator]
        mean_return=number(row.get("mean_return")),
        further=[column.write(row) for column in columns],
        pass_at_k=[percent(passes.get(k)) for k in ks],
    )


def reply_table(summary: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """How was answered: headings, and (who, cells) per line; nothing where the world has no such table."""
    columns, world = columns_of(summary, replies=True), run_world(summary.get("task")).world
    rows = list(summary.get("rows") or []) if columns else []
    labels = [row_label(str(row.get("policy", DASH)), str(row.get("mode", "-")), world) for row in rows]
    lines = [(label, [column.write(row) for column in columns]) for label, row in zip(labels, rows, strict=True)]
    return [column.heading for column in columns], lines


def kind_rows(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows that are compared by kind: each policy sampled, then the world's rivals."""
    world = run_world(summary.get("task"))
    chosen = [find_row(summary, str(name), "sampled") for name in summary.get("policies") or []]
    chosen += [find_player(summary, name) for name in world.rivals]
    return [row for row in chosen if row and any(cut.cells(row) for cut in world.cuts)]


def length_chart(summary: Mapping[str, Any]) -> Chart | None:
    """Solve rate by optimal length with Wilson intervals; None where the task knows no lengths."""
    rows = [row for row in kind_rows(summary) if row.get("by_length")]
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
    if len({x for line in series for x, _ in line.points}) < 2:
        return None
    shape = Shape("fewest moves to solve the level", width=560, height=300, y_range=(0.0, 1.0), shares=True, x_ticks=12)
    return draw_chart("Solve rate by optimal length", series, shape, "Bars are 95 % Wilson intervals.")


def length_table(summary: Mapping[str, Any]) -> KindTable | None:
    """The first table by kind; None where no row knows kinds."""
    tables = kind_tables(summary)
    return tables[0] if tables else None


def kind_tables(summary: Mapping[str, Any]) -> list[KindTable]:
    """Tables by kind, without those of a single line, which say nothing new."""
    world, rows = run_world(summary.get("task")), kind_rows(summary)
    return [table for cut in world.cuts if len((table := _kind_table(rows, cut, world)).lines) > 1]


def _kind_table(rows: list[dict[str, Any]], cut: Cut, world: RunWorld) -> KindTable:
    by_row = [cut.cells(row) for row in rows]
    kinds = sorted({kind for cells in by_row for kind in cells})
    names = [policy_label(row["policy"], world.world) for row in rows]
    lines = [(write_kind(kind), [_cell(cells.get(kind)) for cells in by_row]) for kind in kinds]
    return KindTable(cut.by, names, lines)


def write_kind(kind: Any) -> Any:
    """A kind of prompt for readers: names of families without underscores."""
    return kind.replace("_", " ") if isinstance(kind, str) else kind


def _cell(cell: Mapping[str, Any] | None) -> tuple[str, str, str]:
    if cell is None:
        return DASH, "", ""
    counts = f"{cell.get('solved')} of {cell.get('episodes')}"
    return percent(cell.get("solve_rate")), percent_range(cell.get("low"), cell.get("high"), 0), counts
