"""Grades of many answers at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from geo_sokoban_pipeline.rewards.math_answer import Grade, Grader


def grade_all(grader: Grader, pairs: Iterable[tuple[str, Any]], *, patience: float) -> list[Grade]:
    """Grades of pairs of a response and a label, worked on side by side."""
    return [future.result() for future in [grader.submit(*pair, patience=patience) for pair in pairs]]
