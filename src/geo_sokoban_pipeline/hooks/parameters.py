"""Parameters are checked as soon as Kedro has read them: a run with a wrong name or value does no work at all.

`run_id` and `fresh` belong to one command, not to the project: the catalog reads them from `--params` alone, so a value
in a configuration file would be ignored by half of the program and is refused.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedro.framework.hooks import hook_impl

from geo_sokoban_pipeline.console import refuse
from geo_sokoban_pipeline.hooks.command_line import read_lists
from geo_sokoban_pipeline.hooks.data import ON_RUNS
from geo_sokoban_pipeline.launch import MODEL_NAME, MODELS
from geo_sokoban_pipeline.options.base import ParameterError, validate_parameters
from geo_sokoban_pipeline.options.project import ProjectParameters
from geo_sokoban_pipeline.tasks import TASKS

if TYPE_CHECKING:
    from kedro.framework.context import KedroContext

COMMAND_ONLY = ("run_id", "fresh")


class ParameterHooks:
    """Refuses unusable parameters and gives `run_id` and `fresh` their defaults."""

    @hook_impl(tryfirst=True)
    def after_context_created(self, context: KedroContext) -> None:
        """Check the parameters of the new context, as merged from its environment and `--params`.

        Raises:
            ParameterError: as a plain message where Kedro's command line runs.
        """
        loader = context.config_loader
        loader.runtime_params = read_lists(loader.runtime_params)
        try:
            parameters = check_parameters(loader["parameters"], loader.runtime_params or {})
        except ParameterError as error:
            refuse(error)
        # From here on `params:run_id` and `params:fresh` exist for every node, given or not.
        loader["parameters"] = {
            **name_tasks(loader["parameters"], parameters.run_id),
            **{name: getattr(parameters, name) for name in COMMAND_ONLY},
        }


def name_tasks(merged: Mapping[str, Any], run_id: str) -> dict[str, Any]:
    """Parameters whose sections say what their names do: a training section its task, one that works on stored runs the
    task's own run of the command's run id, unless it names another.
    """
    named = dict(merged)
    for task in TASKS:
        run = f"train_{task}"
        named[run] = {**(merged.get(run) or {}), "task": task}
        for kind in ON_RUNS:
            section = dict(merged.get(f"{kind}_{task}") or {})
            source = {"run": run, "run_id": run_id, **(section.get("source") or {})}
            named[f"{kind}_{task}"] = {**section, "source": source}
    return named


def check_parameters(merged: dict[str, Any], from_command: dict[str, Any]) -> ProjectParameters:
    """Validate all parameters of a run.

    Args:
        merged: configuration files and command together.
        from_command: what `--params` (or `%reload_kedro --params`) gave.

    Raises:
        ParameterError: unknown name, value not allowed, `run_id` or `fresh` in a configuration file, or a model of the
            launchers' variable that is none of theirs.
    """
    check_model_names(merged, os.environ)
    for name in COMMAND_ONLY:
        if name in merged and name not in from_command:
            raise ParameterError(
                f"{name}={merged[name]}: stands in a configuration file, but belongs to one command. "
                f"Remove it there and give it by --params {name}=…"
            )
    return validate_parameters(merged, ProjectParameters)


def check_model_names(merged: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """See that a model which the launchers' variable has put into the parameters is one of theirs.

    Raises:
        ParameterError: it is not; a path of another kind, or from another place, is nobody's business here.
    """
    name = environment.get(MODEL_NAME)
    if name is None or name in MODELS:
        return
    for task in TASKS:
        path = ((merged.get(f"train_{task}") or {}).get("policy") or {}).get("path")
        if path == f"Qwen/{name}":
            near = difflib.get_close_matches(name, MODELS, n=1)
            raise ParameterError(
                f"train_{task}.policy.path={json.dumps(path)}: {MODEL_NAME}={name} is none of {', '.join(MODELS)}."
                + (f" Did you mean {near[0]}?" if near else "")
                + " Any other Qwen3-VL policy can be given by policy.path itself."
            )


def settings_of(context: KedroContext) -> tuple[ProjectParameters, Path]:
    """Validated parameters and absolute data root of a context that `ParameterHooks` has checked."""
    parameters = validate_parameters(context.config_loader["parameters"], ProjectParameters)
    root = Path(str(context.config_loader["globals"]["data_root"])).expanduser()
    return parameters, (Path(context.project_path) / root).resolve()
