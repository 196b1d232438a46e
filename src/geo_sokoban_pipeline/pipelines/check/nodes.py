"""Nodes of the pre-flight: they hand parameters to the checks, print the table, and stop where one failed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from geo_sokoban_pipeline.config.base import StrictModel
from geo_sokoban_pipeline.console import print_table
from geo_sokoban_pipeline.envs.inspection import Check, guard
from geo_sokoban_pipeline.parameters import ProjectParameters
from geo_sokoban_pipeline.pipelines.hub_rows import first_rows_reader
from geo_sokoban_pipeline.preflight.checks import PreflightError, Subject, as_table, find_cases, rows_of, summarise
from geo_sokoban_pipeline.preflight.stored import read_stored
from geo_sokoban_pipeline.runs.folders import RunStore

logger = logging.getLogger(__name__)

_COLOURS = {"ok": "green", "warning": "yellow", "failure": "bold red", "skipped": "dim"}


def check_run(
    runs: RunStore, run_id: str, fresh: bool, seed: int, data: Mapping[str, Any], *, task: str, **sections: StrictModel
) -> dict[str, Any]:
    """The table of findings about a run of `train_<task>` with these parameters.

    Args:
        data: section `<task>`.
        sections: `tracking`, `train_<task>` and `check_<task>`.
    """
    from geo_sokoban_pipeline.preflight.flight import inspect_run
    from geo_sokoban_pipeline.preflight.resources import describe_timing, has_weights, time_iteration

    def time() -> list[Check]:
        return describe_timing(
            time_iteration(subject, findings.rows, findings.model),
            subject.options,
            validation=findings.validation,
            evaluation=findings.evaluation,
            done=read_stored(subject).iterations,
        )

    parameters = ProjectParameters.model_validate(
        {"run_id": run_id, "fresh": fresh, "seed": seed, task: data, **sections}
    )
    subject = Subject(task, parameters, runs.root)
    findings = inspect_run(subject, first_rows_reader(task))
    has_failed = any(check.state == "failure" for check in findings.checks)
    lacks_weights = not has_weights(subject, findings.model)
    skipped = find_cases(
        "timed",
        (not subject.settings.timed, "iteration", "skipped", f"check_{task}.timed is false", ""),
        (has_failed, "iteration", "skipped", "what failed above would end it", ""),
        (lacks_weights, "iteration", "skipped", "the policy's weights are not here yet; see model, files", ""),
    )
    if not skipped:
        logger.info("timing one iteration at the real sizes")
    table = as_table(subject, [*findings.checks, *(skipped[:1] or guard("timed", "iteration", time))])
    title = f"Pre-flight of {subject.run}, run id {subject.parameters.run_id}"
    print_table(title, ("", "check", "state", "found"), rows_of(table), _COLOURS)
    return table


def judge_table(table: dict[str, Any]) -> None:
    """Log the result.

    Raises:
        PreflightError: a check has failed.
    """
    if table["states"]["failure"]:
        raise PreflightError(summarise(table))
    logger.info("%s", summarise(table))
