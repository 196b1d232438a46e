"""The command as a dataset: a pipeline that starts commands of its own reads from it where and how it runs itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from kedro.framework.hooks import hook_impl

from geo_sokoban_pipeline.hooks.parameters import settings_of
from geo_sokoban_pipeline.studies.command import DATA_ROOT, Command

if TYPE_CHECKING:
    from kedro.config import AbstractConfigLoader
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
        project = Path(context.project_path)

        def find_root(root: Path) -> Path | None:
            return _find_root(context.config_loader, project, root)

        self._command = Command(project, source, context.env, data_root, find_root)

    @hook_impl
    def before_pipeline_run(self, pipeline: Pipeline, catalog: DataCatalog) -> None:
        """Add the entry where it is an input."""
        if COMMAND in pipeline.inputs():
            from kedro.io import MemoryDataset

            catalog[COMMAND] = MemoryDataset(self._command, copy_mode="assign")


def _find_root(loader: AbstractConfigLoader, project: Path, root: Path) -> Path | None:
    """Data root of a command with the same configuration and `root` in the environment; None: there is none."""
    before = os.environ.get(DATA_ROOT)
    os.environ[DATA_ROOT] = str(root)
    try:
        # Kedro reads the files again, and resolves no --params in them.
        found = loader["globals"].get("data_root")
    finally:
        if before is None:
            del os.environ[DATA_ROOT]
        else:
            os.environ[DATA_ROOT] = before
    return None if found is None else (project / Path(str(found)).expanduser()).resolve()
