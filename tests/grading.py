"""Grades of many answers at once."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from geo_sokoban_pipeline.rewards.math_answer import Grade, Grader


def grade_all(grader: Grader, pairs: Iterable[tuple[str, Any]], *, patience: float) -> list[Grade]:
    """Grades of pairs of a response and a label, worked on side by side; `patience` is for all of them together."""
    deadline = time.monotonic() + patience
    futures = [grader.submit(*pair, patience=deadline - time.monotonic()) for pair in pairs]
    return [future.result() for future in futures]
