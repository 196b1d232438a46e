"""Whole runs of `train_sokoban` in a data root of their own, for benchmarks that read stored runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.records import ROOT, write_json

from geo_sokoban_pipeline.runs.storage import read_json


def run_training(folder: Path, run_id: str, train: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Start the command up to its last iteration, in a data root below a folder.

    Args:
        train: overrides of the parameters of `train_sokoban`.

    Returns:
        The rows of metrics, one per iteration.
    """
    data_root, config = folder / "data", folder / f"{run_id}.json"
    write_json(config, {"run": {"params": {"run_id": run_id, "train_sokoban": train}}})
    words = ("--pipelines=train_sokoban", "--to-nodes=train_sokoban.train_grpo", f"--config={config}")
    environment = {**os.environ, "GEO_SOKOBAN_DATA_ROOT": str(data_root), "KEDRO_DISABLE_TELEMETRY": "1"}
    subprocess.run([sys.executable, "-m", "kedro", "run", *words], cwd=ROOT, env=environment, check=True)
    metrics = sorted((data_root / f"07_model_output/train_sokoban/{run_id}/metrics").glob("iter=*.json"))
    return [read_json(path) for path in metrics]
