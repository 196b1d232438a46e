"""Tracking: MLflow sees every iteration once, and never has a say.

The MLflow run's id lies in the folder of the run, so a continued run goes on in the same place, and `fresh` begins a
new one. What is stored is the truth: a metrics row that MLflow has missed (it was down, or the process was killed
between the two) is sent at the end, a row that it has is never sent again. Whatever MLflow raises is a warning.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedro.framework.hooks import hook_impl
from kedro.framework.project import pipelines

from geo_sokoban_pipeline.hooks.mlflow_run import (
    NOTE,
    MlflowRun,
    close_killed,
    connect,
    evaluation_points,
    evaluation_tags,
    warm_start_points,
)
from geo_sokoban_pipeline.hooks.parameters import settings_of
from geo_sokoban_pipeline.hooks.runs import run_names
from geo_sokoban_pipeline.hooks.terminal import write_result
from geo_sokoban_pipeline.run_lock import find_holder
from geo_sokoban_pipeline.run_store import DATA_NOTE, RunFolders
from geo_sokoban_pipeline.storage import MANIFEST, read_json
from geo_sokoban_pipeline.tasks import TASKS

if TYPE_CHECKING:
    from kedro.framework.context import KedroContext
    from kedro.pipeline import Pipeline

    from geo_sokoban_pipeline.options.project import ProjectParameters

log = logging.getLogger(__name__)

METRICS = ".metrics"  # the dataset {run}.metrics
_SUMMARY = ".eval_summary"
_STUDY = "study"
_OF_SOURCE = {"generate": {"generate", "problems"}}  # sections that belong to a source of another name
_UNTRACKED = ("check_", "compare")  # they train nothing


class TrackingHooks:
    """Sends parameters, metrics, reports and a sample of trajectories of each run to MLflow."""

    def __init__(self) -> None:
        self._parameters: ProjectParameters | None = None
        self._data_root = Path()
        self._env = ""
        self._runs: dict[str, MlflowRun] = {}
        self._own: list[str] = []

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        """Remember the parameters, the data root and the environment."""
        self._parameters, self._data_root = settings_of(context)
        self._env = context.env or "local"

    @hook_impl
    def before_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline) -> None:
        """Open the MLflow run of each run of the pipeline, or go on with the one that is noted in its folder."""
        assert self._parameters is not None, "Kedro creates the context before it runs a pipeline"
        self._runs = {}
        if not self._parameters.tracking.enabled:
            return
        self._own = [run for run in run_names(pipeline, pipelines) if not run.startswith(_UNTRACKED)]
        for run in self._own:
            self._attempt(f"open the MLflow run of {run}", self._open, run, Path(run_params["project_path"]))
        if self._runs:
            atexit.register(self._close_interrupted)

    @hook_impl
    def after_dataset_saved(self, dataset_name: str, data: Any) -> None:
        """Send the metrics rows that have just been stored; `data` is {partition: row} with control keys."""
        run = dataset_name.removesuffix(METRICS)
        if run in self._runs and dataset_name.endswith(METRICS) and isinstance(data, Mapping):
            rows = [row for row in data.values() if isinstance(row, Mapping)]
            self._attempt("log metrics", self._runs[run].log_rows, rows)
        run = dataset_name.removesuffix(_SUMMARY)
        if run in self._runs and dataset_name.endswith(_SUMMARY) and isinstance(data, Mapping):
            self._attempt("log the evaluation", self._log_evaluation, run, data)

    @hook_impl
    def after_pipeline_run(self) -> None:
        """Send what is missing, then the report and a sample of trajectories."""
        self._finish("FINISHED")

    @hook_impl
    def on_pipeline_error(self, error: Exception) -> None:
        """Mark the runs as failed, with the error."""
        self._finish("FAILED", error)

    def _open(self, run: str, project_path: Path) -> None:
        assert self._parameters is not None
        folders = RunFolders.of(self._data_root, run, self._parameters.run_id)
        client, experiment_id, uri = connect(self._parameters.tracking, self._data_root)
        close_killed(client, experiment_id, self._is_alive)
        tags = {"run": run, "run_id": self._parameters.run_id, "env": self._env}
        tracked = MlflowRun.resume(client, experiment_id, uri, folders.models) or MlflowRun.create(
            client, experiment_id, uri, folders.models, f"{run}/{self._parameters.run_id}"
        )
        self._runs[run] = tracked
        parameters, note = parameters_of(self._parameters, run), folders.models / DATA_NOTE
        if note.is_file():  # a command on a stored run works on the data of that run, not of the settings
            data = read_json(note)
            tags["data_id"], parameters[data["task"]] = data["id"], in_force(data["run"]["params"][data["task"]])
        tracked.describe(tags, parameters, project_path)

    def _is_alive(self, run: str, run_id: str, mlflow_run_id: str) -> bool:
        """Whether a command works on the run of an MLflow run, as far as this data root can tell."""
        if run in self._runs and self._runs[run].mlflow_run_id == mlflow_run_id:
            return True
        folder = RunFolders.of(self._data_root, run, run_id).models
        note = folder / NOTE
        if not note.is_file() or read_json(note).get("mlflow_run_id") != mlflow_run_id:
            return True  # of another data root, or of a run that has been cleared since: not ours to judge
        assert self._parameters is not None
        # This command has the locks of its own runs, and goes on with their MLflow runs.
        return run_id == self._parameters.run_id and run in self._own or find_holder(folder) is not None

    def _log_evaluation(self, run: str, summary: Mapping[str, Any]) -> None:
        assert self._parameters is not None
        section = getattr(self._parameters, run, None)
        loop = getattr(section, "loop", None)
        tracked = self._runs[run]
        tracked.log_points(evaluation_points(summary, loop.iterations if loop is not None else 0))
        headline = write_result(summary)
        tracked.set_tags({**evaluation_tags(summary), **({"mlflow.note.content": headline} if headline else {})})

    def _finish(self, status: str, error: Exception | None = None) -> None:
        assert self._parameters is not None
        for run, tracked in list(self._runs.items()):
            folders = RunFolders.of(self._data_root, run, self._parameters.run_id)
            if error is None:
                self._attempt("log stored metrics", tracked.log_rows, _stored_rows(folders.outputs))
                self._attempt("log the warm start", tracked.log_points, warm_start_points(_history(folders.models)))
                for path, place in artifacts_of(folders, self._parameters.tracking.sample_trajectories):
                    self._attempt(f"log {path.name}", tracked.log_file, path, place)
            self._attempt("close the MLflow run", tracked.close, status, error)
        self._runs = {}

    def _close_interrupted(self) -> None:
        for tracked in self._runs.values():
            self._attempt("close the MLflow run", tracked.close, "KILLED", None)
        self._runs = {}

    def _attempt(self, doing: str, action: Callable[..., None], *arguments: Any) -> None:
        """Call MLflow; a failure ends the tracking of this command, not the command."""
        try:
            action(*arguments)
        except Exception as error:  # a bystander of any make (server, database, plug-in) must not end hours of training
            log.warning(
                "MLflow could not %s; this command goes on untracked. %s: %s", doing, type(error).__name__, error
            )
            self._runs = {}


def parameters_of(parameters: ProjectParameters, run: str) -> dict[str, Any]:
    """What belongs to one run: its own section, its data and the general ones; no section of another pipeline."""
    studies = set() if run.startswith(_STUDY) else {name for name in type(parameters).model_fields if _is_study(name)}
    other_data = set(TASKS) - {run.partition("_")[2]}
    left_out = {"fresh", "tracking", *studies, *other_data}
    return {
        name: in_force(value) if isinstance(value, dict) else value
        for name, value in parameters.model_dump(mode="json", exclude=left_out).items()
        if name == run or name not in pipelines
    }


def in_force(section: Mapping[str, Any]) -> dict[str, Any]:
    """A section without the options of what was not chosen: servers without SGLang, sources that are not used."""
    kept = {name: in_force(value) if isinstance(value, dict) else value for name, value in section.items()}
    if "engine" in kept and kept["engine"] != "sglang":
        kept.pop("server", None)
    if "source" in kept and isinstance(kept["source"], str):
        for name in {"tiny", "hub", "file", "generate", "problems"} - _OF_SOURCE.get(kept["source"], {kept["source"]}):
            kept.pop(name, None)
    return kept


def _is_study(name: str) -> bool:
    """Whether a section describes studies, which no single run needs."""
    return name == _STUDY or name.startswith(f"{_STUDY}_")


def artifacts_of(folders: RunFolders, sample: bool) -> list[tuple[Path, str]]:
    """Files of a run that MLflow gets at its end, each with its place there: reports, newest trajectories."""
    files = [(folders.reports / name, "report") for name in ("report.html", "eval_summary.json")]
    if sample:
        for kind in ("trajectories", "eval_trajectories"):
            parts = sorted((folders.outputs / kind).glob("*/part-*.parquet"))
            files += [(part, f"{kind}/{part.parent.name}") for part in parts[-1:]]
    return [(path, place) for path, place in files if path.is_file()]


def _history(models: Path) -> list[dict[str, Any]]:
    """History of a run's warm start, or of the imitation of a control; `[]` where none is stored."""
    manifest = models / "policy" / MANIFEST
    return read_json(manifest).get("history") or [] if manifest.is_file() else []


def _stored_rows(outputs: Path) -> list[dict[str, Any]]:
    return [read_json(path) for path in sorted((outputs / "metrics").glob("*.json"))]
