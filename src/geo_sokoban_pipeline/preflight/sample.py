"""What a look at a task's data gives: findings, and a few prompts to try things with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from geo_sokoban_pipeline.preflight.checks import Check


@dataclass
class DataSample:
    """Findings about the data, and what later checks need of them.

    Attributes:
        checks: one record per row of the table.
        rows: training prompts to try things with; none where the source could not give any.
        counts: prompts of each split that a run will have (None: only the whole source can tell); None where the source
            could not be read.
        longest: moves that the shortest solution of the hardest prompts takes; None where the task knows no moves.
    """

    checks: list[Check] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, int | None] | None = None
    longest: int | None = None
