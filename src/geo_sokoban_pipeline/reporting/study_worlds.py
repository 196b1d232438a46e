"""What the docs of a study say differently in each world: who plays, what was played, and by what it is broken down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from geo_sokoban_pipeline.envs.base import Words
from geo_sokoban_pipeline.envs.geo3k.task import GEO3K
from geo_sokoban_pipeline.envs.sokoban.task import SOKOBAN
from geo_sokoban_pipeline.reporting.formats import World, count
from geo_sokoban_pipeline.reporting.study_rates import Rate, label_rates, length_rates
from geo_sokoban_pipeline.tasks import task_of

Seeds = Sequence[Mapping[str, Any]]
# (seeds, player, mode) → rates by label, one for each seed
Rates = Callable[[Seeds, str, str], dict[Any, list[Rate]]]


@dataclass(frozen=True)
class Breakdown:
    """A table by the kind of prompt: what it is by, and its rates."""

    by: str
    rates: Rates


@dataclass(frozen=True)
class StudyWorld:
    """What differs.

    Attributes:
        world: its name.
        words: for people.
        players: rows of policies in the order of the tables. disguised: those that do not see the true picture.
        baselines: players without a policy.
        dashed: players whose rates are lines of the figure, with the class of their colour.
        breakdowns: tables by kind; the seeds get each of the first one.
        shares: numbers of a row that tell how a policy answers, with what stands above their table.
        describe: what was played, of the results' `levels`.
        brief: the same in a few words, for one line among others.
    """

    world: World
    words: Words
    players: tuple[str, ...]
    disguised: tuple[str, ...]
    baselines: tuple[str, ...]
    dashed: tuple[tuple[str, str], ...]
    breakdowns: tuple[Breakdown, ...]
    shares: tuple[tuple[str, str], ...]
    describe: Callable[[Mapping[str, Any]], str]
    brief: Callable[[Mapping[str, Any]], str]


def world_of(results: Mapping[str, Any]) -> StudyWorld:
    """The world of a study's results."""
    return _WORLDS[task_of(results.get("task", SOKOBAN.name)).world]


def _describe_levels(levels: Mapping[str, Any]) -> str:
    low, high = levels["lengths"]
    shared = levels["shared_layouts"]
    walls = "none of which occurs in training" if not shared else f"{shared} of which occur in training too"
    # Results of earlier versions know neither.
    distinct = "distinct " if levels.get("distinct") == levels["count"] else ""
    each = f" ({levels['per_length'][0]} of each)" if len(levels.get("per_length", [])) == 1 else ""
    return (
        f"{count(levels['count'])} {distinct}evaluation levels ({levels['height']}×{levels['width']}, "
        f"{levels['boxes']} box{'es' if levels['boxes'] > 1 else ''}, {levels['layouts']} wall layouts, {walls}), "
        f"optimal lengths {low} to {high}{each}, {levels['move_limit']} moves at most"
    )


def _brief_levels(levels: Mapping[str, Any]) -> str:
    low, high = levels["lengths"]
    boxes = "one box" if levels["boxes"] == 1 else f"{levels['boxes']} boxes"
    return f"{levels['height']}×{levels['width']} levels with {boxes} and optimal lengths {low} to {high}"


def _describe_problems(levels: Mapping[str, Any]) -> str:
    shared, turns = levels["shared_problems"], levels["turn_limit"]
    common = "none of which occurs in training" if not shared else f"{shared} of which occur in training too"
    kind = f"generated, difficulty {levels['difficulty']}, " if levels["difficulty"] else ""
    families = f"{levels['families']} families, " if levels["families"] else ""
    replies = "one reply" if turns == 1 else f"{turns} replies at most"
    answers = f"{levels['answers']} distinct answers"
    return f"{count(levels['count'])} evaluation problems, {common} ({kind}{families}{answers}), {replies}"


def _brief_problems(levels: Mapping[str, Any]) -> str:
    return f"{count(levels['count'])} problems"


_WORLDS = {
    "sokoban": StudyWorld(
        world="sokoban",
        words=SOKOBAN.words,
        players=("warm_start", "final", "control_teacher", "control_optimal", "final_blank"),
        disguised=("final_blank",),
        baselines=("random", "random_legal", "teacher", "teacher_patient", "solver"),
        dashed=(("random_legal", "legal"), ("teacher_patient", "training")),
        breakdowns=(Breakdown("optimal length", length_rates),),
        shares=(),
        describe=_describe_levels,
        brief=_brief_levels,
    ),
    "geometry": StudyWorld(
        world="geometry",
        words=GEO3K.words,
        players=("warm_start", "final", "control_teacher", "control_optimal", "final_blank", "final_shuffled"),
        disguised=("final_blank", "final_shuffled"),
        baselines=("most_frequent", "teacher", "label"),
        dashed=(("most_frequent", "legal"), ("teacher", "training")),
        breakdowns=(
            Breakdown("family", partial(label_rates, column="family")),
            Breakdown("form of the answer", partial(label_rates, column="answer_form")),
        ),
        shares=(
            (
                "plausible_share",
                "**Answers of some rule**: last answers that one of the rules gives for this figure's number, right or "
                "not. The others were read or calculated wrongly.",
            ),
            ("called_share", "**Calls**: episodes that ask the scoring tool."),
        ),
        describe=_describe_problems,
        brief=_brief_problems,
    ),
}
