"""Runs: a command locks the folders it writes, so that no other process writes them at the same time.

All that can be checked without weights is checked first. A run that `fresh=true` replaces is set aside, and deleted
once the new one has committed (`runs/folders.py`).

A run is a namespace that bears the name of a pipeline (`train_sokoban`), together with a run id. Its folders are
`{layer}/{run}/{run_id}` as in `conf/base/catalog`. Data sources (`sokoban`) are namespaces too, but no runs: their
tables lie under the id of their settings and are written once, by any number of processes.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.framework.project import pipelines
from kedro.io import DataCatalog
from kedro.pipeline import Pipeline

from geo_sokoban_pipeline.config.base import ParameterError
from geo_sokoban_pipeline.config.launcher_env import check_submit
from geo_sokoban_pipeline.console import refuse
from geo_sokoban_pipeline.hooks.parameters import (
    CommandData,
    CommandRequest,
    ContextHooks,
    begin_tables,
    check_tables,
    note_data,
    plan_data,
    point_to_newest,
)
from geo_sokoban_pipeline.hub import PolicyUnavailableError
from geo_sokoban_pipeline.parameters import ProjectParameters, source_of
from geo_sokoban_pipeline.preflight.stored import TRAINING, check_stored_run, find_damaged_rows, find_gaps
from geo_sokoban_pipeline.runs.fingerprint import FingerprintError
from geo_sokoban_pipeline.runs.folders import ASIDE, RunFolders, RunStore
from geo_sokoban_pipeline.runs.lock import LOCK_FILE, RunLock, RunLockedError, find_holder
from geo_sokoban_pipeline.runs.own_code import forget_edited
from geo_sokoban_pipeline.runs.provenance import CommandRecord, describe_maker, typed_command
from geo_sokoban_pipeline.runs.scratch import sweep
from geo_sokoban_pipeline.runs.storage import CorruptFolderError, explain_storage_errors
from geo_sokoban_pipeline.tasks import DEFAULT, TASKS

log = logging.getLogger(__name__)

# Errors that end a command before it begins, with their message alone.
_REFUSALS = (
    RunLockedError,
    FingerprintError,
    CorruptFolderError,
    PolicyUnavailableError,
    ValueError,  # of parameters, too
    OSError,
)

_LAUNCHED = ("qwen3vl", "cluster")  # environments that take the launchers' variables
_SELECTIONS = {
    "from_nodes": "--from-nodes",
    "from_inputs": "--from-inputs",
    "node_names": "--nodes",
    "tags": "--tags",
}


def run_names(pipeline: Pipeline, registered: Iterable[str]) -> list[str]:
    """Namespaces among a pipeline's nodes that bear the name of a registered pipeline, sorted."""
    return sorted({node.namespace.split(".")[0] for node in pipeline.nodes if node.namespace} & set(registered))


