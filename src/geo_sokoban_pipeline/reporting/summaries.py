"""Rows of an evaluation summary, looked up by who played; what was not evaluated is None."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from geo_sokoban_pipeline.reporting.formats import percent, percent_range

Row = dict[str, Any]


def find_row(summary: Mapping[str, Any], policy: str, mode: str) -> Row | None:
    """Row of a policy in a mode, if it was evaluated and played any episode."""
    for row in summary.get("rows") or []:
        if row.get("policy") == policy and row.get("mode") == mode and row.get("solve_rate") is not None:
            found: Row = row
            return found
    return None


def find_player(summary: Mapping[str, Any], name: str) -> Row | None:
    """Row of a player without a policy; the teacher's name goes on with what kind of teacher it is."""
    exact = find_row(summary, name, "-")
    if exact is not None or name != "teacher":
        return exact
    names = [str(row.get("policy")) for row in summary.get("rows") or []]
    return next((find_row(summary, one, "-") for one in names if one.startswith("teacher")), None)


def write_rate(row: Mapping[str, Any]) -> str:
    """`66.3 % [62.5–69.8 %]`."""
    return f"{percent(row['solve_rate'])} [{percent_range(row.get('low'), row.get('high'))}]"
