"""The node of an estimate: it counts, prints the table, and returns what is stored."""

from __future__ import annotations

from typing import Any

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.study import EstimatePipelineOptions
from geo_sokoban_pipeline.console import print_table


def estimate_run(options: TrainOptions, settings: EstimatePipelineOptions, *, task: str) -> dict[str, Any]:
    """Seconds, memory and price of a run of `train_<task>` with these parameters: predicted, not measured."""
    from geo_sokoban_pipeline.preflight.estimate import describe_run, rows_of

    run = f"train_{task}"
    found = describe_run(run, options, settings)
    title = f"Estimate of {run}, {found['model']} on {found['gpus']} × {found['gpu']}: predicted, not measured"
    print_table(title, ("", "part", "found"), rows_of(found), {})
    return found
