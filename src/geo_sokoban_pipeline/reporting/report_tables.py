"""Tables of a report: evaluation, time, data, parameters.

Cells are texts; a missing number is a dash, never 0.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from geo_sokoban_pipeline.envs.base import Column, Task
from geo_sokoban_pipeline.envs.report import DataTable, TaskReport
from geo_sokoban_pipeline.formats import (
    DASH,
    count,
    duration,
    find_baseline,
    find_row,
    is_number,
    joined,
    leaves,
    number,
    percent,
    percent_range,
)
from geo_sokoban_pipeline.reporting.charts import Chart, Series, Shape, draw_chart
from geo_sokoban_pipeline.tasks import task_or_plain

# Metric, name, whether it is a part of the line above it.
_PHASES = (
    ("perf/rollout_time", "Rollout", False),
    ("perf/engine_time", "of it: engine (generate, encode images)", True),
    ("perf/env_time", "of it: environment (steps, images)", True),
    ("perf/update_time", "Update", False),
    ("perf/eval_time", "Validation", False),
    ("perf/save_time", "Saving (all files, MLflow)", False),
    ("perf/write_time", "of it: episodes (tables, check, file)", True),
)
_STEP, _SAVED = "perf/step_time", "perf/save_time"
_AUDIT_LINES, _AUDIT_EPISODES = 6, 20
_SHIFT = 0.12  # between the error bars of two policies at one difficulty


@dataclass(frozen=True)
class PhaseTime:
    """One phase: mean seconds of an iteration, its share of the iteration in percent, and its sum over the run."""

    name: str
    is_part: bool
    mean: str
    share: str
    bar: float
    total: str


def timings(rows: Sequence[Mapping[str, Any]]) -> list[PhaseTime]:
    """Phases of a mean iteration, the rest, and the whole iteration last; [] if nothing was timed.

    A phase that only some iterations have (validation) counts as 0 seconds in the others, so that shares add up. Each
    row has the time of saving the previous iteration; that of the last one is not recorded.
    """
    timed = [row for row in rows if is_number(row.get(_STEP))]
    whole = sum(row[_STEP] + (row.get(_SAVED) or 0.0) for row in timed)
    if not timed or whole <= 0:
        return []
    found = []
    rest = whole
    for metric, name, is_part in _PHASES:
        values = [row[metric] for row in timed if is_number(row.get(metric))]
        if values:
            seldom = metric == "perf/eval_time" and len(values) < len(timed)
            shown = f"{name} ({len(values)} of {len(timed)} iterations)" if seldom else name
            found.append(_timing(shown, sum(values), whole, len(timed), is_part))
            rest -= 0.0 if is_part else sum(values)
    if found and rest > 0:
        found.append(_timing("Other", rest, whole, len(timed)))
    return [*found, _timing("Iteration", whole, whole, len(timed))]


def _timing(name: str, total: float, whole: float, iterations: int, is_part: bool = False) -> PhaseTime:
    share = total / whole
    bar = round(100 * min(1.0, share), 1)
    return PhaseTime(name, is_part, duration(total / iterations), percent(share), bar, duration(total))


@dataclass(frozen=True)
class AuditRow:
    """One check of an audit, over all that it has looked at.

    Attributes:
        checked: how many episodes, groups, iterations or prompts.
        findings: number of broken guarantees.
        lines: the first findings; without findings the notes, both with the entry that they are about.
        unshown: how many more of them there are.
        episodes: ids of the first episodes that the findings are about, each with the address of its page or None.
        further: how many more of them there are.
    """

    name: str
    checked: int
    findings: int
    lines: list[str]
    unshown: int
    episodes: list[tuple[str, str | None]]
    further: int


@dataclass(frozen=True)
class AuditTable:
    """An audit of the run.

    Attributes:
        whole: whether it looked at all episodes, the files and the log-probs, else at a sample.
        iterations: of the run, when it was audited; None: not known.
        stale: whether the run has gone on since.
        findings: number of broken guarantees.
    """

    whole: bool
    iterations: int | None
    stale: bool
    findings: int
    rows: list[AuditRow]


def audit_tables(
    whole: Mapping[str, Any] | None,
    sample: Mapping[str, Any] | None,
    iterations: int,
    address: Callable[[str], str | None] = lambda _: None,
) -> list[AuditTable]:
    """The audits that a report shows: the whole one, and where there is none of all iterations, the sample.

    Args:
        whole: of the pipeline `audit_<task>`; None: none was made.
        sample: of the end of the training; None: none was made.
        iterations: committed ones of the run.
        address: of an episode's page; None: it has none.
    """
    found = []
    if whole is not None:
        seen = whole.get("iterations", 0)
        found.append(AuditTable(True, seen, seen < iterations, whole["findings"], audit_rows(whole, address)))
    if sample is not None and (not found or found[0].stale):
        found.append(AuditTable(False, None, False, sample["findings"], audit_rows(sample, address)))
    return found


def audit_rows(audit: Mapping[str, Any], address: Callable[[str], str | None] = lambda _: None) -> list[AuditRow]:
    """The checks of an audit, those of several entries as one row."""
    grouped: dict[str, list[Mapping[str, Any]]] = {}
    for check in audit["checks"]:
        grouped.setdefault(check["check"], []).append(check)
    rows = []
    for name, checks in grouped.items():
        kind = "findings" if any(check["findings"] for check in checks) else "notes"
        lines = [
            f"{check['subject'].partition('.')[2]}: {line}".removeprefix(": ")
            for check in checks
            for line in check[kind]
        ]
        found = sum(len(check["findings"]) for check in checks)
        episodes = list(dict.fromkeys(episode for check in checks for episode in check["episodes"]))
        rows.append(
            AuditRow(
                name,
                sum(check["checked"] for check in checks),
                found,
                lines[:_AUDIT_LINES],
                max(0, len(lines) - _AUDIT_LINES),
                [(episode, address(episode)) for episode in episodes[:_AUDIT_EPISODES]],
                max(0, len(episodes) - _AUDIT_EPISODES),
            )
        )
    return rows


def data_table(report: Mapping[str, Any] | None, task: Task) -> DataTable | None:
    """Contents of the splits, with notes."""
    if not report or not report.get("splits"):
        return None
    return replace(task.report.data_table(report["splits"]), notes=list(_data_notes(report, task.report)))


def _data_notes(report: Mapping[str, Any], words: TaskReport) -> Iterator[str]:
    if report.get("split_note"):
        yield str(report["split_note"])
    overlaps = report.get("overlaps") or {}
    if overlaps:
        shared = joined([f"{count(number)} {name}" for name, number in overlaps.items()])
        yield f"Counted again for this report{words.equal}: {shared} occur in more than one split."
    rejected = report.get("rows_rejected")
    if rejected:
        reasons = joined([f"{reason} ({number})" for reason, number in (report.get("rejected_reasons") or {}).items()])
        yield f"{count(rejected)} of {count(report.get('rows_read'))} rows were rejected: {reasons}."
    elif report.get("rows_read") is not None:
        yield f"{count(report['rows_read'])} rows read from source “{report.get('source', 'unknown')}”, none rejected."
    for name, what in (("rows_excluded", "left out because of overlaps of splits"), ("rows_repaired", "repaired")):
        if report.get(name):
            yield f"{count(report[name])} rows were {what}."
    yield from words.data_notes(report)


def parameter_tables(parameters: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """(section, [(name, value)]) per top-level section; single values form the first one, `run`.

    Nested names are joined by dots; values are JSON.
    """
    single = [(name, _written(value)) for name, value in parameters.items() if not isinstance(value, Mapping)]
    sections = [
        (name, [(path, _written(leaf)) for path, leaf in leaves(value)])
        for name, value in parameters.items()
        if isinstance(value, Mapping)
    ]
    return [*([("run", single)] if single else []), *sections]


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


# The evaluation as tables and a chart: one row per policy and mode, and rates by the kind of prompt.


@dataclass(frozen=True)
class EvaluationRow:
    """One line of the table: texts, the interval in percent for its bar (None without one), the task's own columns."""

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


