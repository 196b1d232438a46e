"""Parameters and data of a command: parameters are checked before any work, and a stored run keeps its own data.

A run notes its data in `data.json` in its folder, with all options. A later command on that run is refused where the
parameters describe other data; the message has the parameters of the run, or the command that makes deleted tables
again. Nothing here changes a parameter or an entry of the catalog.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.io import DataCatalog, MemoryDataset
from kedro.pipeline import Pipeline

from geo_sokoban_pipeline.config.base import ParameterError, nearest, validate_parameters
from geo_sokoban_pipeline.config.grpo import SourceOptions
from geo_sokoban_pipeline.config.launcher_env import MODEL_NAME, MODELS
from geo_sokoban_pipeline.console import refusing
from geo_sokoban_pipeline.envs.data_identity import DataIdentity, identify_data
from geo_sokoban_pipeline.hooks.command_line import ROW_SOURCES, all_rows
from geo_sokoban_pipeline.hooks.config_loader import ProjectConfigLoader, sources
from geo_sokoban_pipeline.parameters import ON_RUNS, ProjectParameters
from geo_sokoban_pipeline.preflight.stored import other_settings
from geo_sokoban_pipeline.runs.fingerprint import flatten
from geo_sokoban_pipeline.runs.folders import DATA_NOTE, INPUTS, RunFolders, RunStore, SourceError, prompts_folder
from geo_sokoban_pipeline.runs.provenance import DATA_ROOT, suggest_command
from geo_sokoban_pipeline.runs.storage import read_json, write_json
from geo_sokoban_pipeline.studies.plan import Command
from geo_sokoban_pipeline.tasks import TASKS

log = logging.getLogger(__name__)

IDENTITY = "identity"  # the entry <task>.identity
# Those that read trajectories: of one iteration, or of all.
_READ: Mapping[str, Literal["one", "all"]] = {
    "update": "one",
    "regrade": "all",
    "export": "all",
    "report": "all",
    "browse": "all",
}
_LAST_TABLE = "eval_prompts"


@dataclass(frozen=True)
class CommandData:
    """The data of one task in one command.

    Attributes:
        identity: of the tables, which the parameters describe.
        runs: data of each run that the command writes.
    """

    identity: DataIdentity
    runs: Mapping[str, DataIdentity]


@dataclass(frozen=True)
class CommandRequest:
    """The request that a command makes.

    Attributes:
        pipeline: nodes that will run.
        runs: namespaces of runs that it writes.
        given: parameters that the command itself names, by --params.
        env: configuration environment.
    """

    pipeline: Pipeline
    runs: Collection[str]
    given: Mapping[str, Any]
    env: str | None


def plan_data(request: CommandRequest, parameters: ProjectParameters, root: Path) -> dict[str, CommandData]:
    """The data of each task that a command works on.

    Raises:
        SourceError: a source names a run, or a checkpoint, that is not stored.
        ParameterError: a command cannot work on the data of its run: the parameters describe others, or it trains the
            run itself.
    """
    tasks = {task for _, _, task in (run.partition("_") for run in request.runs)}
    tasks |= {node.namespace for node in request.pipeline.nodes if node.namespace}
    return {task: _plan_task(task, request, parameters, RunStore(root)) for task in TASKS if task in tasks}


def _plan_task(task: str, request: CommandRequest, parameters: ProjectParameters, store: RunStore) -> CommandData:
    current = identify_data(task, getattr(parameters, task))
    runs = {
        run: _source_data(run, current, parameters, request, store)
        for run in (f"{kind}_{task}" for kind in ON_RUNS)  # pipelines that take a source
        if _reads(run, (f"{run}.source_", f"{task}."), request)
    }
    if f"train_{task}" in request.runs:
        runs[f"train_{task}"] = current
    return CommandData(current, runs)


def _reads(run: str, names: tuple[str, ...], request: CommandRequest) -> bool:
    """Whether nodes of a run read an entry whose name begins so; a report alone reads neither a run nor its data."""
    nodes = [node for node in request.pipeline.nodes if node.namespace == run and run in request.runs]
    return any(name.startswith(names) for node in nodes for name in node.inputs)


def _own_rows(run: str, current: DataIdentity, request: CommandRequest) -> bool:
    """Whether a command evaluates alone, and names levels or problems that a stored policy plays.

    Raises:
        ParameterError: it does not say which of the rows; Kedro's command line does (`all_rows`).
    """
    task, given = current.task, request.given.get(current.task, {})
    alone = run == f"evaluate_{task}" and [name for name in request.runs if name.partition("_")[2] == task] == [run]
    if not alone or current.settings["source"] == "generate" or ROW_SOURCES.isdisjoint(given):
        return False
    if words := all_rows(task, given):
        raise ParameterError(
            f"{task}.source={current.settings['source']}: say which of its rows are played. All of them are with "
            f"--params {','.join(words)}."
        )
    return True


def _source_data(
    run: str, current: DataIdentity, parameters: ProjectParameters, request: CommandRequest, store: RunStore
) -> DataIdentity:
    """The data of the run or policy that a source names; logs which one that is.

    Args:
        current: of the parameters.
    """
    task, source = current.task, getattr(parameters, run).source
    if run.startswith("control_"):  # it continues from the warm start, whatever checkpoint is named
        source = source.model_copy(update={"checkpoint": "start"})
    if source.run in request.runs and source.run_id == parameters.run_id and _uses_run(run, source):
        raise ParameterError(
            f"{run} works on {source.run}/{source.run_id}, which the same command makes, and Kedro would not wait "
            f"for it. Type two commands: --pipelines={source.run} first, then --pipelines={run}."
        )
    found = store.describe(source, trajectories=_READ.get(run.partition("_")[0]))
    if not _uses_run(run, source):
        _own_rows(run, current, request)
        log.info("%s works on %s, which has no data of its own; data of the settings: %s", run, found.words, current.id)
        return current
    if (note := store.data_note(source)) is None or note["task"] != task:
        why = f"has no {DATA_NOTE}" if note is None else f"was made with data of {note['task']}"
        raise SourceError(
            f"{run}: the run {source.run}/{source.run_id} {why}. Train it again, or give the folder of its policy in "
            f"{run}.source.checkpoint: the data of the settings ({current.id}) are then used."
        )
    stored = DataIdentity(task, note["id"], note["settings"], note["run"]["params"][task])
    same_source = all(stored.settings.get(name) == current.settings.get(name) for name in ROW_SOURCES)
    if not same_source and _own_rows(run, current, request):
        log.info("%s works on %s, but on other data than its run's: %s", run, found.words, current.id)
        stored = current
    elif stored.id != current.id and (task in request.given or _reads(run, (f"{task}.",), request)):
        raise ParameterError(
            f"{run}: {source.run}/{source.run_id} was made with the data {stored.id}, but the parameters describe "
            f"{current.id}. {_way_back(stored, current)} To try its policy on other data, give "
            f"{run}.source.checkpoint={found.folder}."
        )
    else:
        log.info("%s works on %s, data %s", run, found.words, stored.id)
    if run.startswith(("export_", "report_", "browse_")):
        return stored  # they copy, so no setting of the command matters
    models, train = RunFolders.of(store.root, source.run, source.run_id).models, getattr(parameters, f"train_{task}")
    if others := other_settings(run, models, train):
        log.warning(
            "%s has other settings than %s/%s was trained with, so its numbers are not that run's:\n  %s\n"
            "Give the run's settings as train_%s.… to compare them.",
            run,
            source.run,
            source.run_id,
            "\n  ".join(others),
            task,
        )
    return stored


def _way_back(stored: DataIdentity, current: DataIdentity) -> str:
    """How a command describes the data of a run again."""
    before, now = flatten(stored.options), flatten(current.options)
    changed = {name for name, value in before.items() if now.get(name) != value}
    if not changed:
        return "A file or folder that they were read from has changed since: put it back to work on the run's data."
    if before["source"] != "generate":  # a command that names a source, and no shares of it, evaluates all of its rows
        changed |= {name for name in before if name.startswith("shares.")}
    words = (f"{stored.task}.{name}={json.dumps(before[name], ensure_ascii=False)}" for name in sorted(changed))
    return f"To work on the data of the run, give --params {shlex.quote(','.join(words))}."


def _uses_run(run: str, source: SourceOptions) -> bool:
    """Whether a pipeline reads the run that its source names, and not only a policy from elsewhere."""
    return run.partition("_")[0] in (*_READ, "score", "fork") or RunStore.is_own(source)


def check_tables(planned: Mapping[str, CommandData], catalog: DataCatalog, request: CommandRequest, root: Path) -> None:
    """See that all tables exist that the command reads but does not make.

    Raises:
        ParameterError: one is missing; the message has the command that makes it.
    """
    for task, data in planned.items():
        read = request.pipeline.inputs() - {f"{task}.{IDENTITY}"}  # `begin_tables` writes it
        if missing := [name for name in sorted(read) if name.startswith(f"{task}.") and not catalog.exists(name)]:
            note = _recipe(root, task, data.identity.id)
            how = suggest_command(f"data_{task}", env=request.env)
            if task in request.given:
                write_json(note, _note(data.identity))
                how = suggest_command(None, "default", f"--config={note}", env=request.env)
            raise ParameterError(
                f"{', '.join(missing)}: there are no such tables of the data {data.identity.id}. Make them with "
                f"`{how}`."
            )


def note_data(planned: Mapping[str, CommandData], folders: Mapping[str, RunFolders]) -> None:
    """Note the data of each run in its folder."""
    for data in planned.values():
        for run, identity in data.runs.items():
            _write_if_new(folders[run].models / DATA_NOTE, _note(identity))


def begin_tables(planned: Mapping[str, CommandData], request: CommandRequest, root: Path) -> None:
    """Write `<task>.identity`, what the tables follow from, beside those that are about to be made or read."""
    for task in sorted(planned):
        if any(name.startswith(f"{task}.") for name in request.pipeline.datasets()):
            _write_if_new(_recipe(root, task, planned[task].identity.id), _note(planned[task].identity))


def point_to_newest(planned: Mapping[str, CommandData], dataset_name: str, root: Path) -> None:
    """Note which tables of a task were made last, once the last of them is stored."""
    task, _, table = dataset_name.partition(".")
    if table == _LAST_TABLE and task in planned:
        identity = planned[task].identity
        entry = {"id": identity.id, "folder": identity.id, "settings": identity.settings}
        _write_if_new(root / INPUTS / task / "newest.json", entry)


def _recipe(root: Path, task: str, data_id: str) -> Path:
    return prompts_folder(root, task, data_id) / DATA_NOTE


def _note(identity: DataIdentity) -> dict[str, Any]:
    """The contents of a data.json; `kedro run --config=<it>` makes the tables again."""
    return {
        "id": identity.id,
        "task": identity.task,
        "settings": identity.settings,
        "run": {"pipelines": f"data_{identity.task}", "params": {identity.task: identity.options}},
    }


def _write_if_new(path: Path, value: Mapping[str, Any]) -> None:
    if not path.is_file() or read_json(path) != value:
        write_json(path, value)


# Parameters: checked as soon as Kedro has read them.


COMMAND_ONLY = ("run_id", "fresh")


class ParameterHooks:
    """Refuses unusable parameters."""

    @hook_impl(tryfirst=True)
    def after_context_created(self, context: KedroContext) -> None:
        """Check the parameters of the new context, as merged from its environment and `--params`.

        Raises:
            ParameterError: as a plain message where Kedro's command line runs.
        """
        loader = context.config_loader
        with refusing(ParameterError):
            check_parameters(loader["parameters"], loader.runtime_params or {})


def check_parameters(merged: dict[str, Any], from_command: dict[str, Any]) -> ProjectParameters:
    """Validate all parameters of a run.

    Args:
        merged: configuration files and command together.
        from_command: what `--params` (or `%reload_kedro --params`) gave.

    Raises:
        ParameterError: unknown name, value not allowed, a value of `run_id` or `fresh` in a configuration file, a
            source without a run id, a training section of another task, or a model of the launchers' variable that is
            none of theirs.
    """
    check_model_names(merged, os.environ)
    for name in COMMAND_ONLY:
        default = ProjectParameters.model_fields[name].default
        if merged.get(name, default) != default and name not in from_command:
            raise ParameterError(
                f"{name}={merged[name]}: stands in a configuration file, but belongs to one command. "
                f"Remove it there and give it by --params {name}=…"
            )
    for name, source in sources(merged).items():
        if "run_id" not in source:
            raise ParameterError(f"{name}.source.run_id: is missing. Write run_id: ${{run_id}}, that of the command.")
    # By themselves first: the sources of the pipelines on stored runs repeat the run id, which is one error, not many.
    validate_parameters({name: merged[name] for name in COMMAND_ONLY if name in merged}, ProjectParameters)
    return validate_parameters(merged, ProjectParameters)


def check_model_names(merged: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """See that the model in the launchers' variable is one that the launchers know.

    Raises:
        ParameterError: it is not. Other paths are not checked here.
    """
    if (name := environment.get(MODEL_NAME)) is None or name in MODELS:
        return
    for task in TASKS:
        if (path := ((merged.get(f"train_{task}") or {}).get("policy") or {}).get("path")) == f"Qwen/{name}":
            near = nearest(name, MODELS)
            raise ParameterError(
                f"train_{task}.policy.path={json.dumps(path)}: {MODEL_NAME}={name} is none of {', '.join(MODELS)}."
                + (f" Did you mean {near}?" if near else "")
                + " Any other Qwen3-VL policy can be given by policy.path itself."
            )


def settings_of(context: KedroContext) -> tuple[ProjectParameters, Path]:
    """Validated parameters and absolute data root of a context that `ParameterHooks` has checked."""
    root = Path(context.project_path) / str(context.config_loader["globals"]["data_root"])
    return validate_parameters(context.config_loader["parameters"], ProjectParameters), root.resolve()


class ContextHooks:
    """Hooks that need the settings of a command: Kedro creates the context before it runs a pipeline."""

    _parameters: ProjectParameters
    _data_root: Path  # absolute
    _env: str | None
    _project: Path

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        """Remember the settings; `ParameterHooks` has checked the parameters."""
        self._parameters, self._data_root = settings_of(context)
        self._project, self._env = Path(context.project_path), context.env

    def _folders_of(self, run: str) -> RunFolders:
        """The folders of a run of the command."""
        return RunFolders.of(self._data_root, run, self._parameters.run_id)


# The command as a dataset: a study starts commands of its own with the same project and configuration.


COMMAND = "command"


class CommandHooks(ContextHooks):
    """Puts the entry `command` into the catalog of a pipeline that has it as an input."""

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        """Remember the command with its project and configuration, too."""
        super().after_context_created(context)
        loader = cast(ProjectConfigLoader, context.config_loader)

        def find_root(root: Path) -> Path | None:
            found = loader.globals_with({DATA_ROOT: str(root)}).get("data_root")
            return None if found is None else (self._project / str(found)).resolve()

        self._command = Command(self._project, str(loader.conf_source), self._env, self._data_root, find_root)

    @hook_impl
    def before_pipeline_run(self, pipeline: Pipeline, catalog: DataCatalog) -> None:
        """Add the entry where it is an input."""
        if COMMAND in pipeline.inputs():
            catalog[COMMAND] = MemoryDataset(self._command, copy_mode="assign")
