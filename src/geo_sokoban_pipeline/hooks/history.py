"""History: every run knows which commands have worked on it, when, on which machine and for how long.

The entry is renewed whenever a dataset is saved, at most every few seconds, so that a command that is killed has left
its time. What cannot be written (a full disk) is a warning: it is not the history that must stop a run.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedro.framework.hooks import hook_impl
from kedro.framework.project import pipelines

from geo_sokoban_pipeline.hooks.parameters import settings_of
from geo_sokoban_pipeline.hooks.runs import run_names
from geo_sokoban_pipeline.provenance import CommandRecord, describe_maker, typed_command
from geo_sokoban_pipeline.run_store import RunFolders

if TYPE_CHECKING:
    from kedro.framework.context import KedroContext
    from kedro.pipeline import Pipeline

log = logging.getLogger(__name__)
_UNTIMED = ("check_", "compare")  # a pre-flight makes no result, a comparison none of its own


class HistoryHooks:
    """Keeps `commands.json` of each run that the command works on."""

    def __init__(self) -> None:
        self._run_id = ""
        self._data_root = Path()
        self._env: str | None = None
        self._records: list[CommandRecord] = []

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        """Remember run id, data root and environment."""
        parameters, self._data_root = settings_of(context)
        self._run_id, self._env = parameters.run_id, context.env

    @hook_impl
    def before_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline) -> None:
        """Begin the command's entry in each run. `RunHooks` comes before: a command that is refused leaves none."""
        self._records = []
        runs = [run for run in run_names(pipeline, pipelines) if not run.startswith(_UNTIMED)]
        if not runs:
            return
        maker = describe_maker(Path(run_params["project_path"]))
        entry = {"command": typed_command(), "env": self._env or "local", **maker}

        def begin(run: str) -> None:
            outputs = RunFolders.of(self._data_root, run, self._run_id).outputs
            self._records.append(CommandRecord(outputs, entry))

        for run in runs:
            self._attempt(begin, run)
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