def columns_of(summary: Mapping[str, Any], table: str = "scores") -> list[Column]:
    """The task's own columns of one table of an evaluation; columns without any value are left out."""
    single, rows = summary.get("turn_limit") == 1, summary.get("rows") or []
    return [
        column
        for column in task_or_plain(summary.get("task")).columns
        if column.table == table
        and not (single and column.several)
        and any(_cell_text(column, row) != DASH for row in rows)
    ]


def notes_of(summary: Mapping[str, Any]) -> list[str]:
    """Explanations of the columns of a summary's tables."""
    shown = [*columns_of(summary), *columns_of(summary, "responses")]
    notes = [(column, column.note(summary) if callable(column.note) else column.note) for column in shown]
    return [f"{column.heading.capitalize()}: {note}." for column, note in notes if note]


def _cell_text(column: Column, row: Mapping[str, Any]) -> str:
    value = column.value(row)
    return percent(value) if column.form == "percent" else number(value, column.digits)


def evaluation_rows(summary: Mapping[str, Any]) -> tuple[list[EvaluationRow], list[str]]:
    """Lines of the evaluation table, and the values of k for which a row has pass@k."""
    rows = list(summary.get("rows") or [])
    ks = sorted({k for row in rows for k in row.get("pass_at_k") or {}}, key=int)
    policies, columns = set(summary.get("policies") or []), columns_of(summary)
    report = task_or_plain(summary.get("task")).report
    return [_line(row, ks, row.get("policy") in policies, report, columns) for row in rows], ks


