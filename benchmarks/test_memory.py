"""What a run of each recipe holds in memory after 20 iterations and after 200.

Run with `make bench-memory`, eight minutes a recipe; it starts `kedro run --pipelines=train_sokoban` with the recipe's
own settings, but 205 iterations, and reads `perf/memory_gb`: the resident memory of the run and its second process at
the end of an iteration, each the mean of five. Threshold: after 200 iterations at most 5 % above that after 20.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import yaml
from benchmarks.records import ROOT, keep
from benchmarks.runs import run_training
from benchmarks.tables import memory_growth

from geo_sokoban_pipeline.studies.plan import merge

RECIPES = ("default", "from_zero")
ITERATIONS, AT = 205, (20, 60, 100, 150, 200)
THRESHOLD = 0.05


def test_memory_of_long_runs(tmp_path: Path) -> None:
    found = []
    for recipe in RECIPES:
        study = yaml.safe_load((ROOT / f"conf/base/parameters/studies/{recipe}.yml").read_text(encoding="utf-8"))
        own = study[f"study_{recipe}"].get("train", {})
        rows = run_training(tmp_path, recipe, merge(own, {"loop": {"iterations": ITERATIONS}}))
        memory = [row["perf/memory_gb"] for row in rows]
        sizes = [[at, round(fmean(memory[at - 2 : at + 3]), 3)] for at in AT]
        found.append({"name": recipe, "memory_gb": sizes})
    keep("memory", {"recipes": found})
    assert max(map(memory_growth, found)) <= THRESHOLD
