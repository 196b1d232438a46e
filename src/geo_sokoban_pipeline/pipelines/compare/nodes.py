"""The node of `compare`: the names of runs in, a page out."""

from __future__ import annotations

from functools import partial
from typing import Any

from geo_sokoban_pipeline.config.base import split_runs
from geo_sokoban_pipeline.config.grpo import SourceOptions
from geo_sokoban_pipeline.runs.folders import RunStore, committed_iteration
from geo_sokoban_pipeline.runs.provenance import read_commands, summarise_commands
from geo_sokoban_pipeline.tasks import DEFAULT


def compare_runs(runs: RunStore, names: Any) -> str:
    """The HTML page that compares stored training runs.

    Args:
        names: `params:runs`.

    Raises:
        SourceError: fewer than two are named, or one is not stored; the message lists those that are.
    """
    from geo_sokoban_pipeline.reporting.comparison import ComparedRun, build_comparison
    from geo_sokoban_pipeline.trajectories.parquet import read_trajectories

    found = []
    for run, run_id in runs.find_runs(split_runs(names), f"train_{DEFAULT}"):
        source = SourceOptions(run=run, run_id=run_id)
        folders = runs.folders(source)
        newest = committed_iteration(folders.models)
        files = runs.held_out_files(source)
        found.append(
            ComparedRun(
                run=run,
                run_id=run_id,
                metrics=[row for row in runs.metrics(source) if newest is None or row["iteration"] <= newest],
                summary=runs.evaluation(source),
                settings=runs.settings(source),
                time=summarise_commands(read_commands(folders.outputs)),
                held_out={name: partial(read_trajectories, path) for name, path in files.items()},
            )
        )
    return build_comparison(found)
