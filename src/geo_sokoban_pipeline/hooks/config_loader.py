"""Configuration: Kedro's OmegaConf loader with resolvers for what the catalog takes from the parameters.

`${data_id:<task>}` is the folder of a task's tables, `${sources:}` the run that each pipeline on stored runs works on,
`${docs_root:}` the folder that holds the docs of a study. All follow from the parameters alone, so commands without
hooks (`kedro viz`) find the same files as `kedro run`. Parameters are read once for each loader: every hook needs them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kedro.config import OmegaConfigLoader
from omegaconf import OmegaConf
from omegaconf.resolvers import oc

from geo_sokoban_pipeline.config.base import validate_parameters
from geo_sokoban_pipeline.envs.data_identity import identify_data
from geo_sokoban_pipeline.hooks.command_line import read_lists
from geo_sokoban_pipeline.tasks import task_of


@contextmanager
def _without_deprecation() -> Iterator[None]:
    """Kedro 1.7 calls a deprecated function of omegaconf 2.4 whenever it reads; this project cannot change that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"register_new_resolver\(\) is deprecated")
        yield


def read_variable(name: str, *default: Any) -> Any:
    """The resolver `oc.env`, for which an empty variable is unset where there is a default.

    Compose files and .env files set variables that they have no value for.
    """
    if default and not os.environ.get(name):
        return None if default[0] is None else str(default[0])
    return oc.env(name, *default)


def _expanded(found: dict[str, Any]) -> dict[str, Any]:
    """Globals with the data root that everything uses: no shell expands the `~` of a .env file or of a unit."""
    root = found.get("data_root")
    return found if root is None else {**found, "data_root": os.path.expanduser(str(root))}


class ProjectConfigLoader(OmegaConfigLoader):
    """`OmegaConfigLoader` with the resolvers of the catalog, and lists in `--params`."""

    def __init__(
        self, conf_source: str, env: str | None = None, runtime_params: dict[str, Any] | None = None, **options: Any
    ) -> None:
        with _without_deprecation():
            super().__init__(conf_source, env, read_lists(runtime_params), **options)

    def __getitem__(self, key: str) -> dict[str, Any]:
        """Configuration of a kind, such as `catalog`."""
        with _without_deprecation():
            if key == "catalog":
                self._register_resolvers()
            found: dict[str, Any] = super().__getitem__(key)
        if key == "parameters":
            for section in found.values():
                source = section.get("source") if isinstance(section, dict) else None
                if isinstance(source, dict) and "run" in source:
                    source.setdefault("run_id", found.get("run_id", "default"))
            self[key] = found
        return _expanded(found) if key == "globals" else found

    def globals_with(self, variables: Mapping[str, str]) -> dict[str, Any]:
        """Globals of a command with these further environment variables; no variable is set here."""

        def env(name: str, *default: Any) -> Any:
            return variables[name] if name in variables else read_variable(name, *default)

        with _without_deprecation():
            OmegaConf.register_new_resolver("oc.env", env, replace=True)
            try:
                # Kedro reads the files again, and resolves no --params in them.
                return _expanded(super().__getitem__("globals"))
            finally:
                OmegaConf.register_new_resolver("oc.env", read_variable, replace=True)

    def _register_resolvers(self) -> None:
        """Register the resolvers anew, as Kedro does with its own: resolvers belong to the process, not to a loader.

        The parameters are read before the catalog is: reading them within it would give Kedro's resolvers other values.
        """
        merged = self["parameters"]

        def data_id(task: str) -> str:
            return identify_data(
                task, validate_parameters(merged.get(task, {}), task_of(task).data_config, prefix=task)
            ).id

        def sources() -> Any:
            sections = {name: section for name, section in merged.items() if isinstance(section, dict)}
            found = {name: section.get("source") for name, section in sections.items()}
            return {name: source for name, source in found.items() if isinstance(source, dict)}

        def docs_root() -> str:
            docs = (merged.get("study") or {}).get("docs")
            return "." if docs is None else str(Path(docs).parent)

        OmegaConf.register_new_resolver("data_id", data_id, replace=True)
        OmegaConf.register_new_resolver("docs_root", docs_root, replace=True)
        OmegaConf.register_new_resolver("sources", sources, replace=True)
