"""First and last lines of a command about its runs: where training continues, the result, what is stored."""

from __future__ import annotations

import logging
import os
import shlex
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kedro.framework.hooks import hook_impl
from kedro.framework.project import pipelines
from kedro.pipeline import Pipeline

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.formats import find_row, find_stale, in_percent
from geo_sokoban_pipeline.hooks.parameters import ContextHooks
from geo_sokoban_pipeline.hooks.runs import run_names
from geo_sokoban_pipeline.hooks.tracked import store_uri
from geo_sokoban_pipeline.preflight.stored import stored_iterations
from geo_sokoban_pipeline.runs.folders import RunFolders
from geo_sokoban_pipeline.runs.provenance import on_data_root, suggest_command
from geo_sokoban_pipeline.runs.storage import MANIFEST, CorruptFolderError, find_json

log = logging.getLogger(__name__)
_TRAIN = "train_"
_CHECK = "check_"
_NOTEBOOK = "notebooks/01_explore_trajectories.ipynb"
_MLFLOW = "MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false mlflow ui --workers 1"
_LOOP = "train_grpo"  # the node's name without its namespace


@dataclass(frozen=True)
class _Run:
    """A run of the command."""

    name: str
    folders: RunFolders
    options: TrainOptions | None  # of a training run whose loop is among the command's nodes


