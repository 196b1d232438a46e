"""Tables of a report: evaluation, time, data, parameters.

Numbers are as stored, and the page writes them; a missing one is a dash, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from geo_sokoban_pipeline.envs.base import Column, Task
from geo_sokoban_pipeline.envs.report import DataTable, TaskReport
from geo_sokoban_pipeline.formats import (
    DASH,
    count,
    find_baseline,
    find_row,
    is_number,
    joined,
    number,
    percent,
)
from geo_sokoban_pipeline.reporting.charts import Chart, Series, Shape, make_chart
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
_WRITTEN = ("solve_rate", "low", "high", "episodes", "mean_return", "pass_at_k")  # values of a row that pages write
_SHIFT = 0.12  # between the error bars of two policies at one difficulty


@dataclass(frozen=True)
class PhaseTime:
    """One phase: mean seconds of an iteration, its share of the iteration, its seconds over the run."""

    name: str
    mean: float
    share: float
    total: float
    is_part: bool


def timings(rows: Sequence[Mapping[str, Any]]) -> list[PhaseTime]:
    """Phases of a mean iteration, the rest, and the whole iteration last; [] if nothing was timed.

    A phase that only some iterations have (validation) counts as 0 seconds in the others, so that shares add up. Each
    row has the time of saving the previous iteration; that of the last one is not recorded.
    """
    timed = [row for row in rows if is_number(row.get(_STEP))]
    whole = sum(row[_STEP] + (row.get(_SAVED) or 0.0) for row in timed)
    if not timed or whole <= 0:
        return []
    phases = []
    for metric, name, is_part in _PHASES:
        if values := [row[metric] for row in timed if is_number(row.get(metric))]:
            seldom = metric == "perf/eval_time" and len(values) < len(timed)
            shown = f"{name} ({len(values)} of {len(timed)} iterations)" if seldom else name
            phases.append((shown, sum(values), is_part))
    rest = whole - sum(seconds for _, seconds, is_part in phases if not is_part)
    phases += [("Other", rest, False)] if phases and rest > 0 else []
    return [
        PhaseTime(name, seconds / len(timed), seconds / whole, seconds, is_part)
        for name, seconds, is_part in (*phases, ("Iteration", whole, False))
    ]


@dataclass(frozen=True)
class AuditRow:
    """One check of an audit, over all that it has looked at.

    Attributes:
        checked: how many episodes, groups, iterations or prompts.
        findings: number of broken guarantees.
        lines: the findings; without findings the notes, both with the entry that they are about.
        episodes: ids of the episodes that the findings are about.
    """

    name: str
    checked: int
    findings: int
    lines: list[str]
    episodes: list[str]


@dataclass(frozen=True)
class AuditTable:
    """An audit of the run.

    Attributes:
        iterations: of the run, when an audit looked at all episodes, the files and the log-probs; None: it looked at a
            sample.
        stale: whether the run has gone on since.
        findings: number of broken guarantees.
    """

    iterations: int | None
    stale: bool
    findings: int
    rows: list[AuditRow]


def audit_tables(
    whole: Mapping[str, Any] | None, sample: Mapping[str, Any] | None, iterations: int
) -> list[AuditTable]:
    """The audits that a report shows: the whole one, and where there is none of all iterations, the sample.

    Args:
        whole: of the pipeline `audit_<task>`; None: none was made.
        sample: of the end of the training; None: none was made.
        iterations: committed ones of the run.
    """
    found = []
    if whole is not None:
        seen = whole.get("iterations", 0)
        found.append(AuditTable(seen, seen < iterations, whole["findings"], _audit_rows(whole)))
    if sample is not None and (not found or found[0].stale):
        found.append(AuditTable(None, False, sample["findings"], _audit_rows(sample)))
    return found


def _audit_rows(audit: Mapping[str, Any]) -> list[AuditRow]:
    """The checks of an audit, those of several entries as one row."""
    rows = []
    for name in dict.fromkeys(check["check"] for check in audit["checks"]):
        checks = [check for check in audit["checks"] if check["check"] == name]
        found = sum(len(check["findings"]) for check in checks)
        lines = [
            f"{check['subject'].partition('.')[2]}: {line}".removeprefix(": ")
            for check in checks
            for line in check["findings" if found else "notes"]
        ]
        episodes = list(dict.fromkeys(episode for check in checks for episode in check["episodes"]))
        rows.append(AuditRow(name, sum(check["checked"] for check in checks), found, lines, episodes))
    return rows


def data_table(report: Mapping[str, Any] | None, task: Task) -> DataTable | None:
    """Contents of the splits, with notes."""
    if not report or not report.get("splits"):
        return None
    return replace(task.report.data_table(report["splits"]), notes=list(_data_notes(report, task.report)))


def _data_notes(report: Mapping[str, Any], words: TaskReport) -> Iterator[str]:
    if report.get("split_note"):
        yield str(report["split_note"])
    if overlaps := report.get("overlaps"):
        shared = [f"{count(number)} {name}" for name, number in overlaps.items()]
        yield f"Counted again for this report{words.equal}: {joined(shared)} occur in more than one split."
    if rejected := report.get("rows_rejected"):
        reasons = [f"{reason} ({number})" for reason, number in (report.get("rejected_reasons") or {}).items()]
        yield f"{count(rejected)} of {count(report.get('rows_read'))} rows were rejected: {joined(reasons)}."
    elif report.get("rows_read") is not None:
        yield f"{count(report['rows_read'])} rows read from source “{report.get('source', 'unknown')}”, none rejected."
    for name, what in (("rows_excluded", "left out because of overlaps of splits"), ("rows_repaired", "repaired")):
        if report.get(name):
            yield f"{count(report[name])} rows were {what}."
    yield from words.data_notes(report)


# The evaluation as tables and a chart: one row per policy and mode, and rates by the kind of prompt.


@dataclass(frozen=True)
class KindTable:
    """Rates by the kind of prompt: what it is by, the policies, and (kind, a cell or None for each policy) per line."""

    by: str
    names: list[str]
    lines: list[tuple[Any, list[Mapping[str, Any] | None]]]


@dataclass(frozen=True)
class Evaluation:
    """The tables of an evaluation.

    Attributes:
        rows: see `evaluation_rows`.
        powers: the values of k for which a row has pass@k.
        columns, responses: headings of the task's own columns, beside the rates and in a table about the responses.
        notes: explanations of these columns.
        kinds: rates by the kind of prompt.
    """

    rows: list[dict[str, Any]]
    powers: list[str]
    columns: list[str]
    responses: list[str]
    notes: list[str]
    kinds: list[KindTable]


def read_evaluation(summary: Mapping[str, Any]) -> Evaluation:
    """The tables of an evaluation summary; empty where it lacks their values."""
    rows, scores, responses = evaluation_rows(summary), columns_of(summary), columns_of(summary, "responses")
    notes = [
        (column, column.note(summary) if callable(column.note) else column.note) for column in (*scores, *responses)
    ]
    return Evaluation(
        rows=rows,
        powers=powers_of(rows),
        columns=[column.heading for column in scores],
        responses=[column.heading for column in responses],
        notes=[f"{column.heading.capitalize()}: {note}." for column, note in notes if note],
        kinds=kind_tables(summary),
    )


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


def _cell_text(column: Column, row: Mapping[str, Any]) -> str:
    value = column.value(row)
    return percent(value) if column.form == "percent" else number(value, column.digits)


def evaluation_rows(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a summary, with `label`, `colour`, `is_policy`, `bar` (low end, rate and high end in percent; None
    where one is not known), and as texts the task's own columns: `scores`, `responses`.
    """
    policies, report = set(summary.get("policies") or []), task_or_plain(summary.get("task")).report
    tables = {name: columns_of(summary, name) for name in ("scores", "responses")}
    rows = []
    for row in summary.get("rows") or []:
        bar = [row.get(name) for name in ("low", "solve_rate", "high")]
        shown = {
            "label": report.row_label(str(row.get("policy", DASH)), str(row.get("mode", "-"))),
            "colour": report.colour(str(row.get("policy", ""))),
            "is_policy": row.get("policy") in policies,
            "bar": [100 * value for value in bar] if all(map(is_number, bar)) else None,
            **{name: [_cell_text(column, row) for column in columns] for name, columns in tables.items()},
        }
        rows.append({**dict.fromkeys(_WRITTEN), **row, **shown})
    return rows


def powers_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The values of k for which a row has pass@k."""
    return sorted({k for row in rows for k in row.get("pass_at_k") or {}}, key=int)


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
    return make_chart(title, series, shape, "Bars are 95 % intervals over clusters.")


def kind_tables(summary: Mapping[str, Any]) -> list[KindTable]:
    """Tables by kind; a table of a single line repeats the total and is left out."""
    task, rows = task_or_plain(summary.get("task")), kind_rows(summary)
    tables = []
    for breakdown in task.breakdowns:
        by_row = [breakdown.cells(row) for row in rows]
        kinds = sorted({kind for cells in by_row for kind in cells})
        lines = [(kind, [cells.get(kind) for cells in by_row]) for kind in kinds]
        if len(lines) > 1:
            tables.append(KindTable(breakdown.heading, [task.report.label(row["policy"]) for row in rows], lines))
    return tables
