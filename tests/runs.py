"""Tools for tests of whole runs: the command as a user types it, here or in a process, and what two data roots hold."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Protocol

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from kedro.framework import project as kedro_project
from kedro.framework.cli.utils import find_run_command
from kedro.framework.session import KedroSession
from kedro.io import DataCatalog

from forked import ForkedCommand
from geo_sokoban_pipeline.hooks.command_line import CommandLineHooks, prepare_params
from geo_sokoban_pipeline.runs.storage import file_digest, read_json
from geo_sokoban_pipeline.trajectories.index import FOLDER
from geo_sokoban_pipeline.trajectories.parquet import read_trajectories
from geo_sokoban_pipeline.trajectories.schema import validate_trajectories
from geo_sokoban_pipeline.trajectories.types import Trajectory, table_to_trajectories

ROOT = Path(__file__).parents[1]
TRAIN = "train_sokoban"
PACKAGE = "geo_sokoban_pipeline"
TRAJECTORY_KINDS = ("trajectories", "eval_trajectories", "held_out_trajectories")


@dataclass(frozen=True)
class Project:
    """The project on a data root of its own; every command runs in this process."""

    root: Path
    conf_env: ClassVar[str] = "test"

    def folder(self, layer: str, run: str = TRAIN, run_id: str = "default") -> Path:
        return self.root / layer / run / run_id

    def run(self, name: str = TRAIN, params: dict[str, Any] | None = None, **selection: Any) -> None:
        """`kedro run --pipelines=name --env=<conf_env>`."""
        with self.session(params or {}) as session:
            session.run(pipeline_names=[name], **selection)

    def load(self, name: str, params: dict[str, Any] | None = None) -> Any:
        """`catalog.load(name)`."""
        with self._environment():
            return _catalog(self, json.dumps(params or {})).load(name)

    def command(self, *words: str) -> Result:
        """`kedro run words`, with its exit code and what it says."""
        typed = [f"--env={self.conf_env}", *words]
        with self._environment():
            prepare_params(typed)
            return CliRunner().invoke(RunCommand("run"), typed)

    def succeed(self, *words: str) -> Result:
        """A command that must succeed."""
        result = self.command(*words)
        assert result.exit_code == 0, (result.exception, result.output[-4000:])
        return result

    def refused(self, *words: str) -> str:
        """The one line in which a command is refused."""
        result = self.command(*words)
        assert result.exit_code == 1, result.output
        (line,) = (line for line in result.output.splitlines() if line.startswith("Error: "))
        assert "Traceback" not in result.output
        return line

    def stamps(self) -> dict[str, int]:
        """Time of writing of every file below the run's models: what a command has made again is seen here."""
        found = sorted(self.root.glob(f"06_models/{TRAIN}/**/*.*"))
        return {str(path.relative_to(self.root)): path.stat().st_mtime_ns for path in found if path.suffix != ".lock"}

    @contextmanager
    def session(self, params: dict[str, Any]) -> Iterator[KedroSession]:
        with self._environment(), KedroSession.create(ROOT, env=self.conf_env, runtime_params=params) as session:
            yield session

    @contextmanager
    def _environment(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GEO_SOKOBAN_DATA_ROOT", str(self.root))
            patch.chdir(ROOT)
            if kedro_project.PACKAGE_NAME != PACKAGE:  # each time takes a third of a second
                kedro_project.configure_project(PACKAGE, preserve_logging=True)
            yield


class RunCommand(click.Command):
    """`kedro run`, whose errors end as on Kedro's command line."""

    def main(self, *given: Any, **options: Any) -> Any:
        try:
            return find_run_command(PACKAGE).main(*given, **options)
        except Exception as error:
            CommandLineHooks(list).end_command(error, 1)
            raise


def read_episodes(outputs: Path) -> list[Trajectory]:
    """All stored episodes of a run, which keep the contract of their tables."""
    found: list[Trajectory] = []
    for path in sorted(path for kind in TRAJECTORY_KINDS for path in (outputs / kind).rglob("*.parquet")):
        table = read_trajectories(path)
        validate_trajectories(table)
        found += table_to_trajectories(table)
    return found


class FullSize(Project):
    """The project with `--env=qwen3vl`."""

    conf_env = "qwen3vl"


@cache
def _catalog(project: Project, params: str) -> DataCatalog:
    """The catalog of a data root, whose entries read files whenever they are asked; to make one takes half a second."""
    with project.session(json.loads(params)) as session:
        return session.load_context().catalog


atexit.register(_catalog.cache_clear)  # else databases that an entry has opened are reported as leaks


class Command(Protocol):
    """What tests use of a started command: of `subprocess.Popen`, or of a fork."""

    @property
    def returncode(self) -> int | None: ...
    def communicate(self, timeout: float | None = None) -> tuple[str, Any]: ...
    def kill(self) -> None: ...


def params(*parts: Mapping[str, Any], run: str = TRAIN) -> tuple[str, str]:
    """Words of a command for a run with options by dotted name; later parts win."""
    chosen = {name: value for part in parts for name, value in part.items()}
    return f"--pipelines={run}", "--params=" + ",".join(f"{run}.{name}={value}" for name, value in chosen.items())


def kedro_command(
    *words: str,
    data_root: Path,
    conf_env: str | None = "test",
    folder: Path = ROOT,
    own_interpreter: bool = False,
    **environment: str,
) -> Command:
    """Start `kedro run --env=<conf_env> …` in a project's folder on a data root of its own; output is captured.

    For commands that are killed, or have several processes: a process has one group of ranks, and tests may have it
    open in theirs. Others run by `Project`. The command is a fork that has imported the heavy libraries already, unless
    it asks for an interpreter of its own, or for a hash seed, which only a new interpreter takes.
    """
    env = {
        **os.environ,
        "GEO_SOKOBAN_DATA_ROOT": str(data_root),
        "KEDRO_DISABLE_TELEMETRY": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]),
        **environment,
    }
    command = ["kedro", "run", *([f"--env={conf_env}"] if conf_env else []), *words]
    if not (own_interpreter or "PYTHONHASHSEED" in environment):
        return ForkedCommand(command, folder, env)
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def link_project(folder: Path, conf: bool = True) -> Path:
    """A folder that looks like the project's: Kedro wants the package inside it, whatever else it holds."""
    for name in ("pyproject.toml", "src/geo_sokoban_pipeline", "docs", *(["conf"] if conf else [])):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(ROOT / name)
    return folder


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
