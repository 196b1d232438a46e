"""Tools for tests that start whole runs: the command as a user types it, and the comparison of two data roots."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from forked import ForkedCommand
from geo_sokoban_pipeline.runs.storage import file_digest, read_json
from geo_sokoban_pipeline.trajectories.index import FOLDER
from geo_sokoban_pipeline.trajectories.parquet import read_trajectories

ROOT = Path(__file__).parents[1]
TRAJECTORY_KINDS = ("trajectories", "eval_trajectories", "held_out_trajectories")


class Command(Protocol):
    """What tests use of a started command: of `subprocess.Popen`, or of a fork."""

    @property
    def returncode(self) -> int | None: ...
    def communicate(self, timeout: float | None = None) -> tuple[str, Any]: ...
    def kill(self) -> None: ...


def kedro_command(
    *words: str, data_root: Path, conf_env: str = "test", own_interpreter: bool = False, **environment: str
) -> Command:
    """Start `kedro run --env=<conf_env> …` on a data root of its own; output is captured.

    The command runs in a fork that has imported the heavy libraries already, unless it asks for an interpreter of its
    own, or for a hash seed, which only a new interpreter takes.
    """
    env = {
        **os.environ,
        "GEO_SOKOBAN_DATA_ROOT": str(data_root),
        "KEDRO_DISABLE_TELEMETRY": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]),
        **environment,
    }
    command = ["kedro", "run", f"--env={conf_env}", *words]
    if not (own_interpreter or "PYTHONHASHSEED" in environment):
        return ForkedCommand(command, ROOT, env)
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: Command, expected: int = 0, timeout: float = 300) -> str:
    """Output of a started command, which must end with the expected exit code within so many seconds."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    assert process.returncode == expected, output[-4000:]
    return output


@contextmanager
def beside(process: Command) -> Iterator[None]:
    """A started command goes on during the `with` block, must end well after it, and is killed if the block fails."""
    try:
        yield
        finish(process)
    except BaseException:
        process.kill()
        raise


def read_run(data_root: Path, run: str = "train_sokoban", run_id: str = "default") -> dict[str, Any]:
    """What must not depend on interruptions: episodes but timings, metrics but perf/*, digests of all weights."""
    outputs = data_root / "07_model_output" / run / run_id
    models = data_root / "06_models" / run / run_id
    episodes: dict[str, pa.Table] = {}
    for kind in TRAJECTORY_KINDS:
        for path in sorted((outputs / kind).glob("iter=*/part-*.parquet")):
            name = path.relative_to(outputs).as_posix()
            episodes[name] = plain(read_trajectories(path).drop_columns(["timings"]))
    for path in sorted((outputs / FOLDER).rglob("*.parquet")):
        with pq.ParquetFile(path) as file:
            episodes[path.relative_to(outputs).as_posix()] = plain(file.read().drop_columns(["run", "run_id"]))
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
