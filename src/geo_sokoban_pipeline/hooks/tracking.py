"""Tracking: one MLflow run for each run of the project, opened once and continued ever after; no step is sent twice.

Weights & Biases gets the same where its key is set (`wandb_run.py`).

Ours instead of kedro-mlflow, which opens a run for each command and sends a metric where a dataset is saved: a killed
and continued training would be several runs, with steps twice. `MlflowClient` instead of MLflow's fluent functions,
because these know one active run per process, and a command may have several.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.metadata
import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedro.framework.hooks import hook_impl
from kedro.framework.project import pipelines
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node

from geo_sokoban_pipeline.envs.data_identity import used_options
from geo_sokoban_pipeline.formats import leaves
from geo_sokoban_pipeline.hooks.parameters import ContextHooks
from geo_sokoban_pipeline.hooks.runs import WITHOUT_RESULT, run_names
from geo_sokoban_pipeline.hooks.terminal import write_result
from geo_sokoban_pipeline.hooks.tracked import (
    ARTIFACTS,
    OWN_STORE,
    PromptTable,
    artifact_folder,
    describe_prompts,
    episode_table,
    evaluation_points,
    evaluation_tags,
    points_of,
    policy_table,
    prompt_context,
    read_lineage,
    source_lineage,
    store_uri,
    warm_start_points,
)
from geo_sokoban_pipeline.hooks.wandb_run import WandbRun, is_installed, is_wanted
from geo_sokoban_pipeline.masking import without_login
from geo_sokoban_pipeline.parameters import ProjectParameters, TrackingOptions, source_of
from geo_sokoban_pipeline.preflight.stored import stored_iterations
from geo_sokoban_pipeline.runs.folders import DATA_NOTE, MLFLOW_NOTE, POLICIES, RunFolders
from geo_sokoban_pipeline.runs.lock import find_holder
from geo_sokoban_pipeline.runs.provenance import describe_maker, typed_command
from geo_sokoban_pipeline.runs.storage import MANIFEST, CorruptFolderError, find_json, read_json, write_json
from geo_sokoban_pipeline.tasks import TASKS, task_or_plain

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

NOTE = MLFLOW_NOTE
# Every row has at least one of these, so their steps are the rows that MLflow already has.
_IN_EVERY_ROW = ("perf/step_time", "rollout/episodes", "rollout/raw_reward")

_AT_IMPORT = {"MLFLOW_CONFIGURE_LOGGING": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}

# MLflow's own limits: entries per request, characters per value.
_ENTRIES_PER_REQUEST = 100  # of parameters, and as many of tags
_PARAMETER_LENGTH = 6000
_TAG_LENGTH = 5000
_TABLES = "mlflow.loggedArtifacts"  # tag by which MLflow's page finds tables


def connect(options: TrackingOptions, data_root: Path) -> tuple[MlflowClient, str, str]:
    """A client of the tracking store, the experiment's id, and the store's URI; makes what does not exist yet."""
    import_quietly()
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    uri = store_uri(options, data_root)
    if options.uri is None:
        data_root.mkdir(parents=True, exist_ok=True)
    client = MlflowClient(tracking_uri=uri)
    # Without a place of their own, the artifacts of a database would go to ./mlruns of the working folder.
    folder = artifact_folder(options, data_root)
    place = folder and folder.as_uri()
    if (experiment := client.get_experiment_by_name(options.experiment)) is not None:
        location = experiment.artifact_location
        if options.uri is not None or location == place or not location.endswith(f"/{ARTIFACTS}"):
            return client, experiment.experiment_id, uri
        # The data root was moved or copied. MLflow keeps absolute places of artifacts, so further runs of this
        # experiment would write to the former root.
        client.rename_experiment(
            experiment.experiment_id, f"{options.experiment} before move {experiment.experiment_id}"
        )
    try:
        return client, client.create_experiment(options.experiment, artifact_location=place), uri
    except MlflowException:
        # Another run has created it since: two runs may start together.
        if (experiment := client.get_experiment_by_name(options.experiment)) is None:
            raise
        return client, experiment.experiment_id, uri


def import_quietly() -> None:
    """Import MLflow for good without its telemetry and its log handlers, for which conf/logging.yml decides.

    MLflow takes both from the environment alone, when it is imported; the variables are put back after that.
    """
    before = {name: os.environ.get(name) for name in _AT_IMPORT}
    os.environ.update({name: value for name, value in _AT_IMPORT.items() if before[name] is None})
    try:
        importlib.import_module("mlflow")
    finally:
        for name in (name for name in _AT_IMPORT if before[name] is None):
            del os.environ[name]


def close_killed(client: MlflowClient, experiment_id: str, is_alive: Callable[[str, str, str], bool]) -> None:
    """Close the MLflow runs of killed commands, which could not do so themselves.

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

    service = "MLflow"

    def __init__(self, client: MlflowClient, mlflow_run_id: str) -> None:
        self._client = client
        self._monitor: Any = None
        self.mlflow_run_id = mlflow_run_id
        known = (client.get_metric_history(mlflow_run_id, name) for name in _IN_EVERY_ROW)
        self._steps = {metric.step for history in known for metric in history}

    @classmethod
    def resume(cls, client: MlflowClient, experiment_id: str, uri: str, folder: Path) -> MlflowRun | None:
        """The MLflow run noted in a run's folder, or None where there is none in this store and experiment."""
        from mlflow.exceptions import MlflowException

        stored = _stored_note(folder)
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
        note = {"mlflow_run_id": identifier, "experiment_id": experiment_id, "tracking_uri": _portable(uri)}
        write_json(folder / NOTE, note)
        return cls(client, identifier)

    def describe(self, tags: Mapping[str, str], parameters: Mapping[str, Any]) -> None:
        """Record parameters and tags.

        MLflow refuses to change a parameter. One that differs when a run is continued (more iterations, say) becomes a
        tag `continued_with.<name>` beside the first value.
        """
        from mlflow.entities import Param, RunTag

        known = self._client.get_run(self.mlflow_run_id).data.params
        flat = {name: value[:_PARAMETER_LENGTH] for name, value in flatten(parameters).items()}
        changed = {f"continued_with.{k}": v for k, v in flat.items() if k in known and known[k] != v}
        new = [Param(name, value) for name, value in flat.items() if name not in known]
        entries = [RunTag(name, value[:_TAG_LENGTH]) for name, value in {**tags, **changed}.items()]
        for start in range(0, max(len(new), len(entries)), _ENTRIES_PER_REQUEST):
            part = slice(start, start + _ENTRIES_PER_REQUEST)
            self._client.log_batch(self.mlflow_run_id, params=new[part], tags=entries[part])

    def log_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Record metrics rows, one point per metric at step `iteration`; rows that MLflow has already are left out."""
        from mlflow.entities import Metric

        for row in rows:
            if (step := int(row["iteration"])) not in self._steps:
                now = int(time.time() * 1000)
                points = [Metric(name, value, now, at) for name, value, at in points_of(row)]
                self._client.log_batch(self.mlflow_run_id, metrics=points)
                self._steps.add(step)

    def log_points(self, points: Iterable[tuple[str, float, int]]) -> None:
        """Record (metric, value, step) where MLflow does not have them yet."""
        from mlflow.entities import Metric

        points = list(points)
        known = {
            (name, point.step, point.value)
            for name in {name for name, _, _ in points}
            for point in self._client.get_metric_history(self.mlflow_run_id, name)
        }
        now = int(time.time() * 1000)
        if new := [Metric(name, value, now, step) for name, value, step in points if (name, step, value) not in known]:
            self._client.log_batch(self.mlflow_run_id, metrics=new)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags; those that are there are replaced."""
        for name, value in tags.items():
            self._client.set_tag(self.mlflow_run_id, name, value[:_TAG_LENGTH])

    def log_input(self, table: PromptTable) -> None:
        """Record a table of prompts as an input dataset; MLflow keeps one of the same name and digest once."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(
            name=table.name,
            digest=table.digest,
            source_type="local",
            source=json.dumps({"uri": table.path.absolute().as_uri()}),
            profile=json.dumps({"num_rows": table.rows, "data_id": table.data_id, "source": table.source}),
        )
        context = InputTag("mlflow.data.context", table.context)
        self._client.log_inputs(self.mlflow_run_id, [DatasetInput(dataset, [context])])

    def log_table(self, name: str, columns: Mapping[str, list[Any]]) -> None:
        """Record a table as the artifact `<name>.json`, in place of one that is there: MLflow itself would append."""
        import pandas as pd

        file, frame = f"{name}.json", pd.DataFrame(dict(columns))
        stored = json.loads(self._client.get_run(self.mlflow_run_id).data.tags.get(_TABLES, "[]"))
        if {"path": file, "type": "table"} in stored:
            text = frame.to_json(orient="split", index=False, date_format="iso")
            self._client.log_text(self.mlflow_run_id, text, file)
        else:
            with warnings.catch_warnings():  # MLflow selects columns in a way that pandas 3 deprecates
                warnings.filterwarnings("ignore", message="For backward compatibility, 'str' dtypes are included")
                self._client.log_table(self.mlflow_run_id, frame, file)

    def watch_machine(self, uri: str, interval: float) -> None:
        """Record MLflow's system metrics from a thread, every so many seconds; without psutil there are none.

        Args:
            uri: of the store.
        """
        try:
            from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
        except ImportError as error:
            log.debug("no system metrics: %s", error)
            return
        self._monitor = SystemMetricsMonitor(
            self.mlflow_run_id, sampling_interval=interval, resume_logging=True, tracking_uri=uri
        )
        self._monitor.start()

    def abandon(self) -> None:
        """Stop recording system metrics."""
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            monitor.finish()

    def log_file(self, path: Path, place: str) -> None:
        """Copy a file to the folder `place` of the run's artifacts; one of the same name is replaced."""
        self._client.log_artifact(self.mlflow_run_id, str(path), place)

    def close(self, status: str, error: Exception | None) -> None:
        """End the run as FINISHED, FAILED or KILLED; an error is kept as a tag."""
        self.abandon()
        if error is not None:
            self._client.set_tag(self.mlflow_run_id, "error", f"{type(error).__name__}: {error}"[:_TAG_LENGTH])
        self._client.set_terminated(self.mlflow_run_id, status)


