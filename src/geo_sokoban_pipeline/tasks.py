"""The registry of tasks: the one place where a name becomes a `Task`.

Three tasks come with the package. Further ones are named in `conf/base/tasks.yml` of the project, as
`name: package.module.OBJECT` or `name: path/to/task.py` (whose object is called `TASK`), or by another package under
the entry point group `geo_sokoban_pipeline.tasks`. Every command reads the registry, so a task's module must be
light to import. Importing this package never fails because of an entry: commands refuse a wrong one in one line
(`check_registry`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from kedro.utils import is_kedro_project

from geo_sokoban_pipeline.envs.base import Task, Words
from geo_sokoban_pipeline.envs.plugins import PluginError, load_object
from geo_sokoban_pipeline.runs.own_code import explain

GROUP = "geo_sokoban_pipeline.tasks"
_CONF = "conf"  # Kedro's default of --conf-source
_FILE = Path("base/tasks.yml")
_NAME = re.compile(r"[a-z][a-z0-9_]*")
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
        return _load()[0][name]

    def __iter__(self) -> Iterator[str]:
        return iter(_load()[0])

    def __len__(self) -> int:
        return len(_load()[0])


TASKS: Mapping[str, Task] = _Tasks()


def task_of(name: str) -> Task:
    """The task of a name.

    Raises:
        ValueError: there is none; the message names those there are.
        TaskError: a registered task cannot be used, which may be this one.
    """
    if name not in TASKS:
        check_registry()
        raise ValueError(f"task={name!r}: must be one of {', '.join(TASKS)}")
    return TASKS[name]


def task_or_plain(name: Any) -> Task:
    """The task of a name; for others, as of runs whose task is no longer registered, one without words of its own."""
    return TASKS.get(str(name), _PLAIN)


class _PlainTask(Task):
    """Words for the runs of a task that is no longer registered."""

    name = title = "task"
    words = Words("prompt", "prompts", "success rate", "solved", "not solved")


_PLAIN: Task = _PlainTask()  # type: ignore[abstract]


def difficulty_text(task: str, row: Mapping[str, Any]) -> str | None:
    """Difficulty of a prompts row as the trajectories keep it; None where it, or the task, is not known.

    A text serves every task: it may be a name, or a number that a column of its own holds as such.
    """
    value = TASKS[task].difficulty_of(row) if task in TASKS else None
    return None if value is None else str(value)


def check_registry() -> None:
    """See that every registered task can be used.

    Raises:
        TaskError: one cannot.
    """
    _, error = _load()
    if error is not None:
        raise error


def registered_here() -> dict[str, str]:
    """Entries of the project's `tasks.yml`, by task; paths of files are absolute.

    Raises:
        TaskError: the file cannot be read.
    """
    file = _find_file()
    return _read(file) if file.is_file() else {}


@cache
def _load() -> tuple[dict[str, Task], TaskError | None]:
    """The tasks that come before the first registration that cannot be used, and what is wrong with that.

    Read once per process: the registry does not change during a command.
    """
    tasks: dict[str, Task] = {}
    places: dict[str, str] = {}
    try:
        for name, spec, where in _registrations():
            if name in tasks:
                raise TaskError(
                    f"{where}: {name}: there is a task of that name already, from {places[name]}. Rename it."
                )
            tasks[name], places[name] = _load_one(name, spec, where), where
    except TaskError as error:
        return tasks, error
    return tasks, None


def _registrations() -> Iterator[tuple[str, str, str]]:
    """(name, what to load, where it is registered) of every task."""
    for name, spec in _OWN.items():
        yield name, spec, "the package"
    for point in entry_points(group=GROUP):
        yield point.name, point.value.replace(":", "."), f"entry point {GROUP}"
    for name, spec in registered_here().items():
        yield name, spec, str(_find_file())


def _load_one(name: str, spec: str, where: str) -> Task:
    try:
        task: Task = load_object(spec, default_name="TASK")
        if missing := [field for field in Task.__annotations__ if not (hasattr(Task, field) or hasattr(task, field))]:
            raise PluginError(f"{spec} is no task: it lacks {', '.join(missing)}. Derive its class from envs.base.Task")
        if task.name != name:
            raise PluginError(f"{spec} is a task named {task.name!r}; give both one name")
        _ = task.train_config  # its defaults must fit the options
    except PluginError as error:
        raise TaskError(f"{where}: {name}: {error}. Correct this entry, or remove it.") from error
    except Exception as error:  # of any kind: the module is the user's code
        raise TaskError(f"{where}: {name}: {explain(error)}. Mend the task, or remove this entry.") from error
    return task


def _find_file() -> Path:
    """`tasks.yml` of the configuration that the command uses; it need not be there.

    The configuration is that of `--conf-source`, else that of the project as Kedro finds it: from the working directory
    upwards. A session that was started elsewhere, as in a notebook, has the project whose `src` holds this package.
    """
    # Kedro hands --conf-source to the session alone, which is made after the import of the settings: these import the
    # models of the parameters, which have a section for each task.
    words = sys.argv[1:]
    given = [word.partition("=")[2] for word in words if word.startswith("--conf-source=")]
    given += [value for word, value in pairwise(words) if word == "--conf-source"]
    return Path(*given[-1:]).resolve() / _FILE if given else _project() / _CONF / _FILE


def _project() -> Path:
    here = Path.cwd()
    above = (
        folder for folder in (here, *here.parents) if is_kedro_project(folder) or (folder / _CONF / _FILE).is_file()
    )
    return next(above, Path(__file__).resolve().parents[2])


def _read(file: Path) -> dict[str, str]:
    form = "it must hold lines `name: package.module.OBJECT` or `name: path/to/task.py`"
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise TaskError(f"{file}: it is not readable YAML ({' '.join(str(error).split())}); {form}.") from error
    if not isinstance(found, dict):
        raise TaskError(f"{file}: {form}, not {found!r}.")
    for name, spec in found.items():
        if not isinstance(spec, str) or not _NAME.fullmatch(str(name)):
            raise TaskError(f"{file}: {name}: {spec}: {form}; a name has lower-case letters, digits and underscores.")
    return {name: _from_project(spec, file) for name, spec in found.items()}


def _from_project(spec: str, file: Path) -> str:
    """A file's path is relative to the project, or to the folder that the configuration lies in."""
    path, colon, name = (spec, "", "") if spec.endswith(".py") else spec.rpartition(":")
    if not path.endswith(".py"):
        return spec
    folders = (_project(), file.parents[2])
    found = next((folder / path for folder in folders if (folder / path).is_file()), folders[0] / path)
    return f"{found}{colon}{name}"
