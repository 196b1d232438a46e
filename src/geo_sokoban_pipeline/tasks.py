"""The registry of tasks: the one place where a name becomes a `Task`.

Three tasks come with the package. Further ones are named in `conf/base/tasks.yml` of the project, as
`name: package.module.OBJECT` or `name: path/to/task.py` (whose object is called `TASK`), or by another package under
the entry point group `geo_sokoban_pipeline.tasks`. Every command reads the registry, so a task's module must be
light to import.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import yaml

from geo_sokoban_pipeline.envs.base import Task, Words
from geo_sokoban_pipeline.envs.plugins import PluginError, load_object

GROUP = "geo_sokoban_pipeline.tasks"
FILE = Path("conf/base/tasks.yml")
DEFAULT = "sokoban"  # task of `kedro run` without a pipeline's name
_OWN = {
    "sokoban": "geo_sokoban_pipeline.envs.sokoban.task.SOKOBAN",
    "geo3k": "geo_sokoban_pipeline.envs.geo3k.task.GEO3K",
    "geo3k_multi_turn": "geo_sokoban_pipeline.envs.geo3k.task.GEO3K_MULTI_TURN",
}


class TaskError(ValueError):
    """A registered task that cannot be used; the message names where it is registered."""


class _Tasks(Mapping[str, Task]):
    """Tasks by name, loaded when they are first asked for."""

    def __getitem__(self, name: str) -> Task:
        return _load()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_load())

    def __len__(self) -> int:
        return len(_load())


TASKS: Mapping[str, Task] = _Tasks()


def task_of(name: str) -> Task:
    """The task of a name.

    Raises:
        ValueError: there is none; the message names those there are.
    """
    if name not in TASKS:
        raise ValueError(f"task={name!r}: must be one of {', '.join(TASKS)}")
    return TASKS[name]


def task_or_plain(name: Any) -> Task:
    """The task of a name; for others, as of runs whose task is no longer registered, one without words of its own."""
    return TASKS.get(str(name), _PLAIN)


class _PlainTask(Task):
    """What readers see of a task that nobody can run."""

    name = title = "task"
    words = Words("prompt", "prompts", "success rate", "solved", "not solved")


_PLAIN: Task = _PlainTask()  # type: ignore[abstract]


def difficulty_text(task: str, row: Mapping[str, Any]) -> str | None:
    """Difficulty of a prompts row as the trajectories keep it; None where it, or the task, is not known.

    A text serves every task: it may be a name, or a number that a column of its own holds as such.
    """
    value = TASKS[task].difficulty_of(row) if task in TASKS else None
    return None if value is None else str(value)


@cache
def _load() -> dict[str, Task]:
    named = {name: (spec, "the package") for name, spec in _OWN.items()}
    further = [
        (point.name, point.value.replace(":", "."), f"entry point {GROUP}") for point in entry_points(group=GROUP)
    ]
    file = _find_file()
    if file is not None:
        further += [(name, _from_project(str(spec), file), str(file)) for name, spec in _read(file).items()]
    for name, spec, where in further:
        if name in named:
            raise TaskError(f"{where}: {name}: there is a task of that name already, from {named[name][1]}")
        named[name] = (spec, where)
    return {name: _load_one(name, spec, where) for name, (spec, where) in named.items()}


def _load_one(name: str, spec: str, where: str) -> Task:
    try:
        task: Task = load_object(spec, default_name="TASK")
    except PluginError as error:
        raise TaskError(f"{where}: {name}: {error}") from error
    if getattr(task, "name", None) != name:
        raise TaskError(f"{where}: {name}: {spec} is a task named {getattr(task, 'name', None)!r}; give both one name")
    return task


def _find_file() -> Path | None:
    """`conf/base/tasks.yml` of the project that the working directory lies in."""
    here = Path.cwd()
    return next((folder / FILE for folder in (here, *here.parents) if (folder / FILE).is_file()), None)


def _read(file: Path) -> dict[str, Any]:
    found = yaml.safe_load(file.read_text()) or {}
    if not isinstance(found, dict):
        raise TaskError(f"{file}: must hold lines `name: package.module.OBJECT` or `name: path/to/task.py`")
    return found


def _from_project(spec: str, file: Path) -> str:
    """A file's path is relative to the project."""
    path, colon, name = spec.partition(":")
    return f"{file.parents[2] / path}{colon}{name}" if path.endswith(".py") else spec
