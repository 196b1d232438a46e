"""`docs/graders.md` says what the graders do: its figures are those of a fresh measurement."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import graders as measurement

from geo_sokoban_pipeline.reporting.study_docs import read_section

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "graders.md"


def columns(table: str) -> dict[str, dict[str, str]]:
    """A Markdown table as {name in the first column: {head of the column: value}}."""
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


@pytest.mark.slow
def test_tables_are_those_of_a_fresh_measurement(shared_data):
    pairs = measurement.load_pairs(shared_data / "math_pairs.jsonl")
    names = ["default", "slime_exact"]
    found, _ = measurement.judge_pairs(pairs, names)
    text = DOCUMENT.read_text(encoding="utf-8")
    written = columns(read_section(text, "graders:accuracy", DOCUMENT))
    assert {kind: {"pairs": row["pairs"], **{n: row[n] for n in names}} for kind, row in written.items()} == columns(
        measurement.accuracy_table(pairs, found)
    )
    summary = columns(read_section(text, "graders:summary", DOCUMENT))
    assert {name: summary[name] for name in names} == columns(measurement.summary_table(pairs, found))


def test_table_of_kinds():
    pairs = [
        {"kind": "adv_bomb", "expected": False},
        {"kind": "sqrt", "expected": True},
        {"kind": "sqrt", "expected": False},
        {"kind": "hack_x", "expected": False},
    ]
    found = {"default": [False, True, False, False], "other": [True, True, True, True]}
    table = columns(measurement.accuracy_table(pairs, found))
    assert list(table) == ["hack_x", "sqrt", "adv_bomb"]
    assert table["sqrt"] == {"pairs": "2", "default": "2", "other": "1"}
    summary = columns(measurement.summary_table(pairs, found))
    assert list(summary["default"].values()) == ["3", "100.0 %", "0", "0", "0", "0"]
    assert list(summary["other"].values()) == ["1", "33.3 %", "2", "1", "0", "1"]