def _stored_note(folder: Path) -> dict[str, Any]:
    """The note of a run's MLflow run; `{}` where there is none that can be read."""
    with suppress(CorruptFolderError):
        return find_json(folder / NOTE) or {}
    return {}


def flatten(values: Mapping[str, Any]) -> dict[str, str]:
    """Nested mappings as {dotted name: text}; lists and numbers as JSON, text as it is."""
    return {
        path: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        for path, value in leaves(values)
    }


def process_tags(project_path: Path) -> dict[str, str]:
    """Command, commit (where the project is a git checkout) and versions of this process."""
    maker = describe_maker(project_path)
    return {
        "command": typed_command(),
        "machine": f"{maker['processor'] or maker['machine']}, {maker['cores']} cores",
        "version.geo-sokoban-pipeline": maker["version"],
        "version.kedro": importlib.metadata.version("kedro"),
        **{f"version.{name}": maker[name] for name in ("python", "torch", "transformers")},
        **({"mlflow.source.git.commit": maker["commit"]} if maker["commit"] else {}),
    }


def _portable(uri: str) -> str:
    """The store's URI without a login; of the project's own store without the data root, which may be moved."""
    return OWN_STORE if uri.startswith(("sqlite:", "sqlite+")) and uri.endswith(f"/{OWN_STORE}") else without_login(uri)


