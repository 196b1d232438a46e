"""Nodes of the pre-flight: they hand parameters to the checks, print the table, and stop where one failed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from geo_sokoban_pipeline.config.base import validate_parameters
from geo_sokoban_pipeline.config.project import ProjectParameters
from geo_sokoban_pipeline.console import print_table, refuse
from geo_sokoban_pipeline.pipelines.tables import HubSource, HubSplit, SourceUnavailableError, hub_rows, hub_splits
from geo_sokoban_pipeline.tasks import World, task_of

if TYPE_CHECKING:
    from geo_sokoban_pipeline.config.geo3k import GeometryHubOptions
    from geo_sokoban_pipeline.config.sokoban import HubOptions
    from geo_sokoban_pipeline.envs.geo3k.sources import HubReader
    from geo_sokoban_pipeline.preflight.checks import Check, Subject
    from geo_sokoban_pipeline.preflight.flight import Findings
    from geo_sokoban_pipeline.runs.folders import RunStore

logger = logging.getLogger(__name__)

_COLOURS = {"ok": "green", "warning": "yellow", "failure": "bold red", "skipped": "dim"}


def check_run(runs: RunStore, parameters: dict[str, Any], task: str) -> dict[str, Any]:
    """The table of findings about the run that `train_<task>` would be."""
    from geo_sokoban_pipeline.preflight.checks import Check, Subject, as_table, guard, rows_of
    from geo_sokoban_pipeline.preflight.flight import inspect_run
    from geo_sokoban_pipeline.preflight.resources import has_weights

    subject = Subject(task, validate_parameters(parameters, ProjectParameters), runs.root)
    findings = inspect_run(subject, _READERS[task_of(task).world](task))
    checks = findings.checks
    if not subject.settings.timed:
        checks.append(Check("timed", "iteration", "skipped", f"check_{task}.timed is false"))
    elif any(check.state == "failure" for check in checks):
        checks.append(Check("timed", "iteration", "skipped", "what failed above would end it"))
    elif not has_weights(subject, findings.model):
        checks.append(Check("timed", "iteration", "skipped", "the policy's weights are not here yet; see model, files"))
    else:
        logger.info("timing one iteration at the real sizes")
        checks += guard("timed", "iteration", lambda: _time(subject, findings))
    table = as_table(subject, checks)
    title = f"Pre-flight of {subject.run}, run id {subject.parameters.run_id}"
    print_table(title, ("", "check", "state", "found"), rows_of(table), _COLOURS)
    return table


def judge_table(table: dict[str, Any]) -> None:
    """Say how it went; a failure ends the command with exit code 1."""
    from geo_sokoban_pipeline.preflight.checks import PreflightError, judge, summarise

    try:
        judge(table)
    except PreflightError as error:
        refuse(error)
    logger.info("%s", summarise(table))


def _time(subject: Subject, findings: Findings) -> list[Check]:
    from geo_sokoban_pipeline.preflight.resources import describe_timing, time_iteration
    from geo_sokoban_pipeline.preflight.stored import read_stored

    return describe_timing(
        time_iteration(subject, findings.rows, findings.model),
        subject.options,
        validation=findings.validation,
        evaluation=findings.evaluation,
        done=read_stored(subject).iterations,
    )


def _first_rows(hub: HubSource, task: str) -> Iterable[dict[str, Any]]:
    """Rows of a data set without fetching it as a whole; from the cache where the hub cannot be reached."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return hub_rows(hub, section=task)
    try:
        return hub_rows(hub, section=task, streaming=True)
    except SourceUnavailableError:
        return hub_rows(hub, section=task)


def _level_reader(task: str) -> Callable[[HubOptions], Iterable[dict[str, Any]]]:
    return lambda hub: _first_rows(hub, task)


def _problem_reader(task: str) -> HubReader:
    from geo_sokoban_pipeline.envs.geo3k.sources import HubReader

    def names(hub: GeometryHubOptions) -> Sequence[str]:
        return hub_splits(hub.dataset, hub.revision, section=task)

    def rows(hub: GeometryHubOptions, split: str) -> Iterable[dict[str, Any]]:
        return _first_rows(HubSplit(hub.dataset, hub.revision, split), task)

    return HubReader(names, rows)


_READERS: dict[World, Callable[[str], Any]] = {"sokoban": _level_reader, "geometry": _problem_reader}