class TerminalHooks(ContextHooks):
    """First and last lines of a command about its runs."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []

    @hook_impl
    def before_pipeline_run(self, pipeline: Pipeline) -> None:
        """Log where each run continues; `RunHooks` is called before and refuses runs that cannot."""
        self._began, nodes = time.time(), {node.name for node in pipeline.nodes}
        self._runs = []
        for name in run_names(pipeline, pipelines):
            options = getattr(self._parameters, name) if f"{name}.{_LOOP}" in nodes else None
            self._runs.append(_Run(name, self._folders_of(name), options))
        for run in self._runs:
            if run.options is not None:
                _announce(run, run.options)

    @hook_impl(trylast=True)
    def after_pipeline_run(self) -> None:
        """Log the result of each run, where its report is, and which commands come next."""
        for run in self._runs:
            lines = [] if run.name.startswith(_CHECK) else _results(run.folders, stored_iterations(run.folders.models))
            if (report := run.folders.report).is_file():
                is_new = report.stat().st_mtime >= self._began
                lines.append(f"report{'' if is_new else ' of an earlier command'}: {report}")
            if run.name == "compare" and self._parameters.run_id == "default":
                lines.append("the next comparison writes over it, unless it has a run_id of its own")
            if run.name.startswith(_TRAIN) and report.is_file():
                lines += self._ways_on(run)
            for line in lines:
                log.info("%s", line if len(self._runs) == 1 else f"{run.folders.name}: {line}")
        self._runs = []

    @hook_impl
    def on_pipeline_error(self) -> None:
        """Forget the runs: the error is the last word."""
        self._runs = []

    def tell_interrupted(self) -> list[str]:
        """A line for each run of an interrupted command: what is stored, and how to continue."""
        lines = []
        for run in self._runs:
            if run.options is None:
                lines.append(f"{run.folders.name}: stopped. The same command does it again.")
                continue
            stored, wanted = stored_iterations(run.folders.models), run.options.loop.iterations
            again = f"the same command{' without fresh=true' if self._parameters.fresh else ''}"
            if run.folders.can_restore:
                text = "the next command puts the run back that this one was to replace; fresh=true starts over."
            elif stored:
                text = f"{min(stored, wanted)} of {wanted} iterations are stored; {again} goes on from there."
            elif (run.folders.models / "policy" / MANIFEST).is_file():
                text = f"the warm start is stored; {again} goes on from there."
            else:
                text = "nothing of the training is stored yet; the same command starts again."
            lines.append(f"{run.folders.name}: stopped. {text[0].upper()}{text[1:]}")
        return lines

    def _ways_on(self, run: _Run) -> list[str]:
        task, env = run.name.removeprefix(_TRAIN), self._env if self._env != "local" else None
        meanings = {
            "evaluate": "evaluates any checkpoint",
            "control": "the same time spent on more of the warm start",
            "browse": "a site with every episode",
        }
        ways = [
            (suggest_command(f"{kind}_{task}", self._parameters.run_id, env=env), text)
            for kind, text in meanings.items()
        ]
        if (self._project / _NOTEBOOK).is_file():
            chosen = {
                "GEO_SOKOBAN_ENV": env,
                "GEO_SOKOBAN_RUN": run.name,
                "GEO_SOKOBAN_RUN_ID": self._parameters.run_id,
            }
            words = [f"{name}={shlex.quote(value)}" for name, value in chosen.items() if value is not None]
            place = shlex.quote(os.path.relpath(self._project / _NOTEBOOK))
            ways.append((on_data_root(" ".join([*words, "jupyter lab", place])), "the same in Python"))
        if self._parameters.tracking.enabled:
            uri = store_uri(self._parameters.tracking, self._data_root)
            server = f"{_MLFLOW} --backend-store-uri {shlex.quote(uri)}"
            ways.append((uri if uri.startswith("http") else server, "metrics over runs"))
        # The explanation is a shell comment, so that the line can be pasted.
        return ["go on:", *(f"  {way}  # {text}" for way, text in ways)]


def _announce(run: _Run, options: TrainOptions) -> None:
    """Log after which iteration the loop continues."""
    stored, wanted = stored_iterations(run.folders.models), options.loop.iterations
    if stored > wanted:
        log.warning(
            "%s: %d iterations are stored, loop.iterations=%d asks for fewer. Nothing is trained and nothing is "
            "deleted; the evaluation takes the newest checkpoint of all. To see the policy after %d iterations, "
            "evaluate its checkpoint (%d), or train a run_id of its own.",
            run.folders.name, stored, wanted, wanted, wanted - 1,
        )  # fmt: skip
    elif stored == wanted:
        log.info("%s: all %d iterations are stored, nothing to train; it is evaluated again", run.folders.name, stored)
    elif stored:
        log.info("%s: continues after %d of %d iterations", run.folders.name, stored, wanted)
    elif (run.folders.models / "policy" / MANIFEST).is_file():
        log.info("%s: continues after the warm start", run.folders.name)


def _results(folders: RunFolders, stored: int) -> list[str]:
    """The headline of a run's evaluation; `[]` where there is none.

    Args:
        stored: iterations that its checkpoints hold.
    """
    with suppress(CorruptFolderError):
        if text := write_result(find_json(folders.evaluation) or {}, stored):
            return [f"held-out: {text}"]
    return []


def write_result(summary: Mapping[str, Any], stored: int = 0) -> str:
    """`40.9 % → 72.3 % sampled (95 % 68.8–75.7), 73.3 % greedy` of an evaluation summary; empty without an evaluation.

    The first number is that of the policy before GRPO, where the summary has it; else the policy is named.

    Args:
        stored: iterations of the run; 0: not known. An evaluation of an earlier checkpoint is called one.
    """
    names = [str(name) for name in summary.get("policies") or []]
    if not names or (last := find_row(summary, names[-1], "sampled")) is None:
        return ""
    first = find_row(summary, names[0], "sampled") if len(names) > 1 else None
    text = f"{in_percent(first['solve_rate'])} % → " if first else ""
    text += f"{in_percent(last['solve_rate'])} % sampled"
    if last.get("low") is not None and last.get("high") is not None:
        text += f" (95 % {in_percent(last['low'])}–{in_percent(last['high'])})"
    if greedy := find_row(summary, names[-1], "greedy"):
        text += f", {in_percent(greedy['solve_rate'])} % greedy"
    if len(names) == 1:  # of any run or folder
        text += f", by {names[0]}"
    stale = find_stale(summary, stored)
    return f"{text}, of {stale}" if stale else text
