"""What costs next to nothing is looked at before any work of a command: failures end it, warnings are logged once.

These are the checks of the pre-flight that need no weights, no network and no process of their own; together they take
a third of a second. Which of them are asked depends on the kind of command: an evaluation has no groups.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.launch import NUM_GPUS
from geo_sokoban_pipeline.options.base import ParameterError
from geo_sokoban_pipeline.options.project import ProjectParameters
from geo_sokoban_pipeline.options.sokoban import SokobanDataOptions
from geo_sokoban_pipeline.options.training import TrainOptions
from geo_sokoban_pipeline.preflight.checks import Check, guard
from geo_sokoban_pipeline.preflight.launch_variables import check_variables
from geo_sokoban_pipeline.preflight.machine import check_libraries, check_threads, check_torchvision
from geo_sokoban_pipeline.preflight.relations import check_counts, check_moves, check_playing, check_relations
from geo_sokoban_pipeline.preflight.servers import check_launch
from geo_sokoban_pipeline.preflight.subject import Subject
from geo_sokoban_pipeline.preflight.trial import is_own, sample_level, try_own_code
from geo_sokoban_pipeline.tasks import TASKS, task_of

log = logging.getLogger(__name__)
_ROWS = 8  # of a file that are read to find one prompt


def look_first(run: str, parameters: ProjectParameters, data_root: Path) -> None:
    """Refuse what is known to fail or to teach nothing, and log what is doubtful.

    Args:
        run: namespace, such as `train_sokoban` or `evaluate_geo3k`; others are not looked at.

    Raises:
        ParameterError: a failure, or several, one line each, with the way out.
    """
    kind, _, task = run.partition("_")
    if kind not in _CHECKS or task not in TASKS:
        return
    subject = Subject(task, parameters, data_root)
    looks = [partial(look, subject) for look in _CHECKS[kind]]
    _act(run, [check for look in looks for check in guard("before the run", run, look)])


def look_at_prompts(rows: Sequence[Mapping[str, Any]], options: TrainOptions, seed: int) -> None:
    """The same for what needs prompts: own code on the first one, and moves that levels need.

    Args:
        rows: training prompts.

    Raises:
        ParameterError: as `look_first`.
    """
    run, world = f"train_{options.task}", task_of(options.task).world
    if not rows:
        return
    found = try_own_code(run, dict(rows[0]), options, seed)
    lengths = [int(row["solution_length"]) for row in rows if _is_number(row.get("solution_length"))]
    if lengths and world == "sokoban":
        found += check_moves(run, options, max(lengths), min(lengths))
    _act(run, found)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not math.isnan(value)


def _act(run: str, found: Sequence[Check]) -> None:
    warnings = [f"{check.name}: {_text(check)}" for check in found if check.state == "warning"]
    if warnings:
        log.warning("%s: %s", run, "\n  ".join(warnings))
    failures = [_text(check) for check in found if check.state == "failure"]
    if failures:
        raise ParameterError("\n".join(failures))


def _text(check: Check) -> str:
    return f"{check.found}. {check.way_out[:1].upper()}{check.way_out[1:]}." if check.way_out else check.found


def _relations(subject: Subject) -> Sequence[Check]:
    return check_relations(subject.run, subject.options)


def _playing(subject: Subject) -> Sequence[Check]:
    return check_playing(subject.run, subject.options)


def _own_code(subject: Subject) -> Sequence[Check]:
    """On a first prompt, where one can be had without the hub; otherwise once it is there (`look_at_prompts`)."""
    if not is_own(subject.options):
        return []
    try:
        row = _first_prompt(subject)
    except Exception:  # files may hold anything; the data nodes say what is wrong with them
        log.debug("no prompt to try own code on", exc_info=True)
        return []
    return [] if row is None else try_own_code(subject.run, row, subject.options, subject.parameters.seed)


def _first_prompt(subject: Subject) -> dict[str, Any] | None:
    data = subject.data
    if data.source == "hub":
        return None
    if not isinstance(data, SokobanDataOptions):
        from geo_sokoban_pipeline.preflight.problems import sample_problems

        return next(iter(sample_problems(data, subject.task, _ROWS, None)[1]), None)
    if data.source == "generate":
        return sample_level(data)
    from geo_sokoban_pipeline.preflight.levels import first_prompt

    return first_prompt(data, _ROWS)


def _data(subject: Subject) -> Sequence[Check]:
    """Of generated data, numbers and lengths are known before there are any."""
    data, options, run = subject.data, subject.options, subject.run
    if data.source != "generate":
        return []
    counts = data.counts
    found = check_counts(run, options, counts.train, counts.validation, counts.eval)
    return [*found, *_moves(subject)]


def _moves(subject: Subject) -> Sequence[Check]:
    data = subject.data
    if data.source != "generate" or not hasattr(data, "max_solution"):
        return []
    return check_moves(subject.run, subject.options, data.max_solution, data.min_solution)


def _machine(subject: Subject) -> Sequence[Check]:
    threads = check_threads(subject.options.threads, subject.options.processes)
    return [threads, *map(_lenient, [*check_libraries(), check_torchvision()])]


def _lenient(check: Check) -> Check:
    """A failure as a warning: whoever has another version may know why."""
    return check if check.state != "failure" else Check(check.group, check.name, "warning", check.found, check.way_out)


def _servers(subject: Subject) -> Sequence[Check]:
    return check_launch(subject.run, subject.options)


def _variables(subject: Subject) -> Sequence[Check]:
    # What this one says can only be told with torch, whose import takes seconds.
    return check_variables(subject, {name: value for name, value in os.environ.items() if name != NUM_GPUS})


# Lengths and counts only of runs that make their data: other commands work on those of another run.
_CHECKS: Mapping[str, Sequence[Callable[[Subject], Sequence[Check]]]] = {
    "train": (_relations, _own_code, _data, _servers, _machine, _variables),
    "rollout": (_playing, _own_code, _servers, _machine, _variables),
    "update": (_machine,),
    "evaluate": (_servers, _machine, _variables),
    "control": (_servers, _machine),
}
