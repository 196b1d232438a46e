"""Whole runs of `train_sokoban` in a data root of their own, for benchmarks that read what a run stores."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.records import ROOT

from geo_sokoban_pipeline.storage import read_json


def play_run(data_root: Path, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Start the command up to its last iteration; returns the rows of metrics, one per iteration."""
    run_id = data_root.name
    given = ",".join(f"{name}={value}" for name, value in {"run_id": run_id, **parameters}.items())
    words = ("--pipeline=train_sokoban", "--to-nodes=train_sokoban.train_grpo", f"--params={given}")
    environment = {**os.environ, "GEO_SOKOBAN_DATA_ROOT": str(data_root), "KEDRO_DISABLE_TELEMETRY": "1"}
    subprocess.run([sys.executable, "-m", "kedro", "run", *words], cwd=ROOT, env=environment, check=True)
    metrics = sorted((data_root / f"07_model_output/train_sokoban/{run_id}/metrics").glob("iter=*.json"))
    return [read_json(path) for path in metrics]
