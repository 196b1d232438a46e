"""The modules that a newcomer reads, for `docs/architecture.md`: those whose functions a traced command executes.

A command is the default run of Sokoban (`conf/base`, two processes) with less work of every kind. Options, hooks and
what runs at import are left out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from itertools import chain, groupby
from pathlib import Path, PurePosixPath

from geo_sokoban_pipeline.reporting.study_docs import read_section, replace_section

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
_SOURCE = ROOT / "src" / "geo_sokoban_pipeline"
_SMALL = {
    "tracking.enabled": "false",
    "sokoban.counts.train": 16,
    "sokoban.counts.validation": 8,
    "sokoban.counts.eval": 8,
    "train_sokoban.warm_start.steps": 0,
    "train_sokoban.rollout.max_turns": 3,
    "train_sokoban.grpo.filter": "none",  # so that a policy that solves nothing is trained
    "train_sokoban.grpo.groups": 2,
    "train_sokoban.grpo.group_size": 4,
    "train_sokoban.grpo.groups_per_step": 1,
    "train_sokoban.loop.eval_prompts": 4,
}
_LEFT_OUT = ("config/", "hooks/")
# Of an iteration; the rest of it are tools.
_STEP = ("pipelines/", "training/", "distributed/", "rollout/", "grpo/", "policies/", "evaluation/", "datasets/")
_TASK = ("envs/", "rewards/")
Functions = set[tuple[str, str]]  # path of a module, name


def trace_lists() -> dict[str, set[str]]:
    """Modules of each list on the page."""
    with tempfile.TemporaryDirectory() as folder:
        default = trace(Path(folder) / "default", 1)
        resumed = trace(Path(folder) / "default", 2)
        ray = trace(Path(folder) / "ray", 1, placement="ray")
    return {
        "iteration": modules(default[2]),
        "ray": modules(set().union(*ray[1:])) - modules(set().union(*default[1:])),
        "resume": modules((resumed[0] | resumed[1]) - (default[0] | default[1])),
    }


def trace(data_root: Path, iterations: int, **options: str) -> list[Functions]:
    """Functions that a training to so many iterations executes, in all its processes.

    Args:
        data_root: a run that it holds is continued.
        options: of `train_sokoban`.

    Returns:
        Those before the loop, those of its start, those of its iterations, those after them.

    Raises:
        CalledProcessError: the command failed; its output is shown.
    """
    given = {"loop.iterations": iterations, **options}
    values = {**_SMALL, **{f"train_sokoban.{name}": value for name, value in given.items()}}
    words = ["--pipelines=train_sokoban", "--to-nodes=train_sokoban.train_grpo"]
    words.append("--params=" + ",".join(f"{name}={value}" for name, value in values.items()))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "phase").write_bytes(b"\0")
        environment = {
            **os.environ,
            "READING_LIST": folder,
            "GEO_SOKOBAN_DATA_ROOT": str(data_root),
            "KEDRO_DISABLE_TELEMETRY": "1",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(_SOURCE.parent)]),
        }
        subprocess.run([sys.executable, "-m", "kedro", "run", *words], cwd=ROOT, env=environment, check=True)
        calls = (Path(folder) / "calls").read_text(encoding="utf-8").splitlines()
    found: list[Functions] = [set(), set(), set(), set()]
    for call in calls:
        phase, path, name = call.split(" ", maxsplit=2)
        found[int(phase)].add((path, name))
    return found


def modules(functions: Functions) -> set[str]:
    """Paths of the modules that have functions, without options and hooks."""
    return {path for path, _ in functions if not path.startswith(_LEFT_OUT)}


def write_page(page: str, lists: Mapping[str, set[str]]) -> str:
    """The page with these lists between their marks."""
    for name, paths in lists.items():
        page = replace_section(page, name, "\n".join(_lines(name, paths)), PAGE)
    return page


def read_page(page: str, name: str) -> set[str]:
    """Modules of a list of the page."""
    rows = re.findall(r"^\| `(.*)/` \| (.*) \|$", read_section(page, name, PAGE), flags=re.MULTILINE)
    return {
        (PurePosixPath(folder) / f"{module}.py").as_posix()
        for folder, listed in rows
        for module in re.findall(r"`(\w+)`", listed)
    }


def _lines(name: str, paths: set[str]) -> Iterator[str]:
    """A table of the modules by folder; those of the step come first."""
    kinds = (
        {"of the step": _STEP, "of the task": _TASK, "of tools": ("",)} if name == "iteration" else {"in all": ("",)}
    )
    left, rows, counts = set(paths), list[str](), list[str]()
    for kind, folders in kinds.items():
        chosen = {path for path in left if path.startswith(folders)}
        left -= chosen
        counts.append(f"{len(chosen)} {kind}")
        for folder, members in groupby(sorted(chosen, key=os.path.split), key=os.path.dirname):
            rows.append(f"| `{folder or '.'}/` | {', '.join(f'`{Path(path).stem}`' for path in members)} |")
    return chain([f"| folder | modules ({', '.join(counts)}) |", "|---|---|"], rows)
