"""One MLflow run: opened once, continued ever after, no step and no parameter sent twice.

Only MLflow's client is used, never its "active run", so nothing here is shared with a user's own MLflow code. MLflow is
imported by `connect` alone: a command without tracking does not pay its two seconds.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geo_sokoban_pipeline.masking import without_login
from geo_sokoban_pipeline.provenance import describe_maker, typed_command
from geo_sokoban_pipeline.storage import read_json, write_json

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

    from geo_sokoban_pipeline.options.project import TrackingOptions

NOTE = "mlflow_run.json"
OWN_STORE = "mlflow.db"  # in the data root; a run's note names it without its folder, so that the root may be moved
# A row that MLflow has has one of these, whatever else it lacks.
_IN_EVERY_ROW = ("perf/step_time", "rollout/episodes", "rollout/raw_reward")
_STEP = ("iteration", "policy_version")  # the axis of every chart, no values of their own
_ZERO_STD = "rollout/zero_std/count"
_NO_NAME = re.compile(r"[^\w\-. :/]")  # what MLflow takes in no name
_MODES = ("sampled", "greedy")
_START, _VALIDATION = "eval/start/", "eval/validation/"

# MLflow's own limits: entries per request, characters per value.
_PARAMETERS_PER_REQUEST = 100
_PARAMETER_LENGTH = 6000
_TAG_LENGTH = 5000


def connect(options: TrackingOptions, data_root: Path) -> tuple[MlflowClient, str, str]:
    """A client of the tracking store, the experiment's id, and the store's URI; makes what does not exist yet."""
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    uri = options.uri or f"sqlite:///{data_root / OWN_STORE}"
    if options.uri is None:
        data_root.mkdir(parents=True, exist_ok=True)
        follow_move(data_root)
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(options.experiment)
    if experiment is not None:
        return client, experiment.experiment_id, uri
    # Beside the database of this project; a server of somebody's own knows its place better.
    location = (data_root / "mlartifacts").as_uri() if options.uri is None else None
    try:
        made = client.create_experiment(options.experiment, artifact_location=location)
        return client, made, uri
    except MlflowException:
        # Another run has created it since: two runs may start together.
        experiment = client.get_experiment_by_name(options.experiment)
        if experiment is None:
            raise
        return client, experiment.experiment_id, uri


def follow_move(data_root: Path) -> None:
    """Let a store whose data root was moved or copied find its artifacts: MLflow keeps their absolute places."""
    database = data_root / OWN_STORE
    if not database.is_file():
        return
    here = (data_root / "mlartifacts").as_uri()
    with closing(sqlite3.connect(database, timeout=10)) as connection, connection:
        places = connection.execute("SELECT DISTINCT artifact_location FROM experiments").fetchall()
        for (place,) in places:
            # Only what this project has placed: another experiment of the store may lie anywhere.
            if place and place != here and place.startswith("file:") and place.endswith("/mlartifacts"):
                connection.execute(
                    "UPDATE experiments SET artifact_location = ? WHERE artifact_location = ?", (here, place)
                )
                connection.execute(
                    "UPDATE runs SET artifact_uri = ? || substr(artifact_uri, ?) WHERE substr(artifact_uri, 1, ?) = ?",
                    (here, len(place) + 1, len(place) + 1, f"{place}/"),
                )


def close_killed(client: MlflowClient, experiment_id: str, is_alive: Callable[[str, str, str], bool]) -> None:
    """Close the runs of commands that were killed: nobody else says how they ended.

    Args:
        is_alive: whether a command works on the run `run`, `run_id` whose MLflow run has this id.
    """
    running = client.search_runs([experiment_id], filter_string="attributes.status = 'RUNNING'", max_results=1000)
    for found in running:
        tags = found.data.tags
        if "run" in tags and "run_id" in tags and not is_alive(tags["run"], tags["run_id"], found.info.run_id):
            client.set_terminated(found.info.run_id, "KILLED")


class MlflowRun:
    """A run of the MLflow store and the steps that it has."""

    def __init__(self, client: MlflowClient, mlflow_run_id: str) -> None:
        self._client = client
        self.mlflow_run_id = mlflow_run_id
        known = (client.get_metric_history(mlflow_run_id, name) for name in _IN_EVERY_ROW)
        self._steps = {metric.step for history in known for metric in history}

    @classmethod
    def resume(cls, client: MlflowClient, experiment_id: str, uri: str, folder: Path) -> MlflowRun | None:
        """The MLflow run noted in a run's folder, or None where there is none in this store and experiment."""
        from mlflow.exceptions import MlflowException

        note = folder / NOTE
        if not note.is_file():
            return None
        stored = read_json(note)
        if (_portable(str(stored.get("tracking_uri"))), stored.get("experiment_id")) != (
            _portable(uri),
            experiment_id,
        ):
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
        place = _portable(uri)
        write_json(folder / NOTE, {"mlflow_run_id": identifier, "experiment_id": experiment_id, "tracking_uri": place})
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
            step = int(row["iteration"])
            if step in self._steps:
                continue
            now = int(time.time() * 1000)
            points = [Metric(name, value, now, at) for name, value, at in points_of(row)]
            self._client.log_batch(self.mlflow_run_id, metrics=points)
            self._steps.add(step)

    def log_points(self, points: Iterable[tuple[str, float, int]]) -> None:
        """Record (metric, value, step) where MLflow does not have them yet."""
        from mlflow.entities import Metric

        points = list(points)
        names = {name for name, _, _ in points}
        known = {
            (name, point.step, point.value)
            for name in names
            for point in self._client.get_metric_history(self.mlflow_run_id, name)
        }
        now = int(time.time() * 1000)
        new = [Metric(name, value, now, step) for name, value, step in points if (name, step, value) not in known]
        if new:
            self._client.log_batch(self.mlflow_run_id, metrics=new)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags; those that are there are replaced."""
        for name, value in tags.items():
            self._client.set_tag(self.mlflow_run_id, name, value[:_TAG_LENGTH])

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


def points_of(row: Mapping[str, Any]) -> list[tuple[str, float, int]]:
    """A metrics row as MLflow shows it best: (metric, value, step).

    The step is the iteration; of validations the version of the policy, so that the one before training is the first
    point of their curves and no chart of its own. Groups of equal rewards are counted together: a metric for each
    reward would have no bound.
    """
    iteration = int(row["iteration"])
    points: list[tuple[str, float, int]] = []
    equal = 0.0
    for name, value in row.items():
        if value is None or name in _STEP:
            continue
        if name.startswith(f"{_ZERO_STD}_"):
            equal += float(value)
        elif name.startswith(_START):
            points.append((_VALIDATION + name.removeprefix(_START), float(value), 0))
        elif name.startswith(_VALIDATION):
            points.append((name, float(value), iteration + 1))
        else:
            points.append((name, float(value), iteration))
    # A row of the loop: an iteration without such groups has 0 of them, which is no gap in the curve.
    return [*points, (_ZERO_STD, equal, iteration)] if any(name.startswith("rollout/") for name in row) else points


def evaluation_points(summary: Mapping[str, Any], step: int) -> list[tuple[str, float, int]]:
    """The evaluation of the policies at the end of a run as points of `eval/final/…`.

    The policy before GRPO is the point at step 0, the final one that at `step`, so that a chart is a line from one to
    the other; of a single policy there is one point.
    """
    names = [str(name) for name in summary.get("policies") or []]
    steps = {names[-1]: step, **({names[0]: 0} if len(names) > 1 else {})} if names else {}
    return [
        (f"eval/final/{row['mode']}_solve_rate", float(row["solve_rate"]), steps[row["policy"]])
        for row in summary.get("rows") or []
        if row.get("policy") in steps and row.get("mode") in _MODES and row.get("solve_rate") is not None
    ]


def evaluation_tags(summary: Mapping[str, Any]) -> dict[str, str]:
    """What else was evaluated (baselines, blank images) and the intervals, as tags: a chart of each would be noise."""
    names = [str(name) for name in summary.get("policies") or []]
    tags = {}
    for row in summary.get("rows") or []:
        if row.get("solve_rate") is None:
            continue
        mode = row.get("mode") if row.get("mode") in _MODES else None
        name = _NO_NAME.sub("_", f"eval.final.{row['policy']}" + (f".{mode}" if mode else ""))
        if row["policy"] not in (names[0], names[-1]) if names else True:
            tags[name] = f"{row['solve_rate']:.4f}"
        if row.get("low") is not None and row.get("high") is not None:
            tags[f"{name}.interval"] = f"{row['low']:.4f}–{row['high']:.4f}"
    return tags


def warm_start_points(history: Iterable[Mapping[str, Any]]) -> list[tuple[str, float, int]]:
    """A warm start's history as points of `warm_start/…` at its optimizer steps."""
    return [
        (f"warm_start/{name}", float(value), int(row["step"]))
        for row in history
        for name, value in row.items()
        if name not in ("step", "seconds", "cpu_seconds") and value is not None
    ]


def process_tags(project_path: Path) -> dict[str, str]:
    """Command, commit (where the project is a git checkout) and versions of this process."""
    maker = describe_maker(project_path)
    tags = {
        "command": typed_command(),
        "machine": f"{maker['processor'] or maker['machine']}, {maker['cores']} cores",
        "version.geo-sokoban-pipeline": maker["version"],
        "version.kedro": importlib.metadata.version("kedro"),
        **{f"version.{name}": maker[name] for name in ("python", "torch", "transformers")},
    }
    return {**tags, "mlflow.source.git.commit": maker["commit"]} if maker["commit"] else tags


def _portable(uri: str) -> str:
    """The store's URI without a login, and without the data root where it lies in one: that may be moved."""
    return OWN_STORE if uri.startswith("sqlite:") and uri.endswith(f"/{OWN_STORE}") else without_login(uri)
