"""The table of a pre-flight: what people read, what is stored, and the one line that a failure ends with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from geo_sokoban_pipeline.preflight.checks import Check
from geo_sokoban_pipeline.preflight.subject import Subject


class PreflightError(RuntimeError):
    """Something would fail later; the text is one line that says how much, and what the first of it is."""


def as_table(subject: Subject, checks: Sequence[Check]) -> dict[str, Any]:
    """The findings as JSON values, with the run they are about and the number of each state."""
    states = Counter(check.state for check in checks)
    groups = list(dict.fromkeys(check.group for check in checks))
    checks = sorted(checks, key=lambda check: groups.index(check.group))
    return {
        "run": subject.run,
        "run_id": subject.parameters.run_id,
        "states": {state: states[state] for state in ("ok", "warning", "failure", "skipped")},
        "checks": [check.to_json() for check in checks],
    }


def summarise(table: dict[str, Any]) -> str:
    """One line about the whole table."""
    states = table["states"]
    counts = [f"{states[state]} {state}{'' if states[state] == 1 else 's'}" for state in ("failure", "warning")]
    text = f"{table['run']}/{table['run_id']}: {', '.join(counts)}"
    failures = [check for check in table["checks"] if check["state"] == "failure"]
    if not failures:
        return f"{text}; the run can begin"
    first = failures[0]
    way_out = f"; {first['way_out']}" if first["way_out"] else ""
    return f"{text}; first, {first['group']}, {first['name']}: {first['found']}{way_out}"


def judge(table: dict[str, Any]) -> None:
    """Stop where something would fail later.

    Raises:
        PreflightError: with the summary.
    """
    if table["states"]["failure"]:
        raise PreflightError(summarise(table))


def rows_of(table: dict[str, Any]) -> list[tuple[str, ...]]:
    """Cells to print: group (once per run of rows), name, state, what was found with the way out."""
    rows: list[tuple[str, ...]] = []
    group = None
    for check in table["checks"]:
        text = f"{check['found']}\n→ {check['way_out']}" if check["way_out"] else check["found"]
        rows.append(("" if check["group"] == group else check["group"], check["name"], check["state"], text))
        group = check["group"]
    return rows
