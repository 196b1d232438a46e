"""A small project around the real settings: two runs and a data source whose nodes only count."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kedro.framework.project
import pytest
import yaml
from kedro.framework.project import configure_project
from kedro.framework.session import KedroSession
from kedro.pipeline import Node, Pipeline
from mlflow.tracking import MlflowClient

ROOT = Path(__file__).parents[2]

CATALOG = """
"{run}.metrics":
  type: partitions.PartitionedDataset
  path: ${globals:data_root}/07_model_output/{run}/${runtime_params:run_id, default}/metrics
  dataset: {type: json.JSONDataset}
  filename_suffix: .json
"""


class Project:
    """Runs pipelines of a temporary project folder; `fail_at` makes the loop raise before that iteration."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fail_at: int | None = None
        self.failure: BaseException = RuntimeError("out of luck")
        self.iterations = 2
        self.seen: list[Any] = []

    def folder(self, layer: str, run: str = "train_sokoban", run_id: str = "default") -> Path:
        return self.path / "data" / layer / run / run_id

    def write_parameters(self, values: dict[str, Any]) -> None:
        (self.path / "conf" / "local" / "parameters.yml").write_text(yaml.safe_dump(values))

    def run(self, *names: str, **selection: Any) -> None:
        params = selection.pop("params", {})
        with KedroSession.create(
            self.path, conf_source=str(self.path / "conf"), runtime_params={"tracking": {"enabled": False}, **params}
        ) as session:
            session.run(pipeline_names=list(names), **selection)

    def pipelines(self) -> dict[str, Pipeline]:
        def prepare(seed: int, run_id: str, fresh: bool) -> dict[str, Any]:
            self.seen.append({"seed": seed, "run_id": run_id, "fresh": fresh})
            return self.seen[-1]

        def loop(state: dict[str, Any]) -> Iterator[dict[str, dict[str, Any]]]:
            for k in range(self.iterations):
                if k == self.fail_at:
                    raise self.failure
                yield {f"iter={k:05d}": {"iteration": k, "rollout/raw_reward": k / 2, "train/kl_loss": None}}

        data = Pipeline([Node(lambda: [1], None, "levels", name="generate")], namespace="sokoban")
        template = Pipeline(
            [
                Node(
                    prepare, ["params:seed", "params:run_id", "params:fresh"], "state", name="prepare", tags=["early"]
                ),
                Node(loop, "state", "metrics", name="loop", tags=["late"]),
            ]
        )
        shared = {"params:seed", "params:run_id", "params:fresh"}
        runs = {
            name: Pipeline(template, namespace=name, parameters=shared) for name in ("train_sokoban", "update_sokoban")
        }
        return {"data_sokoban": data, **{name: data + run for name, run in runs.items()}}


def row(policy: str, mode: str, rate: float, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    """A row of an evaluation summary."""
    return {"policy": policy, "mode": mode, "solve_rate": rate, "low": low, "high": high}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.delenv("GEO_SOKOBAN_DATA_ROOT", raising=False)
    for env in ("base", "local"):
        (tmp_path / "conf" / env).mkdir(parents=True)
    for name in ("globals.yml", "parameters.yml"):
        shutil.copy(ROOT / "conf" / "base" / name, tmp_path / "conf" / "base")
    (tmp_path / "conf" / "base" / "catalog.yml").write_text(CATALOG)
    made = Project(tmp_path)
    configure_project("geo_sokoban_pipeline", preserve_logging=True)
    registry: Callable[[], dict[str, Pipeline]] = made.pipelines
    monkeypatch.setattr(kedro.framework.project.pipelines, "_load_data", registry)
    return made


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of MLflow without runs: on a busy disk, making one takes a minute."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def tracked(project: Project, empty_store: Path) -> Project:
    """The project with a database that is made already."""
    (project.path / "data").mkdir()
    shutil.copy(empty_store, project.path / "data" / "mlflow.db")
    return project
