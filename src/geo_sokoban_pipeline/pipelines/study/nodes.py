"""Nodes of a study: parameters in, stored results and the files of the docs out; the rules are in the core."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geo_sokoban_pipeline.console import refuse
from geo_sokoban_pipeline.options.base import ParameterError, validate_parameters
from geo_sokoban_pipeline.options.study import StudyDefinition, StudyOptions

if TYPE_CHECKING:
    from geo_sokoban_pipeline.studies.command import Command
    from geo_sokoban_pipeline.studies.planning import Member
    from geo_sokoban_pipeline.studies.records import StudyFolder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StudyPlan:
    """A study that is about to run: its options, its definition, its members, its folder, the docs it writes to."""

    options: StudyOptions
    definition: StudyDefinition
    members: list[Member]
    folder: StudyFolder
    docs: Path | None


def plan_study(
    command: Command,
    study: dict[str, Any],
    default: dict[str, Any],
    from_zero: dict[str, Any],
    long: dict[str, Any],
    train: dict[str, Any],
    data: dict[str, Any],
    tracking: dict[str, Any],
) -> StudyPlan:
    """Members of the chosen study; whatever would fail hours later is refused here."""
    from geo_sokoban_pipeline.reporting.markers import MarkerError
    from geo_sokoban_pipeline.reporting.study_docs import check_docs
    from geo_sokoban_pipeline.studies.planning import plan_members
    from geo_sokoban_pipeline.studies.processes import count_cores
    from geo_sokoban_pipeline.studies.records import StudyFolder

    options = validate_parameters(study, StudyOptions, prefix="study")
    given = {"default": default, "from_zero": from_zero, "long": long}[options.name]
    definition = validate_parameters(given, StudyDefinition, prefix=f"study_{options.name}")
    docs = None if options.docs is None else command.project / options.docs
    try:
        _check_project(command.project)
        base = {"train_sokoban": train, "sokoban": data, "tracking": tracking}
        share = max(1, count_cores() // (options.workers or count_cores()))
        members = plan_members(options.name, definition, base, command.data_root, share)
        for root in dict.fromkeys(member.root for member in members):
            command.check_root(root)
        if docs is not None:
            check_docs(docs, options.name)
    except (ParameterError, MarkerError, FileNotFoundError) as error:
        refuse(error)
    return StudyPlan(options, definition, members, StudyFolder.of(command.data_root, options.name), docs)


def _check_project(project: Path) -> None:
    """See that the commands of the members find what `kedro run` needs; an installed package alone has it not."""
    if not (project / "pyproject.toml").is_file():
        raise FileNotFoundError(
            f"study_sokoban starts `kedro run` commands of its own, but {project} is no project folder: it has no "
            "pyproject.toml. Run it in a checkout of the project."
        )


def run_study(command: Command, plan: StudyPlan, fresh: bool) -> StudyPlan:
    """The plan, once all its members are finished."""
    from geo_sokoban_pipeline.studies.processes import MemberError, run_members

    try:
        run_members(plan.members, command, plan.folder, plan.options.workers, fresh=fresh, name=plan.options.name)
    except MemberError as error:
        refuse(error)
    return plan


def collect_study(plan: StudyPlan) -> dict[str, dict[str, Any]]:
    """Results by the name of the study."""
    from geo_sokoban_pipeline.studies.results import collect_results

    name = plan.options.name
    return {name: collect_results(name, plan.definition, plan.members, plan.folder)}


def write_docs(plan: StudyPlan, results: dict[str, Callable[[], dict[str, Any]]]) -> None:
    """Write results, tables and figures into the docs, where the parameters name a folder for them."""
    if plan.docs is None:
        logger.info("study.docs is null: results are in %s", plan.folder.path / "results.json")
        return
    from geo_sokoban_pipeline.reporting.study_docs import write_study

    for path in write_study(plan.docs, results[plan.options.name]()):
        logger.info("wrote %s", path)
