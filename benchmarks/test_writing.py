"""What writing episodes takes of the default run, by the clock and in CPU-seconds.

Run with `pytest benchmarks/test_writing.py -s`; it starts `kedro run --pipeline=train_sokoban` with its defaults, but
fewer iterations and no validation, in a data root of its own, and reads the stored metrics. Writing is what
`perf/write_time` counts: tables of the episodes, the contract's check, the files. One process writes while the others
wait, so its share of the wall clock is larger than that of the CPU-seconds. Bar: under 3 % of the wall clock.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from benchmarks.records import ROOT, keep
from benchmarks.tables import render_writing, writing_shares

from geo_sokoban_pipeline.storage import read_json

ITERATIONS, FIRST = 48, 8  # the first ones fill the caches of boards and pictures
BAR = 0.03
PARTS = ("step_time", "save_time", "write_time", "cpu_time", "save_cpu_time", "write_cpu_time")


def test_writing_of_the_default_run(tmp_path: Path) -> None:
    rows = play_run(tmp_path)[FIRST:]
    defaults = yaml.safe_load((ROOT / "conf/base/parameters/train_sokoban.yml").read_text(encoding="utf-8"))
    found = {
        "iterations": len(rows),
        "episodes": int(rows[0]["rollout/episodes"]),
        "processes": defaults["train_sokoban"]["processes"],
        "seconds": {name: fmean(row[f"perf/{name}"] for row in rows) for name in PARTS},
    }
    print(f"\n{render_writing(found)}\nBar: {100 * BAR:.0f} % of its seconds")
    keep("writing", found)
    assert writing_shares(found)[0] < BAR


def play_run(data_root: Path) -> list[dict[str, Any]]:
    """Rows of metrics of a run, one per iteration."""
    parameters = f"run_id=writing,train_sokoban.loop.iterations={ITERATIONS},train_sokoban.loop.eval_interval=0"
    words = ("--pipeline=train_sokoban", "--to-nodes=train_sokoban.train_grpo", f"--params={parameters}")
    environment = {**os.environ, "GEO_SOKOBAN_DATA_ROOT": str(data_root), "KEDRO_DISABLE_TELEMETRY": "1"}
    subprocess.run([sys.executable, "-m", "kedro", "run", *words], cwd=ROOT, env=environment, check=True)
    metrics = sorted((data_root / "07_model_output/train_sokoban/writing/metrics").glob("iter=*.json"))
    return [read_json(path) for path in metrics]
