"""Runs of `train_sokoban` in a data root of their own, for benchmarks that read stored runs; larger by repeats."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from benchmarks.records import ROOT, write_json

from geo_sokoban_pipeline.runs.storage import read_json
from geo_sokoban_pipeline.trajectories.parquet import read_trajectories, write_trajectories


def run_training(
    folder: Path, run_id: str, train: Mapping[str, Any], whole: bool = False, **others: Any
) -> list[dict[str, Any]]:
    """Start the command up to its last iteration, in a data root below a folder.

    Args:
        train: overrides of the parameters of `train_sokoban`.
        whole: go on to the evaluation and the report.
        others: further parameters.

    Returns:
        The rows of metrics, one per iteration.
    """
    data_root, config = folder / "data", folder / f"{run_id}.json"
    write_json(config, {"run": {"params": {"run_id": run_id, "train_sokoban": train, **others}}})
    words = ["--pipelines=train_sokoban", f"--config={config}"]
    words += [] if whole else ["--to-nodes=train_sokoban.train_grpo"]
    measure_python("-m", "kedro", "run", *words, data_root=data_root)
    metrics = sorted((data_root / f"07_model_output/train_sokoban/{run_id}/metrics").glob("iter=*.json"))
    return [read_json(path) for path in metrics]


def measure_python(
    *words: str, data_root: Path, is_quiet: bool = False, **environment: str
) -> tuple[float, resource.struct_rusage]:
    """Seconds that a process of Python takes by the clock, and what it uses.

    Args:
        is_quiet: what it writes is not shown.
        environment: further variables.

    Raises:
        CalledProcessError: it failed.
    """
    values = {"GEO_SOKOBAN_DATA_ROOT": str(data_root), "KEDRO_DISABLE_TELEMETRY": "1", **environment}
    began = time.perf_counter()
    out = subprocess.DEVNULL if is_quiet else None
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, env={**os.environ, **values}, stdout=out)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise subprocess.CalledProcessError(status, words)
    return time.perf_counter() - began, usage


def repeat_iterations(folder: Path, stored: int, wanted: int) -> int:
    """Repeat the iterations of a trajectory folder under further numbers until it holds so many episodes.

    Args:
        stored: iterations that are there, from 0.

    Returns:
        Its episodes.
    """
    tables = [read_trajectories(folder / f"iter={number:05d}" / "part-000.parquet") for number in range(stored)]
    count, number = sum(table.num_rows for table in tables), stored
    while count < wanted:
        table = tables[number % stored]
        ids = pc.replace_substring_regex(table.column("trajectory_id"), r"/i\d+/", f"/i{number:05d}/")
        own = {"trajectory_id": ids, "iteration": pa.array([number] * table.num_rows, pa.int32())}
        for name, values in own.items():
            place = table.schema.get_field_index(name)
            table = table.set_column(place, table.schema.field(name), values)
        write_trajectories(folder / f"iter={number:05d}" / "part-000.parquet", table)
        count, number = count + table.num_rows, number + 1
    return count
