"""Tools for tests that start whole runs: the command as a user types it, and the comparison of two data roots."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

from geo_sokoban_pipeline.runs.storage import file_digest, read_json
from geo_sokoban_pipeline.trajectories.parquet import read_trajectories

ROOT = Path(__file__).parents[1]
TRAJECTORY_KINDS = ("trajectories", "eval_trajectories", "held_out_trajectories")


def kedro_command(*words: str, data_root: Path, conf_env: str = "test", **environment: str) -> subprocess.Popen[str]:
    """Start `kedro run --env=<conf_env> …` on a data root of its own; output is captured."""
    env = {
        **os.environ,
        "GEO_SOKOBAN_DATA_ROOT": str(data_root),
        "KEDRO_DISABLE_TELEMETRY": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]),
        **environment,
    }
    return subprocess.Popen(
        [sys.executable, "-m", "kedro", "run", f"--env={conf_env}", *words],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], expected: int = 0, timeout: float = 300) -> str:
    """Output of a started command, which must end with the expected exit code within so many seconds."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    assert process.returncode == expected, output[-4000:]
    return output


def read_run(data_root: Path, run: str = "train_sokoban", run_id: str = "default") -> dict[str, Any]:
    """What must not depend on interruptions: episodes but timings, metrics but perf/*, digests of all weights."""
    outputs = data_root / "07_model_output" / run / run_id
    models = data_root / "06_models" / run / run_id
    episodes: dict[str, pa.Table] = {}
    for kind in TRAJECTORY_KINDS:
        for path in sorted((outputs / kind).glob("iter=*/part-*.parquet")):
            name = path.relative_to(outputs).as_posix()
            episodes[name] = plain(read_trajectories(path).drop_columns(["timings"]))
    metrics = {
        path.name: {name: value for name, value in read_json(path).items() if not name.startswith("perf/")}
        for path in sorted((outputs / "metrics").glob("*.json"))
    }
    weights = {path.relative_to(models).as_posix(): file_digest(path) for path in sorted(models.rglob("*.safetensors"))}
    summary = data_root / "08_reporting" / run / run_id / "eval_summary.json"
    return {
        "episodes": episodes,
        "metrics": metrics,
        "weights": weights,
        "summary": read_json(summary) if summary.exists() else None,
    }


def plain(table: pa.Table) -> list[dict[str, Any]]:
    """Rows of a table as plain values, which compare whatever dictionaries its columns use."""
    return table.to_pylist()


def assert_same_run(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Compare two results of `read_run`, naming the first part that differs."""
    assert sorted(first["episodes"]) == sorted(second["episodes"])
    for name, rows in first["episodes"].items():
        for one, other in zip(rows, second["episodes"][name], strict=True):
            different = [column for column in one if one[column] != other[column]]
            assert not different, f"{name}, {one['trajectory_id']}: {different}"
    assert first["metrics"] == second["metrics"]
    assert first["weights"] == second["weights"]
    assert first["summary"] == second["summary"]