# Hooks: each iteration is sent once; an error of MLflow never ends a run.


log = logging.getLogger(__name__)

_STUDY = "study"


Tracker = MlflowRun | WandbRun  # a run of a tracking service; each method may raise whatever the service raises


class TrackingHooks(ContextHooks):
    """Sends parameters, metrics, inputs, tables, reports and a sample of trajectories of each run to its trackers."""

    def __init__(self) -> None:
        self._runs: dict[str, list[Tracker]] = {}
        self._own: list[str] = []
        self._inputs: set[tuple[str, str]] = set()

    @hook_impl
    def before_pipeline_run(self, pipeline: Pipeline) -> None:
        """Open the MLflow run of each run of the pipeline, or continue the one that is noted in its folder."""
        self._runs, self._inputs = {}, set()
        if not self._parameters.tracking.enabled:
            return
        self._own = [run for run in run_names(pipeline, pipelines) if not run.startswith(WITHOUT_RESULT)]
        self._runs = {run: [] for run in self._own}
        for run in self._own:
            self._attempt(MlflowRun.service, f"open the MLflow run of {run}", self._open, run)
        if is_wanted(self._parameters.tracking) and is_installed():
            for run in self._own:
                self._attempt(WandbRun.service, f"open the run of {run}", self._open_wandb, run)
        if any(self._runs.values()):
            atexit.register(self._finish, "KILLED")

    @hook_impl
    def after_dataset_loaded(self, dataset_name: str, data: Any, node: Node) -> None:
        """Record the prompts that a node of a run reads, once for each run."""
        run = (node.namespace or "").partition(".")[0]
        if not self._runs.get(run) or (run, dataset_name) in self._inputs or prompt_context(dataset_name) is None:
            return
        self._inputs.add((run, dataset_name))
        doing = f"log the input {dataset_name}"
        with self._reading(run, doing):
            if note := find_json(self._folders_of(run).models / DATA_NOTE):
                table = describe_prompts(dataset_name, data, self._data_root, note)
                self._send(run, doing, methodcaller("log_input", table))

    @hook_impl
    def after_dataset_saved(self, dataset_name: str, data: Any) -> None:
        """Send the metrics rows that have just been stored; `data` is {partition: row}."""
        run, _, name = dataset_name.rpartition(".")
        if not self._runs.get(run):
            return
        if name == "metrics" and isinstance(data, Mapping):
            rows = [row for row in data.values() if isinstance(row, Mapping)]
            self._send(run, "log metrics", methodcaller("log_rows", rows))
        elif name in POLICIES:
            self._send_lineage(run)

    @hook_impl
    def after_pipeline_run(self) -> None:
        """Send missing metrics, then tables, the report and a sample of trajectories."""
        self._finish("FINISHED")

    @hook_impl
    def on_pipeline_error(self, error: Exception) -> None:
        """Mark the runs as failed, with the error."""
        self._finish("FAILED", error)

    def _open(self, run: str) -> None:
        tracking, folder = self._parameters.tracking, self._folders_of(run).models
        client, experiment_id, uri = connect(tracking, self._data_root)
        close_killed(client, experiment_id, self._is_alive)
        store = client, experiment_id, uri, folder
        tracked = MlflowRun.resume(*store) or MlflowRun.create(*store, f"{run}/{self._parameters.run_id}")
        self._runs[run].append(tracked)
        tracked.describe(*self._description(run))
        if tracking.system_metrics:
            tracked.watch_machine(uri, tracking.system_metrics)

    def _open_wandb(self, run: str) -> None:
        folders = self._folders_of(run)
        tracked = WandbRun.open(self._parameters.tracking, self._data_root, folders.models, folders.name)
        self._runs[run].append(tracked)
        tracked.describe(*self._description(run))

    def _description(self, run: str) -> tuple[dict[str, str], dict[str, Any]]:
        """Tags and parameters of a run."""
        env = self._env or "local"
        tags = {"run": run, "run_id": self._parameters.run_id, "env": env, **process_tags(self._project)}
        parameters = parameters_of(self._parameters, run)
        # A command on a stored run works on the data of that run, not of the settings.
        if data := find_json(self._folders_of(run).models / DATA_NOTE):
            tags["data_id"], task = data["id"], data["task"]
            parameters[task] = in_force(_used(task, data["run"]["params"][task]))
        source = source_of(run, self._parameters)
        return tags | (source_lineage(source, self._data_root) if source is not None else {}), parameters

    def _is_alive(self, run: str, run_id: str, mlflow_run_id: str) -> bool:
        """Whether a command works on the run of an MLflow run, as far as this data root can tell."""
        if mlflow_run_id in (getattr(tracker, "mlflow_run_id", None) for tracker in self._runs.get(run, ())):
            return True
        folder = RunFolders.of(self._data_root, run, run_id).models
        if _stored_note(folder).get("mlflow_run_id") != mlflow_run_id:
            return True  # of another data root, or of a run that has been cleared since: cannot be decided here
        # This command has the locks of its own runs, and continues their MLflow runs.
        return run_id == self._parameters.run_id and run in self._own or find_holder(folder) is not None

    def _log_evaluation(self, run: str, folders: RunFolders) -> None:
        """Send points, tags, headline and rows of the evaluation, and its episodes."""
        doing = "log the evaluation"
        with self._reading(run, doing):
            if (summary := find_json(folders.evaluation)) is None:
                return
            from geo_sokoban_pipeline.trajectories.index import read_index

            loop = getattr(getattr(self._parameters, run, None), "loop", None)
            points = evaluation_points(summary, loop.iterations if loop is not None else 0)
            self._send(run, doing, methodcaller("log_points", points))
            tags = evaluation_tags(summary)
            if headline := write_result(summary, stored_iterations(folders.models)):
                tags["mlflow.note.content"] = headline
            self._send(run, doing, methodcaller("set_tags", tags))
            kind = "held_out_trajectories" if run.startswith("train_") else "eval_trajectories"
            index = read_index(folders.outputs, task_or_plain, [kind])
            episodes = episode_table(index, [str(name) for name in summary.get("policies") or []])
            for place, columns in (("evaluation/policies", policy_table(summary)), ("evaluation/episodes", episodes)):
                if columns:
                    self._send(run, f"log the table {place}", methodcaller("log_table", place, columns))

    def _send_lineage(self, run: str) -> None:
        doing = "log where its policies come from"
        with self._reading(run, doing):
            self._send(run, doing, methodcaller("set_tags", read_lineage(self._folders_of(run).models)))

    def _finish(self, status: str, error: Exception | None = None) -> None:
        for run in list(self._runs):
            if status == "FINISHED" and self._runs[run]:
                self._send_stored(run, self._folders_of(run))
            self._send(run, "close the run", methodcaller("close", status, error))
        self._runs = {}

    def _send_stored(self, run: str, folders: RunFolders) -> None:
        """Send what a run has stored and its trackers may not have."""
        with self._reading(run, "log stored metrics"):
            rows = [read_json(path) for path in sorted((folders.outputs / "metrics").glob("*.json"))]
            self._send(run, "log stored metrics", methodcaller("log_rows", rows))
        with self._reading(run, "log the warm start"):
            # Of a control: its SFT.
            history = (find_json(folders.models / "policy" / MANIFEST) or {}).get("history") or []
            self._send(run, "log the warm start", methodcaller("log_points", warm_start_points(history)))
        self._send_lineage(run)
        self._log_evaluation(run, folders)
        with self._reading(run, "log its files"):
            for path, place in artifacts_of(folders, self._parameters.tracking.sample_trajectories):
                self._send(run, f"log {path.name}", methodcaller("log_file", path, place))

    @contextmanager
    def _reading(self, run: str, doing: str) -> Iterator[None]:
        """Reading what a run has stored; a failure is a warning, and its trackers get the rest."""
        try:
            yield
        except Exception as error:  # a torn file must not end hours of training, nor leave other runs open
            log.warning("could not %s of %s for its trackers. %s: %s", doing, run, type(error).__name__, error)

    def _send(self, run: str, doing: str, send: Callable[[Tracker], None]) -> None:
        for tracker in list(self._runs.get(run, ())):
            self._attempt(tracker.service, doing, send, tracker)

    def _attempt(self, service: str, doing: str, action: Callable[..., None], *arguments: Any) -> None:
        """Call a service; a failure ends its part of the tracking of this command, not the command."""
        try:
            action(*arguments)
        except Exception as error:  # whatever fails in a server, database or plug-in must not end hours of training
            log.warning(
                "%s could not %s; this command goes on untracked. %s: %s", service, doing, type(error).__name__, error
            )
            for trackers in self._runs.values():
                for tracker in [tracker for tracker in trackers if tracker.service == service]:
                    trackers.remove(tracker)
                    with suppress(Exception):
                        tracker.abandon()


