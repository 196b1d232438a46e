"""Graders with one pool for all tests of a session; its time limit is generous, for the machine may be busy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from geo_sokoban_pipeline.rewards.math_answer import Grade, Grader, GradingPool


@pytest.fixture(scope="session")
def pool() -> Iterator[GradingPool]:
    with GradingPool(workers=1, time_limit=120) as made:
        yield made


@pytest.fixture(scope="session")
def graded(pool: GradingPool) -> Callable[..., Grade]:
    """`graded(answer, label, grader, tolerance)`: the grade of an answer in a box, or of a whole response."""
    grader_of = cache(partial(Grader, pool=pool))

    def grade(answer: str, label: Any, grader: Any = "default", tolerance: float = 0.0, whole: bool = False) -> Grade:
        response = answer if whole else f"Answer: \\boxed{{{answer}}}"
        return grader_of(grader, tolerance).grade(response, label, patience=600)

    return grade


@pytest.fixture(scope="session")
def math_pairs(shared_data: Path) -> list[dict[str, Any]]:
    """Labelled pairs of a response and a label."""
    lines = (shared_data / "math_pairs.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="session")
def real_labels(shared_data: Path) -> list[str]:
    """Answers of real Geometry3K rows."""
    import pyarrow.parquet as pq

    return pq.read_table(shared_data / "geometry3k_small.parquet", columns=["answer"])["answer"].to_pylist()
