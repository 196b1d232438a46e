"""Plain tables of a report: where the time went, what the data holds, parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from geo_sokoban_pipeline.reporting.formats import DASH, count, duration, is_number, joined, percent
from geo_sokoban_pipeline.tasks import World

# Metric, name, whether it is a part of the line above it.
_PHASES = (
    ("perf/rollout_time", "Rollout", False),
    ("perf/engine_time", "of it: engine (generate, encode pictures)", True),
    ("perf/env_time", "of it: environment (moves, pictures)", True),
    ("perf/update_time", "Update", False),
    ("perf/eval_time", "Validation", False),
    ("perf/save_time", "Saving (all files, MLflow)", False),
    ("perf/write_time", "of it: episodes (tables, check, file)", True),
)
_STEP, _SAVED = "perf/step_time", "perf/save_time"


@dataclass(frozen=True)
class Timing:
    """One phase: mean seconds of an iteration, its share of the iteration in percent, and its sum over the run."""

    name: str
    is_part: bool
    mean: str
    share: str
    bar: float
    total: str


@dataclass(frozen=True)
class DataTable:
    """Prompts by split: column names, lines of (split, cells), and sentences about the data.

    Attributes:
        group: heading of the columns from `plain` on.
        plain: columns before them.
    """

    columns: list[str]
    lines: list[tuple[str, list[str]]]
    notes: list[str]
    group: str = "levels by fewest moves"
    plain: int = 3


def timings(rows: Sequence[Mapping[str, Any]]) -> list[Timing]:
    """Phases of a mean iteration, what is left over, and the whole iteration last; [] where nothing was timed.

    A phase that only some iterations have (validation) counts as 0 seconds in the others, so that shares add up. Each
    row has the time that saving the iteration before took; that of the last one is known to nobody.
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


def _timing(name: str, total: float, whole: float, iterations: int, is_part: bool = False) -> Timing:
    share = total / whole
    bar = round(100 * min(1.0, share), 1)
    return Timing(name, is_part, duration(total / iterations), percent(share), bar, duration(total))


def data_table(report: Mapping[str, Any] | None, world: World = "sokoban") -> DataTable | None:
    """What the splits hold and what a reader must know about them: levels, layouts and lengths, or problems with their
    pictures, answers and families.
    """
    if not report or not report.get("splits"):
        return None
    return _problem_table(report) if world == "geometry" else _level_table(report)


def _problem_table(report: Mapping[str, Any]) -> DataTable:
    splits: Mapping[str, Mapping[str, Any]] = report["splits"]
    families = list(dict.fromkeys(name for split in splits.values() for name in split.get("by_family") or {}))
    lines = []
    for name, split in splits.items():
        cells = [count(split.get(key)) for key in ("problems", "distinct_problems", "images", "distinct_answers")]
        most = split.get("most_frequent_answer") or {}
        share = f"{most['answer']} ({percent(most['share'])})" if most else DASH
        by_family = split.get("by_family") or {}
        lines.append((name, [*cells, share, *(count(by_family.get(family, 0)) for family in families)]))
    columns = ["problems", "distinct", "pictures", "answers", "most frequent answer"]
    shown = [family.replace("_", " ") for family in families]
    return DataTable([*columns, *shown], lines, list(_data_notes(report)), "problems by family", len(columns))


def _level_table(report: Mapping[str, Any]) -> DataTable:
    splits: Mapping[str, Mapping[str, Any]] = report["splits"]
    lengths = {key for split in splits.values() for key in split.get("by_length") or {}}
    ordered = sorted(lengths, key=lambda key: (not key.isdigit(), key.zfill(9)))
    lines = []
    for name, split in splits.items():
        cells = [count(split.get(key)) for key in ("levels", "distinct_levels", "layouts")]
        by_length = split.get("by_length") or {}
        lines.append((name, [*cells, *(count(by_length.get(key, 0)) for key in ordered)]))
    return DataTable(["levels", "distinct", "layouts", *ordered], lines, list(_data_notes(report)))


def _data_notes(report: Mapping[str, Any]) -> Iterator[str]:
    if report.get("split_note"):
        yield str(report["split_note"])
    overlaps = report.get("overlaps") or {}
    if overlaps:
        shared = joined([f"{count(number)} {name}" for name, number in overlaps.items()])
        symmetry = ", up to symmetry" if "layouts" in overlaps else ""
        yield f"Counted again for this report{symmetry}: {shared} occur in more than one split."
    rejected = report.get("rows_rejected")
    if rejected:
        reasons = joined([f"{reason} ({number})" for reason, number in (report.get("rejected_reasons") or {}).items()])
        yield f"{count(rejected)} of {count(report.get('rows_read'))} rows were rejected: {reasons}."
    elif report.get("rows_read") is not None:
        yield f"{count(report['rows_read'])} rows read from source “{report.get('source', 'unknown')}”, none rejected."
    if report.get("unsolved_within_limit"):
        yield f"{count(report['unsolved_within_limit'])} levels have no known solution length (the solver's limit)."
    for name, what in (("rows_excluded", "left out because of what splits share"), ("rows_repaired", "repaired")):
        if report.get(name):
            yield f"{count(report[name])} rows were {what}."
    yields = report.get("setting_yields")
    if isinstance(yields, Mapping) and yields:
        yield f"The setting holds {count(sum(yields.values()))} distinct levels in all."


def parameter_tables(parameters: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """(section, [(name, value)]) per top-level section; single values form the first one, `run`.

    Nested names are joined by dots; values are JSON.
    """
    single = [(name, _written(value)) for name, value in parameters.items() if not isinstance(value, Mapping)]
    sections = [(name, list(_flatten(value))) for name, value in parameters.items() if isinstance(value, Mapping)]
    return [*([("run", single)] if single else []), *sections]


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _written(value)


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
