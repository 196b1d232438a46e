"""Kedro's settings: which hooks run, how configuration is read and merged.

Parameters of an environment are merged name by name into those of `base`, never section by section, so that
`conf/test/parameters` may change one value and keep its siblings. No usage data leave the machine.
"""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

from omegaconf.resolvers import oc

from geo_sokoban_pipeline.config.launcher_env import launch_value
from geo_sokoban_pipeline.console import enrich_logging, quieten_libraries
from geo_sokoban_pipeline.hooks import (
    CommandHooks,
    CommandLineHooks,
    HistoryHooks,
    ParameterHooks,
    RunHooks,
    TerminalHooks,
    TrackingHooks,
)
from geo_sokoban_pipeline.hooks.config_loader import ProjectConfigLoader

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


for _switch, _value in {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "KEDRO_DISABLE_TELEMETRY": "1",
    "MLFLOW_CONFIGURE_LOGGING": "false",  # conf/logging.yml decides, not MLflow
    "MLFLOW_DISABLE_TELEMETRY": "true",
}.items():
    os.environ.setdefault(_switch, _value)

# Kedro 1.7 calls a deprecated function of omegaconf 2.4 in every command; nobody here can act on it.
warnings.filterwarnings("ignore", message=r"register_new_resolver\(\) is deprecated")
# A node of one namespace that reads another's dataset (`sokoban.prompts`, shared by all runs) has a dot in an input's
# name however it is mapped; Kedro warns of that once per process. Names typed by hand inside a template would be wrong
# at once, since they would not exist.
warnings.filterwarnings("ignore", message=r"One or more dataset names contain '\.'", module=r"kedro\.pipeline")
# The drawing of the loop at `train_grpo` is the only use of this feature; where Kedro drops it, a test fails.
warnings.filterwarnings("ignore", message=r"The 'preview_fn' feature is experimental")

enrich_logging()
quieten_libraries()

_terminal = TerminalHooks()
_command_line = CommandLineHooks(_terminal.tell_interrupted)
_command_line.register()

HOOKS = (
    ParameterHooks(),
    _command_line,
    RunHooks(),
    HistoryHooks(),
    _terminal,
    TrackingHooks(),
    CommandHooks(),
    *load_extra_hooks(os.environ.get(EXTRA_HOOKS, "")),
)
DISABLE_HOOKS_FOR_PLUGINS = ("kedro-telemetry",)

CONFIG_LOADER_CLASS = ProjectConfigLoader
CONFIG_LOADER_ARGS = {
    "base_env": "base",
    "default_run_env": "local",
    "custom_resolvers": {"oc.env": oc.env, "launch": launch_value},
    "merge_strategy": {"parameters": "soft"},
}
