"""Nodes of a study: parameters in, stored results and the files of the docs out; the rules are in the core."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.config.base import ParameterError, StrictModel, validate_parameters
from geo_sokoban_pipeline.config.study import StudyDefinition, StudyOptions
from geo_sokoban_pipeline.parameters import TrackingOptions
from geo_sokoban_pipeline.processes import count_cores
from geo_sokoban_pipeline.runs.lock import RunLock
from geo_sokoban_pipeline.runs.storage import find_json
from geo_sokoban_pipeline.studies.plan import Command, StudyRun, plan_members
from geo_sokoban_pipeline.studies.run import StudyError, StudyFolder, run_members
from geo_sokoban_pipeline.tasks import task_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StudyPlan:
    """A study before it runs: its name, options, definition, runs, folder, and the docs that it fills."""

    name: str
    options: StudyOptions
    definition: StudyDefinition
    members: list[StudyRun]
    folder: StudyFolder
    docs: Path | None


def plan_study(
    command: Command,
    options: StudyOptions,
    tracking: TrackingOptions,
    *,
    studies: Sequence[str],
    **sections: StrictModel | Mapping[str, Any],
) -> StudyPlan:
    """Members of the chosen study; errors that would arise hours later are found here.

    Args:
        options: section `study`.
        tracking: section `tracking`.
        studies: names of those that this pipeline has; `default` means the first one.
        sections: `study_<name>` of each of them; `train_<task>` and, as plain values, `<task>` of every task, because a
            study may be of any.
    """
    from geo_sokoban_pipeline.preflight.first_checks import check_estimators
    from geo_sokoban_pipeline.reporting.study_docs import check_docs

    name = studies[0] if options.name == "default" else options.name
    if name not in studies:
        raise ParameterError(f"study.name={name}: this pipeline has the studies {', '.join(studies)}.")
    definition = sections[f"study_{name}"]
    assert isinstance(definition, StudyDefinition)
    task = task_of(definition.task)
    docs = None if options.docs is None else command.project / options.docs
    if not (command.project / "pyproject.toml").is_file():  # an installed package alone is not enough
        raise StudyError(
            f"A study starts `kedro run` commands of its own, but {command.project} is no project folder: it has "
            "no pyproject.toml. Run it in a checkout of the project."
        )
    used = {task.run: sections[task.run], task.name: sections[task.name], "tracking": tracking}
    # The given values, without defaults: they stand in the files of the study's commands.
    base = {
        path: section.model_dump(mode="json", exclude_unset=True) if isinstance(section, StrictModel) else section
        for path, section in used.items()
    }
    share = max(1, count_cores() // (options.workers or count_cores()))
    members = plan_members(name, definition, base, command.data_root, share)
    for root in dict.fromkeys(member.root for member in members):
        command.check_root(root)
    if docs is not None:
        check_docs(docs, name)
    if strange := set(options.recipes or ()) - definition.recipes.keys():
        known = ", ".join(definition.recipes) or "there is none"
        raise ParameterError(f"study.recipes: {min(strange)!r} is no recipe of study_{name} ({known}).")
    if definition.recipes and name not in task.comparisons:
        known = ", ".join(task.comparisons) or "none of this task"
        raise ParameterError(f"study_{name}.recipes: studies that compare recipes are {known}.")
    for member in members:
        if member.seed == definition.seeds[0] and member.part in (options.recipes or definition.recipes):
            run = validate_parameters(member.params[task.run], task.train_config)
            check_estimators(f"study_{name}.recipes.{member.part}", run)
    return StudyPlan(name, options, definition, members, StudyFolder.of(command.data_root, name), docs)


def run_study(command: Command, plan: StudyPlan, fresh: bool) -> StudyPlan:
    """The plan, once all members of the chosen recipes are finished."""
    if fresh and plan.options.recipes is not None:
        raise ParameterError(
            "fresh=true with study.recipes: it replaces the warm starts of all recipes. Leave one of both out."
        )
    recipes = {"", *(plan.definition.recipes if plan.options.recipes is None else plan.options.recipes)}
    chosen = [member for member in plan.members if member.kind != "train" or member.part in recipes]
    # Records and logs go by the study's name: the same study under another run id would share them.
    with closing(RunLock(plan.folder.path, way_out=".")):
        run_members(chosen, command, plan.folder, plan.options.workers, fresh=fresh, name=plan.name)
    return plan


def collect_study(plan: StudyPlan) -> dict[str, dict[str, Any]]:
    """Results by the name of the study; compared recipes join those that stand in its docs."""
    from geo_sokoban_pipeline.studies.results import collect_results, join_recipes

    finished = [member for member in plan.members if plan.folder.is_finished(member)]
    results = collect_results(plan.name, plan.definition, finished, plan.folder)
    if plan.docs is not None and "recipes" in results:
        stored = find_json(plan.docs / "results" / f"{plan.name}.json")
        code = {member.part: member.parameters.get("code", {}) for member in plan.members}
        results = join_recipes(results, stored or results, code)
    return {plan.name: results}


def write_docs(plan: StudyPlan, results: dict[str, Callable[[], dict[str, Any]]]) -> dict[str, str]:
    """Texts of the docs by file: results, figure and pages; `{}` where `study.docs` is null."""
    if plan.docs is None:
        logger.info("study.docs is null: results are in %s", plan.folder.path / "results.json")
        return {}
    from geo_sokoban_pipeline.reporting.study_docs import render_docs

    texts = render_docs(plan.docs, results[plan.name]())
    logger.info("writing %s in %s", ", ".join(texts), plan.docs.parent)
    return texts
