"""What writing episodes takes of the default run, by the clock and in CPU-seconds.

Run with `pytest benchmarks/test_writing.py -s`; it starts `kedro run --pipelines=train_sokoban` with its defaults, but
fewer iterations and no validation, in a data root of its own, and reads the stored metrics. Writing is what
`perf/write_time` counts: tables of the episodes, the contract's check, the files. One process writes while the others
wait, so its share of the wall clock is larger than that of the CPU-seconds. Threshold: under 3 % of the wall clock.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import yaml
from benchmarks.records import ROOT, keep
from benchmarks.runs import run_training
from benchmarks.tables import writing_shares

ITERATIONS, FIRST = 48, 8  # the first ones fill the caches of boards and images
THRESHOLD = 0.03
PARTS = ("step_time", "save_time", "write_time", "cpu_time", "save_cpu_time", "write_cpu_time")


def test_writing_of_the_default_run(tmp_path: Path) -> None:
    rows = run_training(tmp_path, "writing", {"loop": {"iterations": ITERATIONS, "eval_interval": 0}})[FIRST:]
    defaults = yaml.safe_load((ROOT / "conf/base/parameters/train_sokoban.yml").read_text(encoding="utf-8"))
    found = {
        "iterations": len(rows),
        "episodes": int(rows[0]["rollout/episodes"]),
        "processes": defaults["train_sokoban"]["processes"],
        "seconds": {name: fmean(row[f"perf/{name}"] for row in rows) for name in PARTS},
    }
    keep("writing", found)
    assert writing_shares(found)[0] < THRESHOLD