def evaluation_columns(summary: Mapping[str, Any]) -> list[str]:
    """Headings of the task's own columns."""
    return [column.heading for column in columns_of(summary)]


def _line(
    row: dict[str, Any], ks: list[str], is_policy: bool, report: TaskReport, columns: Sequence[Column]
) -> EvaluationRow:
    rate, low, high = row.get("solve_rate"), row.get("low"), row.get("high")
    known = is_number(rate) and is_number(low) and is_number(high)
    passes = row.get("pass_at_k") or {}
    return EvaluationRow(
        label=report.row_label(str(row.get("policy", DASH)), str(row.get("mode", "-"))),
        colour=report.colour(str(row.get("policy", ""))),
        is_policy=is_policy,
        episodes=number(row.get("episodes"), 0),
        rate=percent(rate),
        interval=percent_range(low, high),
        bar=(100 * low, 100 * rate, 100 * high) if known else None,  # type: ignore[operator]
        mean_return=number(row.get("mean_return")),
        further=[_cell_text(column, row) for column in columns],
        pass_at_k=[percent(passes.get(k)) for k in ks],
    )


def response_table(summary: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Table about the responses: headings, and (label, cells) per line; empty if the task has no such columns."""
    columns, report = columns_of(summary, "responses"), task_or_plain(summary.get("task")).report
    rows = list(summary.get("rows") or []) if columns else []
    lines = [
        (
            report.row_label(str(row.get("policy", DASH)), str(row.get("mode", "-"))),
            [_cell_text(column, row) for column in columns],
        )
        for row in rows
    ]
    return [column.heading for column in columns], lines


def kind_rows(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the tables by the kind of prompt: each policy sampled, then the task's rivals."""
    task = task_or_plain(summary.get("task"))
    chosen = [find_row(summary, str(name), "sampled") for name in summary.get("policies") or []]
    chosen += [find_baseline(summary, name) for name in task.report.rivals]
    return [row for row in chosen if row and any(breakdown.cells(row) for breakdown in task.breakdowns)]


def difficulty_chart(summary: Mapping[str, Any]) -> Chart | None:
    """Solve rate by difficulty with 95 % intervals; None if the task's difficulties are no numbers."""
    task, rows = task_or_plain(summary.get("task")), kind_rows(summary)
    report, series = task.report, []
    for at, row in enumerate(rows if task.ordered else []):
        kinds = task.breakdowns[0].cells(row)
        cells = [(float(kind), cell) for kind, cell in kinds.items() if is_number(cell.get("solve_rate"))]
        series.append(
            Series(
                name=report.row_label(row["policy"], row["mode"]),
                colour=report.colour(row["policy"]),
                points=[(kind, float(cell["solve_rate"])) for kind, cell in cells],
                spread=[(float(cell["low"]), float(cell["high"])) for _, cell in cells],
                style="bars",
                shift=(at - (len(rows) - 1) / 2) * _SHIFT,
            )
        )
    if len({x for line in series for x, _ in line.points}) < 2:
        return None
    axis = f"{report.difficulty} in {report.unit}" if report.unit else report.difficulty
    shape = Shape(axis, width=560, height=300, y_range=(0.0, 1.0), shares=True, x_ticks=12)
    title = f"{task.words.rate.capitalize()} by {report.difficulty}"
    return draw_chart(title, series, shape, "Bars are 95 % intervals over clusters.")


def kind_tables(summary: Mapping[str, Any]) -> list[KindTable]:
    """Tables by kind; a table of a single line repeats the total and is left out."""
    task, rows = task_or_plain(summary.get("task")), kind_rows(summary)
    tables = []
    for breakdown in task.breakdowns:
        by_row = [breakdown.cells(row) for row in rows]
        kinds = sorted({kind for cells in by_row for kind in cells})
        names = [task.report.label(row["policy"]) for row in rows]
        lines = [(write_kind(kind), [_cell(cells.get(kind)) for cells in by_row]) for kind in kinds]
        if len(lines) > 1:
            tables.append(KindTable(breakdown.heading, names, lines))
    return tables


def write_kind(kind: Any) -> Any:
    """Label of a kind of prompt: underscores become spaces."""
    return kind.replace("_", " ") if isinstance(kind, str) else kind


def _cell(cell: Mapping[str, Any] | None) -> tuple[str, str, str]:
    if cell is None:
        return DASH, "", ""
    counts = f"{cell.get('solved')} of {cell.get('episodes')}"
    return percent(cell.get("solve_rate")), percent_range(cell.get("low"), cell.get("high"), 0), counts