class RunHooks(ContextHooks):
    """Holds the lock of every run that the command writes, and sets aside what is stored where `fresh` is given."""

    def __init__(self) -> None:
        self._data: dict[str, CommandData] = {}
        self._locks: list[RunLock] = []
        self._folders: list[RunFolders] = []

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        """Remember what the command itself gave, too."""
        super().after_context_created(context)
        self._given = dict(context.config_loader.runtime_params or {})

    @hook_impl(tryfirst=True)
    def before_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: DataCatalog) -> None:
        """Check the command, lock its runs, set aside what `fresh=true` replaces, and see that the others may continue.

        Raises:
            RunLockedError: another process has one of them.
            FingerprintError: what is stored was made with other parameters.
            OSError, ValueError, RuntimeError: the policy to start from cannot be had; see `check_starting_policy`.
            ParameterError: `fresh` together with a selection of nodes that reads what `fresh` would delete; see also
                `plan_data` and `check_tables`.
        """
        # An interrupted run of this process (in a notebook, say) may still hold its locks.
        self._release()
        forget_edited()
        sweep()
        runs = run_names(pipeline, pipelines)
        self._folders = [self._folders_of(run) for run in runs]
        request = CommandRequest(pipeline, runs, self._given, self._env)
        try:
            self._check(run_params, request)
            _settle_runs(self._data_root, runs, self._parameters)
            self._data = plan_data(request, self._parameters, self._data_root)
            check_tables(self._data, catalog, request, self._data_root)
            self._check_policies(request)
            for folders in self._folders:
                self._locks.append(_lock(folders.models))
                folders.settle()
                folders.tidy()
            if self._parameters.fresh:
                self._set_aside()
            for run, folders in zip(runs, self._folders, strict=True):
                check_stored_run(run, folders.models, self._parameters)
                # Torn rows end a run before its first iteration, not in its report.
                if run.startswith(TRAINING) and (damage := find_damaged_rows(folders.models, folders.outputs)):
                    raise CorruptFolderError("\n".join(damage))
            with explain_storage_errors(self._data_root):
                begin_tables(self._data, request, self._data_root)
                note_data(self._data, dict(zip(runs, self._folders, strict=True)))
        except _REFUSALS as error:
            if len(self._locks) == len(self._folders):
                for folders in self._folders:
                    folders.settle()
            self._release()
            refuse(error)

    def _check(self, run_params: dict[str, Any], request: CommandRequest) -> None:
        """Check all that needs no stored run."""
        # These modules import pyarrow, which most commands do not need.
        from geo_sokoban_pipeline.preflight.first_checks import check_data_source, check_plugins, look_first

        if self._env in _LAUNCHED and any(run.startswith(TRAINING) for run in request.runs):
            check_submit(os.environ)
        if self._parameters.fresh:
            _check_selection(run_params, request)
        for task in sorted(TASKS.keys() & {node.namespace for node in request.pipeline.nodes}):
            check_data_source(task, getattr(self._parameters, task))
        for run in request.runs:
            check_plugins(run, self._parameters)
            look_first(run, self._parameters, self._data_root)

    def _check_policies(self, request: CommandRequest) -> None:
        """Check stored runs, starting policies and sources."""
        from geo_sokoban_pipeline.preflight.first_checks import (
            check_megatron,
            check_replaced,
            check_source,
            check_starting_policy,
        )

        read, store = request.pipeline.inputs(), RunStore(self._data_root)
        for folders in _read_runs(self._data_root, request.runs, self._parameters):
            is_replaced = self._parameters.fresh and folders in self._folders
            for gap in [] if is_replaced else find_gaps(folders.models, folders.outputs):
                log.warning("%s: %s", folders.name, gap)
        for run, folders in zip(request.runs, self._folders, strict=True):
            models = None if self._parameters.fresh else folders.models
            check_starting_policy(run, models, self._parameters)
            check_megatron(run, models, self._parameters)
            check_source(run, read, self._parameters, store)
            if self._parameters.fresh:
                check_replaced(run, folders, self._parameters, self._folders)

    def _set_aside(self) -> None:
        for folders in self._folders:
            if not folders.is_empty:
                log.info("fresh=true: setting %s aside; the new run's first result deletes it", folders.name)
            with explain_storage_errors(folders.models / ASIDE):
                folders.set_aside()

    @hook_impl
    def after_dataset_saved(self, dataset_name: str) -> None:
        """Point to the newest data of a task once its last table is stored."""
        with explain_storage_errors(self._data_root):
            point_to_newest(self._data, dataset_name, self._data_root)
        self._delete_replaced(all_of_it=False)

    @hook_impl(trylast=True)
    def after_pipeline_run(self) -> None:
        """Release the runs and delete the runs that they replace, even if only some nodes ran."""
        self._delete_replaced(all_of_it=True)
        self._release()

    @hook_impl(trylast=True)
    def on_pipeline_error(self) -> None:
        """Release the runs."""
        for folders in self._folders:
            if folders.has_replaced:
                log.warning(
                    "%s: the run that fresh=true replaces is still set aside. The next command on this run id puts it "
                    "back, and with fresh=true starts anew.",
                    folders.name,
                )
        self._release()

    def _delete_replaced(self, *, all_of_it: bool) -> None:
        """Delete the runs that are set aside; not all of them: those whose successors have committed."""
        for folders in self._folders:
            if folders.has_replaced and (all_of_it or folders.has_committed):
                try:
                    folders.delete_replaced()
                except OSError as error:  # the new run is worth more than the space
                    log.warning(
                        "%s: the replaced run is not deleted (%s); the next command does it", folders.name, error
                    )

    def _release(self) -> None:
        while self._locks:
            self._locks.pop().close()


