"""The command as a dataset: a pipeline that starts commands of its own reads from it where and how it runs itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kedro.framework.hooks import hook_impl

from geo_sokoban_pipeline.hooks.parameters import settings_of
from geo_sokoban_pipeline.studies.command import Command

if TYPE_CHECKING:
    from kedro.framework.context import KedroContext
    from kedro.io import DataCatalog
    from kedro.pipeline import Pipeline

COMMAND = "command"


class CommandHooks:
    """Puts the entry `command` into the catalog of a pipeline that asks for it."""

    def __init__(self) -> None:
        self._command: Command | None = None

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        """Remember project, configuration, environment and data root."""
        _, data_root = settings_of(context)
        source = str(context.config_loader.conf_source)
        self._command = Command(Path(context.project_path), source, context.env, data_root)

    @hook_impl
    def before_pipeline_run(self, pipeline: Pipeline, catalog: DataCatalog) -> None:
        """Add the entry where it is an input."""
        if COMMAND in pipeline.inputs():
            from kedro.io import MemoryDataset

            catalog[COMMAND] = MemoryDataset(self._command, copy_mode="assign")
