"""One MLflow run: opened once, continued ever after, no step and no parameter sent twice.

Only MLflow's client is used, never its "active run", so nothing here is shared with a user's own MLflow code. MLflow is
imported by `connect` alone: a command without tracking does not pay its two seconds.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geo_sokoban_pipeline.storage import read_json, write_json

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

    from geo_sokoban_pipeline.options.project import TrackingOptions

NOTE = "mlflow_run.json"
STEP = "iteration"  # the metric that tells which rows MLflow has

# MLflow's own limits: entries per request, characters per value.
_PARAMETERS_PER_REQUEST = 100
_PARAMETER_LENGTH = 6000
_TAG_LENGTH = 5000
_VERSIONS = ("geo-sokoban-pipeline", "kedro", "torch", "transformers")


def connect(options: TrackingOptions, data_root: Path) -> tuple[MlflowClient, str, str]:
    """A client of the tracking store, the experiment's id, and the store's URI; makes what does not exist yet."""
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    uri = options.uri or f"sqlite:///{data_root / 'mlflow.db'}"
    if options.uri is None:
        data_root.mkdir(parents=True, exist_ok=True)
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(options.experiment)
    if experiment is not None:
        return client, experiment.experiment_id, uri
    # Beside the database of this project; a server of somebody's own knows its place better.
    location = (data_root / "mlartifacts").as_uri() if options.uri is None else None
    try:
        return client, client.create_experiment(options.experiment, artifact_location=location), uri
    except MlflowException:
        # Another run has created it since: two runs may start together.
        experiment = client.get_experiment_by_name(options.experiment)
        if experiment is None:
            raise
        return client, experiment.experiment_id, uri


class MlflowRun:
    """A run of the MLflow store and the steps that it has."""

    def __init__(self, client: MlflowClient, mlflow_run_id: str) -> None:
        self._client = client
        self.mlflow_run_id = mlflow_run_id
        history = client.get_metric_history(mlflow_run_id, STEP)
        self._steps = {metric.step for metric in history}

    @classmethod
    def resume(cls, client: MlflowClient, experiment_id: str, uri: str, folder: Path) -> MlflowRun | None:
        """The MLflow run noted in a run's folder, or None where there is none in this store and experiment."""
        from mlflow.exceptions import MlflowException

        note = folder / NOTE
        if not note.is_file():
            return None
        stored = read_json(note)
        if (stored.get("tracking_uri"), stored.get("experiment_id")) != (uri, experiment_id):
            return None
        try:
            found = client.get_run(stored["mlflow_run_id"])
        except MlflowException:
            return None
        if found.info.lifecycle_stage != "active":
            return None
        client.update_run(stored["mlflow_run_id"], status="RUNNING")
        return cls(client, stored["mlflow_run_id"])

    @classmethod
    def create(cls, client: MlflowClient, experiment_id: str, uri: str, folder: Path, name: str) -> MlflowRun:
        """A new MLflow run, noted in the run's folder."""
        identifier = client.create_run(experiment_id, run_name=name).info.run_id
        write_json(folder / NOTE, {"mlflow_run_id": identifier, "experiment_id": experiment_id, "tracking_uri": uri})
        return cls(client, identifier)

    def describe(self, tags: Mapping[str, str], parameters: Mapping[str, Any], project_path: Path) -> None:
        """Record parameters, the command, versions and the commit.

        MLflow refuses to change a parameter. One that differs when a run is continued (more iterations, say) becomes a
        tag `continued_with.<name>` beside the first value.
        """
        from mlflow.entities import Param, RunTag

        known = self._client.get_run(self.mlflow_run_id).data.params
        flat = {name: value[:_PARAMETER_LENGTH] for name, value in flatten(parameters).items()}
        changed = {f"continued_with.{k}": v for k, v in flat.items() if k in known and known[k] != v}
        new = [Param(name, value) for name, value in flat.items() if name not in known]
        for start in range(0, len(new), _PARAMETERS_PER_REQUEST):
            self._client.log_batch(self.mlflow_run_id, params=new[start : start + _PARAMETERS_PER_REQUEST])
        all_tags = {**tags, **process_tags(project_path), **changed}
        entries = [RunTag(name, value[:_TAG_LENGTH]) for name, value in all_tags.items()]
        for start in range(0, len(entries), _PARAMETERS_PER_REQUEST):
            self._client.log_batch(self.mlflow_run_id, tags=entries[start : start + _PARAMETERS_PER_REQUEST])

    def log_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Record metrics rows, one point per metric at step `iteration`; rows that MLflow has already are left out."""
        from mlflow.entities import Metric

        for row in rows:
            step = int(row[STEP])
            if step in self._steps:
                continue
            now = int(time.time() * 1000)
            points = [Metric(name, float(value), now, step) for name, value in row.items() if value is not None]
            self._client.log_batch(self.mlflow_run_id, metrics=points)
            self._steps.add(step)

    def log_file(self, path: Path, place: str) -> None:
        """Copy a file to the folder `place` of the run's artifacts; one of the same name is replaced."""
        self._client.log_artifact(self.mlflow_run_id, str(path), place)

    def close(self, status: str, error: Exception | None) -> None:
        """End the run as FINISHED, FAILED or KILLED; an error is kept as a tag."""
        if error is not None:
            self._client.set_tag(self.mlflow_run_id, "error", f"{type(error).__name__}: {error}"[:_TAG_LENGTH])
        self._client.set_terminated(self.mlflow_run_id, status)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested mappings as {dotted name: text}; lists and numbers as JSON, text as it is."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{path}.")
        else:
            flat[path] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return flat


def process_tags(project_path: Path) -> dict[str, str]:
    """Command, commit (where the project is a git checkout) and versions of this process."""
    tags = {"command": shlex.join(sys.argv), "version.python": platform.python_version()}
    for name in _VERSIONS:
        try:
            tags[f"version.{name}"] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=project_path, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return tags
    return {**tags, "mlflow.source.git.commit": done.stdout.strip()} if done.returncode == 0 else tags
