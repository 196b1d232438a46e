"""Configuration: Kedro's OmegaConf loader with resolvers that see the parameters.

`${task_data:}` has the folder of each task's tables, `${sources:}` the run that each pipeline on stored runs works on,
`${docs_root:}` the folder that holds the docs of a study; `settings.py` lists them. All follow from the parameters
alone, so commands without hooks (`kedro viz`) find the same files as `kedro run`. The loader changes no value.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from kedro.config import OmegaConfigLoader
from omegaconf import OmegaConf
from omegaconf.resolvers import oc

from geo_sokoban_pipeline.config.base import validate_parameters
from geo_sokoban_pipeline.envs.data_identity import identify_data
from geo_sokoban_pipeline.hooks.command_line import read_lists
from geo_sokoban_pipeline.tasks import TASKS


@contextmanager
def _without_deprecation() -> Iterator[None]:
    """Kedro 1.7 calls a deprecated function of omegaconf 2.4 whenever it reads; this project cannot change that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"register_new_resolver\(\) is deprecated")
        yield


def read_variable(name: str, *default: Any, environ: Mapping[str, str] = os.environ) -> Any:
    """The resolver `oc.env`: an empty variable is unset where there is a default, and `~` is the home folder.

    Compose files and .env files set variables that they have no value for, and no shell expands the `~` in them.
    """
    if default and not environ.get(name):
        return None if default[0] is None else str(default[0])
    return os.path.expanduser(environ[name] if name in environ else oc.env(name))  # which says what is missing


def task_data(parameters: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """By task, the id of the data that its section describes and the module of its tables' schemas."""
    found = {}
    for name, task in TASKS.items():
        options = validate_parameters(parameters.get(name, {}), task.data_config, prefix=name)
        found[name] = {"id": identify_data(name, options).id, "schemas": task.schemas}
    return found


def sources(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The `source` of each section that has one."""
    return {
        name: section["source"]
        for name, section in parameters.items()
        if isinstance(section, dict) and isinstance(section.get("source"), dict)
    }


def docs_root(parameters: Mapping[str, Any]) -> str:
    """The folder that holds the docs of a study."""
    docs = (parameters.get("study") or {}).get("docs")
    return "." if docs is None else str(Path(docs).parent)


class ProjectConfigLoader(OmegaConfigLoader):
    """`OmegaConfigLoader` with lists in `--params`, and with resolvers of the catalog that see the parameters.

    Args:
        parameter_resolvers: by name, functions of the merged parameters and of the words in the configuration.
    """

    def __init__(
        self,
        conf_source: str,
        env: str | None = None,
        runtime_params: dict[str, Any] | None = None,
        *,
        parameter_resolvers: Mapping[str, Callable[..., Any]],
        **options: Any,
    ) -> None:
        self._parameter_resolvers = parameter_resolvers
        with _without_deprecation():
            super().__init__(conf_source, env, read_lists(runtime_params), **options)

    def __getitem__(self, key: str) -> dict[str, Any]:
        """Configuration of a kind, such as `catalog`; every hook needs the parameters, so they are read once."""
        with _without_deprecation():
            if key == "catalog":
                # Anew, as Kedro does with its own: resolvers belong to the process, not to a loader. The parameters are
                # read before the catalog is: reading them within it would give Kedro's resolvers other values.
                parameters = self["parameters"]
                for name, resolver in self._parameter_resolvers.items():
                    OmegaConf.register_new_resolver(name, partial(resolver, parameters), replace=True)
            found: dict[str, Any] = super().__getitem__(key)
        if key == "parameters":
            self[key] = found
        return found

    def globals_with(self, variables: Mapping[str, str]) -> dict[str, Any]:
        """Globals of a command with these further environment variables; no variable is set here."""
        with _without_deprecation():
            read = partial(read_variable, environ={**os.environ, **variables})
            OmegaConf.register_new_resolver("oc.env", read, replace=True)
            try:
                # Kedro reads the files again, and resolves no --params in them.
                return super().__getitem__("globals")
            finally:
                OmegaConf.register_new_resolver("oc.env", read_variable, replace=True)
