"""Kedro's settings: which hooks run, how configuration is read and merged.

Parameters of an environment are merged name by name into those of `base`, never section by section, so that
`conf/test/parameters` may change one value and keep its siblings. Importing this module changes nothing in the process.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from geo_sokoban_pipeline.config.launcher_env import launch_value
from geo_sokoban_pipeline.hooks import (
    CommandHooks,
    CommandLineHooks,
    HistoryHooks,
    LiveReportHooks,
    ParameterHooks,
    RunHooks,
    TerminalHooks,
    TrackingHooks,
)
from geo_sokoban_pipeline.hooks.config_loader import ProjectConfigLoader, docs_root, read_variable, sources, task_data

EXTRA_HOOKS = "GEO_SOKOBAN_EXTRA_HOOKS"


def load_extra_hooks(words: str) -> tuple[Any, ...]:
    """Hooks of your own: instances of the classes in a comma-separated list of `module:Class`.

    Raises:
        ValueError: a word has another form, or names nothing that can be imported.
    """
    hooks: list[Any] = []
    for word in filter(None, (part.strip() for part in words.split(","))):
        module, _, name = word.partition(":")
        try:
            hooks.append(getattr(importlib.import_module(module), name)())
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{EXTRA_HOOKS}={words}: {word} is no hook ({error}). It must be module:Class, importable from here."
            ) from error
    return tuple(hooks)


_terminal = TerminalHooks()

# Kedro takes the instances from here, so hooks that a variable names are made at import too; without it nothing is.
# Installed packages need no variable: Kedro finds theirs by the entry point `kedro.hooks`.
HOOKS = (
    ParameterHooks(),
    RunHooks(),
    CommandLineHooks(_terminal.tell_interrupted),  # after RunHooks, so called before: it refuses before any work
    HistoryHooks(),
    _terminal,
    TrackingHooks(),
    LiveReportHooks(),
    CommandHooks(),
    *load_extra_hooks(os.environ.get(EXTRA_HOOKS, "")),
)
DISABLE_HOOKS_FOR_PLUGINS = ("kedro-telemetry",)

CONFIG_LOADER_CLASS = ProjectConfigLoader
CONFIG_LOADER_ARGS: dict[str, Any] = {
    "base_env": "base",
    "default_run_env": "local",
    "custom_resolvers": {"oc.env": read_variable, "launch": launch_value},
    "parameter_resolvers": {"docs_root": docs_root, "sources": sources, "task_data": task_data},
    "merge_strategy": {"parameters": "soft"},
}