def parameters_of(parameters: ProjectParameters, run: str) -> dict[str, Any]:
    """Parameters of one run: its own section, its data and the general ones; no section of another pipeline."""
    left_out = {"fresh", "tracking", *(set(TASKS) - {run.partition("_")[2]})}
    if not run.startswith(_STUDY):  # sections that describe studies, which no single run needs
        left_out |= {name for name in type(parameters).model_fields if f"{name}_".startswith(f"{_STUDY}_")}
    return {
        name: in_force(_used(name, value)) if isinstance(value, dict) else value
        for name, value in parameters.model_dump(mode="json", exclude=left_out).items()
        if name == run or name not in pipelines
    }


def in_force(section: Mapping[str, Any]) -> dict[str, Any]:
    """A section without options that have no effect: servers without SGLang, sources that are not chosen."""
    kept = {name: in_force(value) if isinstance(value, dict) else value for name, value in section.items()}
    if "engine" in kept and kept["engine"] != "sglang":
        kept.pop("server", None)
    if "source" in kept and isinstance(kept["source"], str):
        for name in {"tiny", "hub"} - {kept["source"]}:
            kept.pop(name, None)
    return kept


def _used(section: str, options: dict[str, Any]) -> dict[str, Any]:
    """The data of a task without what its source does not use; other sections as they are."""
    return used_options(options, TASKS[section].data_config) if section in TASKS else options


def artifacts_of(folders: RunFolders, sample: bool) -> list[tuple[Path, str]]:
    """Files of a run that MLflow gets at its end, each with its place there: reports, newest trajectories."""
    files = [(path, "report") for path in (folders.report, folders.evaluation)]
    if sample:
        for kind in ("trajectories", "eval_trajectories"):
            parts = sorted((folders.outputs / kind).glob("*/part-*.parquet"))
            files += [(part, f"{kind}/{part.parent.name}") for part in parts[-1:]]
    return [(path, place) for path, place in files if path.is_file()]
