"""Provenance: which commands, with which program and libraries, on which machine, have made a result, and how long.

Every command that works on a run adds an entry to the file `commands.json` in the run's output folder, and renews its
seconds while it works. So a run that was interrupted and continued knows its total time, also after `kill -9`.

A node reads the file through the catalog entry `{run}.commands` (a list of entries, the running command's the last);
`summarise_commands` makes of it what a page shows. Without the catalog: `read_commands(folders.outputs)`.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from geo_sokoban_pipeline.masking import mask_word
from geo_sokoban_pipeline.processes import count_cores
from geo_sokoban_pipeline.runs.storage import CorruptFolderError, read_json, write_json

_OWN = "geo-sokoban-pipeline"  # the command of the installed package
_PROGRAM = ("src", "conf")  # what results depend on, of a checkout
_COMPUTING = ("geo-sokoban-pipeline", "kedro", "torch", "transformers", "pyarrow", "numpy")
_PROCESSORS = Path("/proc/cpuinfo")
DATA_ROOT = "GEO_SOKOBAN_DATA_ROOT"  # in the environment: the data root of a command
COMMANDS_FILE = "commands.json"
RENEWAL_SECONDS = 5.0  # between two renewals of an entry: what `kill -9` may lose of the total


@dataclass(frozen=True)
class RunTime:
    """When and by what a run was made.

    Attributes:
        started: start of its first command, with its time zone.
        ended: end of its last command; while that one works, now.
        seconds: wall time of all its commands, without the pauses between them.
        commands: how many there were.
        last: entry of the last one: `command` as typed, `env`, `commit`, `version`, `python`, `torch`, `transformers`,
            `processor`, `machine`, `cores`, `outcome` (`running`, `finished`, `failed`, `interrupted`).
    """

    started: datetime
    ended: datetime
    seconds: float
    commands: int
    last: dict[str, Any]


class CommandRecord:
    """The entry of the command that works on a run now.

    Args:
        outputs: the run's folder under 07_model_output.
        entry: `command` and `env` of the command, and what `describe_maker` says.
    """

    def __init__(self, outputs: Path, entry: dict[str, Any]) -> None:
        self._path = outputs / COMMANDS_FILE
        self._before = read_commands(outputs)
        self._began = self._written = time.monotonic()
        self._entry = {"started": datetime.now().astimezone().isoformat(timespec="seconds"), **entry}
        self._write("running")

    def renew(self) -> None:
        """Note the seconds so far; does nothing within `RENEWAL_SECONDS` of the last time."""
        if time.monotonic() - self._written >= RENEWAL_SECONDS:
            self._write("running")

    def close(self, outcome: str) -> None:
        """Note the final seconds and how the command ended: `finished`, `failed` or `interrupted`."""
        self._write(outcome)

    def _write(self, outcome: str) -> None:
        self._written = time.monotonic()
        self._entry |= {"seconds": round(self._written - self._began, 3), "outcome": outcome}
        write_json(self._path, [*self._before, self._entry])


def read_commands(outputs: Path) -> list[dict[str, Any]]:
    """Entries of the commands that have worked on a run, in their order; `[]` where there are none.

    A file that is damaged counts as none: the time of a run must not stop it.
    """
    path = outputs / COMMANDS_FILE
    try:
        stored = read_json(path) if path.is_file() else []
    except CorruptFolderError:
        return []
    return stored if isinstance(stored, list) else []


def summarise_commands(commands: Sequence[dict[str, Any]]) -> RunTime | None:
    """The entries of a run's commands taken together; None without an entry (nodes that no command has run).

    The last command counts up to now while its entry says `running`: the page of a run is made by the command it tells
    of. (An earlier entry that says `running` is of a command that was killed; it counts for what it had noted.)
    """
    if not commands:
        return None
    last = commands[-1]
    started, seconds = datetime.fromisoformat(last["started"]), float(last["seconds"])
    if last["outcome"] == "running":
        seconds = max(seconds, (datetime.now(UTC) - started).total_seconds())
    return RunTime(
        started=datetime.fromisoformat(commands[0]["started"]),
        ended=datetime.fromtimestamp(started.timestamp() + seconds, started.tzinfo),
        seconds=sum(float(entry["seconds"]) for entry in commands[:-1]) + seconds,
        commands=len(commands),
        last=dict(last),
    )


def typed_command() -> str:
    """The command of this process as a user types it, without the folders of the interpreter. Stars replace possible
    secrets: the variables of servers, and passwords in addresses.
    """
    return shlex.join([*_program(), *map(mask_word, sys.argv[1:])])


def _program() -> list[str]:
    """The program of this process, as words of a shell."""
    path = Path(sys.argv[0] if sys.argv else "")
    # The command of a package has the package's name, with dashes.
    name = path.parent.name.replace("_", "-") if path.name == "__main__.py" else path.name
    # Kedro names itself `python -m kedro`, where it was started as a module: three words of a shell.
    return name.split() if name.startswith("python -m ") else [name]


def suggest_command(pipeline: str | None, run_id: str = "default", *options: str, env: str | None = None) -> str:
    """A command on a run that can be pasted into a shell: with configuration, environment and data root of this one.

    Args:
        pipeline: None: the options name it, in a file of `--config`.
        options: further words.
        env: configuration environment; None: that of this process, if it names one.
    """
    is_own = _program() == [_OWN] and sys.argv[1:2] != ["browse"]  # which runs no pipeline
    words = [_OWN] if is_own else ["kedro", "run"]
    words += [*([f"--pipelines={pipeline}"] if pipeline else []), *options]
    if (source := _given("--conf-source")) and Path(source).resolve() != Path("conf").resolve():
        words.append(f"--conf-source={source}")
    if env := env or _given("--env", "-e") or os.environ.get("KEDRO_ENV"):
        words.append(f"--env={env}")
    if run_id != "default":
        words += ["--params", f"run_id={run_id}"]
    return on_data_root(shlex.join(words))


def on_data_root(command: str) -> str:
    """A command of a shell with the data root that this process was given by its variable, if it was."""
    root = os.environ.get(DATA_ROOT)
    return f"{DATA_ROOT}={shlex.quote(root)} {command}" if root else command


def _given(*names: str) -> str | None:
    """An option of this command, by its words, or else in its file of `--config`."""
    found = [*option_values(sys.argv, *names)]
    for file in () if found else option_values(sys.argv, "--config", "-c"):
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError):  # no file of Kedro
            content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
            found.append(content["run"][names[0].strip("-").replace("-", "_")])
    return found[-1] if found else None


def option_values(words: Sequence[str], *names: str) -> Iterable[str]:
    """Values of an option among the words of a command, in the forms that click takes; its long name comes first."""
    for number, word in enumerate(words):
        if word in names:
            yield from words[number + 1 : number + 2]
        elif word.startswith(f"{names[0]}="):
            yield word.removeprefix(f"{names[0]}=")


def describe_maker(project: Path, *, benchmarks: bool = False) -> dict[str, Any]:
    """Versions and machine of what is run from a project's folder now.

    Args:
        benchmarks: whether a benchmark is run, so that its code counts as part of the program too.

    Returns:
        `version` of this package, `commit` (None outside a git checkout; `…+` where the program, that is `src` and
        `conf`, differs from it),
        `python`, `torch`, `transformers`, `processor` (None where the system does not name it), `machine`, `cores`.
    """
    return {
        "version": version("geo-sokoban-pipeline"),
        "commit": find_commit(project, (*_PROGRAM, "benchmarks") if benchmarks else _PROGRAM),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "processor": find_processor(_PROCESSORS),
        "machine": platform.machine(),
        "cores": count_cores(),
    }


def read_versions(*names: str) -> dict[str, str]:
    """Version of each installed package; without names, of those that compute results."""
    return {name: version(name) for name in names or _COMPUTING}


def find_commit(project: Path, program: Sequence[str] = _PROGRAM) -> str | None:
    """Commit of the checkout whose top is this folder, with a `+` where its program was changed; None without one."""
    top = _ask_git(project, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != project.resolve():
        return None
    commit = _ask_git(project, "rev-parse", "--short=12", "HEAD")
    changed = _ask_git(project, "status", "--porcelain", "--", *program)
    return commit if commit is None or not changed else f"{commit}+"


def find_processor(table: Path) -> str | None:
    """Name of the first processor in a table like `/proc/cpuinfo`; None where there is no table or no name in it."""
    if not table.is_file():
        return None
    found = re.search(
        r"^model name[ \t]*:[ \t]*(\S.*)$", table.read_text(encoding="utf-8", errors="replace"), re.MULTILINE
    )
    return " ".join(found[1].split()) if found else None


def _ask_git(project: Path, *words: str) -> str | None:
    try:
        command = ["git", "-C", str(project), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
