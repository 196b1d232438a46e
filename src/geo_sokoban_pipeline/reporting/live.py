"""The report of a run from its files alone: of what its checkpoints commit, so also of a run that goes on.

A command that trains writes the page itself, as far as `loop.report_share` allows (`hooks/live_report.py`); the
pipeline `report_<task>` writes it at any time, from another process.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.config.grpo import SourceOptions
from geo_sokoban_pipeline.reporting.episodes import read_token_texts
from geo_sokoban_pipeline.reporting.report import ReportInputs
from geo_sokoban_pipeline.reporting.training_episodes import Parts
from geo_sokoban_pipeline.runs.fingerprint import unflatten
from geo_sokoban_pipeline.runs.folders import RunFolders, RunStore, browsed_runs, committed_iteration
from geo_sokoban_pipeline.runs.provenance import read_commands, read_versions, summarise_commands
from geo_sokoban_pipeline.runs.storage import find_json, iteration_of, read_manifest
from geo_sokoban_pipeline.tasks import task_or_plain
from geo_sokoban_pipeline.trajectories.index import keep_committed, read_index, trajectory_files
from geo_sokoban_pipeline.trajectories.parquet import read_trajectories


def read_report_inputs(
    root: Path,
    source: SourceOptions,
    total: int | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> ReportInputs:
    """The contents of a training run's report, read from its files.

    The evaluation and the audits of a run that goes on are left out: they are those of an earlier end.

    Args:
        root: data root.
        source: names the run.
        total: iterations of the whole training; None: not known.
        parameters: nested, by section; None: those of the fingerprint of its newest checkpoint.
    """
    store, task = RunStore(root), source.run.removeprefix("train_")
    folders, browsed, audited = (
        RunFolders.of(root, run, source.run_id) for run in (source.run, f"browse_{task}", f"audit_{task}")
    )
    newest, ended = committed_iteration(folders.models), store.is_complete(source)
    ended = ended and (total is None or newest is None or newest + 1 >= total)
    outputs = folders.outputs
    manifest = read_manifest(folders.models / "policy", verify=False) or {}
    return ReportInputs(
        task=task,
        run=source.run,
        run_id=source.run_id,
        metrics=[row for row in store.metrics(source) if newest is None or row["iteration"] <= newest],
        summary=store.evaluation(source) if ended else {},
        warm_start=manifest.get("history", []),
        held_out=_parts(outputs / "held_out_trajectories", None) if ended else {},
        trained=_parts(outputs / "trajectories", newest),
        validations=_parts(outputs / "eval_trajectories", None if newest is None else newest + (newest >= 0)),
        data_report=store.data_report(source),
        parameters=dict(parameters) if parameters is not None else {source.run: unflatten(store.settings(source))},
        versions=read_versions(),
        token_texts=read_token_texts(folders.models / "policy") if manifest else None,
        time=summarise_commands(read_commands(outputs)),
        index=keep_committed(read_index(outputs, task_or_plain), newest),
        audit=find_json(folders.reports / "audit.json") if ended else None,
        whole_audit=find_json(audited.reports / "audit.json") if ended else None,
        site=f"../../{browsed.name}/site" if folders.name in browsed_runs(browsed.reports / "site") else None,
        progress=None if ended else ((-1 if newest is None else newest) + 1, total),
    )


def _parts(folder: Path, newest: int | None) -> Parts:
    """Trajectory files of a folder up to an iteration, as functions that read them."""
    names = {f"{path.parent.name}/{path.stem}": path for path in trajectory_files(folder)}
    return {
        name: partial(read_trajectories, path)
        for name, path in names.items()
        if newest is None or (iteration_of(name) or 0) <= newest
    }
