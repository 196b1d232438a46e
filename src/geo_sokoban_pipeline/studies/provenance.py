"""Provenance: which program, with which libraries, on which machine has made a result."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

_PROGRAM = ("src", "conf")  # what results depend on, of a checkout
_PROCESSORS = Path("/proc/cpuinfo")


def describe_maker(project: Path) -> dict[str, Any]:
    """Versions and machine of what is run from a project's folder now.

    Returns:
        `version` of this package, `commit` (None outside a git checkout; `…+` where `src` or `conf` differ from it),
        `python`, `torch`, `transformers`, `processor` (None where the system does not name it), `machine`, `cores`.
    """
    return {
        "version": version("geo-sokoban-pipeline"),
        "commit": find_commit(project),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "processor": find_processor(_PROCESSORS),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
    }


def find_commit(project: Path) -> str | None:
    """Commit of the checkout whose top is this folder, with a `+` where its program was changed; None without one."""
    top = _ask_git(project, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != project.resolve():
        return None
    commit = _ask_git(project, "rev-parse", "--short=12", "HEAD")
    changed = _ask_git(project, "status", "--porcelain", "--", *_PROGRAM)
    return commit if commit is None or not changed else f"{commit}+"


def find_processor(table: Path) -> str | None:
    """Name of the first processor in a table like `/proc/cpuinfo`; None where there is no table or no name in it."""
    if not table.is_file():
        return None
    for line in table.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return " ".join(value.split())
    return None


def _ask_git(project: Path, *words: str) -> str | None:
    try:
        command = ["git", "-C", str(project), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