def _settle_runs(root: Path, runs: Iterable[str], parameters: ProjectParameters) -> None:
    """Decide about runs that are set aside, of all run ids that the command names; those in use are left alone."""
    for folders in _read_runs(root, runs, parameters):
        if not folders.has_replaced or find_holder(folders.models) is not None:
            continue
        with closing(_lock(folders.models)):
            done = folders.settle()
        if done == "put back":
            log.warning(
                "%s: a command with fresh=true ended before its run had stored a first result. The run that it had set "
                "aside is put back, and its unfinished successor is deleted.",
                folders.name,
            )


def _read_runs(root: Path, runs: Iterable[str], parameters: ProjectParameters) -> list[RunFolders]:
    """The runs that a command writes or reads."""
    named = {(f"{TRAINING}{DEFAULT}", name) for name in parameters.runs}
    for run in runs:
        options = getattr(parameters, run, None)
        named |= {(run, parameters.run_id), (f"{TRAINING}{run.partition('_')[2]}", parameters.run_id)}
        if (source := source_of(run, parameters)) is not None:
            named |= {(source.run, name) for name in (source.run_id, *getattr(options, "runs", ()))}
    split = {tuple(name.split("/")) if "/" in name else (run, name) for run, name in named}
    return [RunFolders.of(root, run, run_id) for run, run_id in sorted(split)]


def _lock(folder: Path) -> RunLock:
    with explain_storage_errors(folder / LOCK_FILE):
        return RunLock(folder)


def _check_selection(run_params: dict[str, Any], request: CommandRequest) -> None:
    """Refuse a selection of nodes that reads what another node of a replaced run has stored."""
    given = [option for key, option in _SELECTIONS.items() if run_params.get(key)]
    for run in request.runs:
        own = {name for name in pipelines[run].all_outputs() if name.startswith(f"{run}.")}
        for name in sorted(own & request.pipeline.inputs()):
            raise ParameterError(
                f"fresh=true: replaces the run, but with {' '.join(given) or 'these nodes'} this reads {name} of "
                "it. Leave out one of them."
            )


# History: which commands have worked on a run, when, on which machine and for how long.


# A pre-flight, an estimate and an audit make no result, a comparison none of its own.
WITHOUT_RESULT = ("check_", "estimate_", "audit_", "compare")


class HistoryHooks(ContextHooks):
    """Keeps `commands.json` of each run that the command works on."""

    def __init__(self) -> None:
        self._records: list[CommandRecord] = []

    @hook_impl
    def before_pipeline_run(self, pipeline: Pipeline) -> None:
        """Begin the command's entry in each run; `RunHooks` is called before, so a refused command leaves none."""
        self._records = []
        runs = [run for run in run_names(pipeline, pipelines) if not run.startswith(WITHOUT_RESULT)]
        if not runs:
            return
        entry = {"command": typed_command(), "env": self._env or "local", **describe_maker(self._project)}
        for run in runs:
            self._attempt(
                lambda outputs: self._records.append(CommandRecord(outputs, entry)), self._folders_of(run).outputs
            )
        # Ctrl-C and SIGTERM end the process without a hook of Kedro.
        atexit.register(self._close, "interrupted")

    @hook_impl
    def after_dataset_saved(self) -> None:
        """Note the seconds so far."""
        for record in self._records:
            self._attempt(record.renew)

    @hook_impl
    def after_pipeline_run(self) -> None:
        """Note the end."""
        self._close("finished")

    @hook_impl
    def on_pipeline_error(self) -> None:
        """Note that the command has failed."""
        self._close("failed")

    def _close(self, outcome: str) -> None:
        atexit.unregister(self._close)
        for record in self._records:
            self._attempt(record.close, outcome)
        self._records = []

    @staticmethod
    def _attempt(action: Callable[..., None], *arguments: Any) -> None:
        try:
            action(*arguments)
        except OSError as error:
            log.warning("the run's time is not noted: %s", error)
