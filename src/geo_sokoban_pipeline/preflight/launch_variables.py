"""Variables of the original launchers: a row for each one that is set, and what became of it.

A variable that is set and changes nothing is a warning: whoever set it expects otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from geo_sokoban_pipeline.launch import NUM_GPUS, VARIABLES, Variable, unknown_variables
from geo_sokoban_pipeline.preflight.checks import Check, State
from geo_sokoban_pipeline.preflight.subject import Subject

_GROUP = "launch variables"
_UNUSED_KEY = "WANDB_API_KEY"


def check_variables(subject: Subject, environment: Mapping[str, str] | None = None) -> list[Check]:
    """One row per variable that is set, and one for a key that nothing uses; nothing where none is.

    Args:
        environment: None: of this process.
    """
    environment = os.environ if environment is None else environment
    values = subject.parameters.model_dump(mode="json")
    found = [_check(variable, environment[variable.name], subject, values) for variable in VARIABLES
             if environment.get(variable.name)]  # fmt: skip
    for name, near in unknown_variables(environment).items():
        hint = f"did you mean {near}?" if near else "see docs/full_size.md for those that are read"
        found.append(Check(_GROUP, name, "warning", "no launcher knows this variable", hint))
    if environment.get(_UNUSED_KEY):
        text = "set, and used by nothing here: runs are tracked by MLflow"
        found.append(Check(_GROUP, _UNUSED_KEY, "warning", text, "see tracking.* in docs/parameters.md"))
    return found


def _check(variable: Variable, value: str, subject: Subject, values: Mapping[str, Any]) -> Check:
    paths = [path.format(run=subject.run) for path in variable.parameters]
    here = [path for path in paths if path.split(".")[0] in (subject.task, subject.run)]
    if paths and not here:
        return Check(_GROUP, variable.name, "ok", f"{value}: not of this task, sets {', '.join(paths)}")
    if not paths:
        return Check(_GROUP, variable.name, "warning", f"{value}: sets nothing here", variable.note)
    in_force = {path: _value_at(values, path) for path in here}
    if unread := _unread(here, values):
        return Check(_GROUP, variable.name, "warning", f"{value}: changes nothing, {unread}", variable.note)
    if variable.name == NUM_GPUS:
        return _check_gpus(value, here[0], in_force[here[0]])
    if any(_names(found, value) for found in in_force.values()):
        return Check(_GROUP, variable.name, "ok", f"{value}: sets {', '.join(here)}")
    text = "; ".join(f"{path} is {found}" for path, found in in_force.items())
    way_out = "only --env=qwen3vl reads it, and --params comes before it"
    return Check(_GROUP, variable.name, "warning", f"{value}: changes nothing, {text}", way_out)


def _unread(paths: Sequence[str], values: Mapping[str, Any]) -> str:
    """What makes a parameter count for nothing; empty where it counts."""
    for path in paths:
        section, _, rest = path.partition(".")
        source, engine = _value_at(values, f"{section}.source"), _value_at(values, f"{section}.rollout.engine")
        if rest.startswith(("hub.", "file.")) and not rest.startswith(f"{source}."):
            return f"{section}.source is {source}"
        if rest.startswith("rollout.server.") and engine != "sglang":
            return f"{section}.rollout.engine is {engine}"
    return ""


def _check_gpus(value: str, path: str, count: Any) -> Check:
    import torch

    if value != str(count):
        way_out = "only --env=qwen3vl reads it, and --params comes before it"
        return Check(_GROUP, NUM_GPUS, "warning", f"{value}: changes nothing, {path} is {count}", way_out)
    there = torch.cuda.device_count()
    state: State = "ok" if value.isdigit() and int(value) <= there else "warning"
    way_out = "" if state == "ok" else "what needs a GPU runs on those there are, or on the CPU (policy.device=auto)"
    return Check(_GROUP, NUM_GPUS, state, f"{value} asked for, torch sees {there}", way_out)


def _value_at(values: Any, path: str) -> Any:
    for part in path.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


def _names(found: Any, value: str) -> bool:
    """Whether a parameter's value comes from a variable's: `Qwen/<name>`, `<folder>/train.parquet`, any case."""
    if not isinstance(found, str):
        return False
    text, given = found.lower(), os.path.expanduser(value).lower().rstrip("/")
    return text == given or text.endswith(f"/{given}") or text == f"{given}/train.parquet"
