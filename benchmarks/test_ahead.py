"""What rolling out beside the training gains: seconds of an iteration with `loop.max_staleness: 1` over those without.

Run with `pytest benchmarks/test_ahead.py -s` on an idle machine with two cores or more. The same run twice, of one rank
and one rollout worker with a thread each; its iterations are large enough for rollout and update to outweigh what is
stored, and spend about as long on each of both. Threshold: 0.65 of the seconds.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.records import keep
from benchmarks.runs import run_training
from benchmarks.tables import ahead_ratio

ITERATIONS, FIRST = 16, 4  # the first ones fill caches
THRESHOLD = 0.65
TRAIN: dict[str, Any] = {
    "processes": 1,
    "warm_start": {"steps": 0},
    "rollout": {"workers": 1},
    "grpo": {"filter": "none", "groups": 96, "groups_per_step": 32},
}
PARTS = ("rollout_time", "update_time", "step_time", "save_time")


def mean_seconds(folder: Path, staleness: int) -> dict[str, float]:
    """Mean seconds of an iteration's parts, in a run of its own."""
    loop = {"iterations": ITERATIONS, "eval_interval": 0, "max_staleness": staleness}
    rows = run_training(folder, f"staleness{staleness}", {**TRAIN, "loop": loop})[FIRST:]
    assert all(row.get("rollout/staleness", 0.0) == staleness for row in rows)
    return {name: fmean(row[f"perf/{name}"] for row in rows) for name in PARTS}


def test_an_iteration_takes_little_more_than_its_longer_half(tmp_path: Path) -> None:
    found = {
        "iterations": ITERATIONS - FIRST,
        "episodes": TRAIN["grpo"]["groups"] * 8,
        "in_turn": mean_seconds(tmp_path, 0),
        "beside": mean_seconds(tmp_path, 1),
    }
    keep("ahead", found)
    assert ahead_ratio(found) <= THRESHOLD
