"""Tasks: what the code that serves all of them has to know of each one, as plain data.

Whoever plays, trains, evaluates or reports asks `task_of` and names no task itself. Behaviour that differs lies in the
layer it belongs to, under the task's `world`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from geo_sokoban_pipeline.config.base import StrictModel
from geo_sokoban_pipeline.config.geo3k import Geo3kDataOptions, Geo3kMultiTurnDataOptions
from geo_sokoban_pipeline.config.geo3k_training import Geo3kMultiTurnTrainOptions, Geo3kTrainOptions
from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.sokoban import SokobanDataOptions

World = Literal["sokoban", "geometry"]


@dataclass(frozen=True)
class Words:
    """What people read.

    Attributes:
        unit, units: one instance of the task, and several.
        rate: share of them that a policy gets right.
        solved, unsolved: state of an episode.
    """

    unit: str
    units: str
    rate: str
    solved: str
    unsolved: str


@dataclass(frozen=True)
class Task:
    """One task; its data lie under its name, its pipelines and runs under `<kind>_<name>`.

    Attributes:
        name: in namespaces, parameters, and the column `task` of trajectories.
        world: which environment family it belongs to.
        data: model of the section `<name>` of the parameters.
        train: model of the section `train_<name>`.
        difficulty: column of the prompts by which they are drawn, and episodes broken down; null is a difficulty too.
        ordered: whether a difficulty is a number, a larger one being harder; else it is a mere name.
        breakdowns: columns of the prompts by which the evaluation breaks episodes down.
        watched: episode metrics whose mean a rollout reports, as (metric, name).
        plain_reply: what anybody could answer, to try an environment without a teacher.
        words: for people.
    """

    name: str
    world: World
    data: type[StrictModel]
    train: type[TrainOptions]
    difficulty: str
    ordered: bool
    breakdowns: tuple[str, ...]
    watched: tuple[tuple[str, str], ...]
    plain_reply: str
    words: Words

    @property
    def run(self) -> str:
        """Namespace of its training runs."""
        return f"train_{self.name}"

    def difficulty_of(self, row: Mapping[str, Any]) -> Any:
        """Difficulty of a prompts row; None where it is not known."""
        return row.get(self.difficulty)


SOKOBAN = Task(
    name="sokoban",
    world="sokoban",
    data=SokobanDataOptions,
    train=TrainOptions,
    difficulty="solution_length",
    ordered=True,
    breakdowns=(),
    watched=(),
    plain_reply="<answer>Up</answer>",
    words=Words("level", "levels", "solve rate", "solved", "not solved"),
)

_ANSWERED = Words("problem", "problems", "accuracy", "correct", "not correct")
_BREAKDOWNS = ("family", "answer_form", "difficulty")

GEO3K = Task(
    name="geo3k",
    world="geometry",
    data=Geo3kDataOptions,
    train=Geo3kTrainOptions,
    difficulty="family",
    ordered=False,
    breakdowns=_BREAKDOWNS,
    watched=(("has_answer", "answered"), ("grading_timeout", "grading_timeouts")),
    plain_reply="\\boxed{60}",
    words=_ANSWERED,
)

GEO3K_MULTI_TURN = Task(
    name="geo3k_multi_turn",
    world="geometry",
    data=Geo3kMultiTurnDataOptions,
    train=Geo3kMultiTurnTrainOptions,
    difficulty="family",
    ordered=False,
    breakdowns=_BREAKDOWNS,
    watched=(
        *GEO3K.watched,
        ("first_attempt_correct", "first_attempt_rate"),
        ("tool_calls", "tool_calls/mean"),
        ("valid_tool_calls", "valid_tool_calls/mean"),
    ),
    plain_reply="\\boxed{60}",
    words=_ANSWERED,
)

TASKS = {task.name: task for task in (SOKOBAN, GEO3K, GEO3K_MULTI_TURN)}


def task_of(name: str) -> Task:
    """The task of a name.

    Raises:
        ValueError: there is none; the message names those there are.
    """
    if name not in TASKS:
        raise ValueError(f"task={name!r}: must be one of {', '.join(TASKS)}")
    return TASKS[name]


def prompt_key(row: Mapping[str, Any]) -> str:
    """What an episode is known by across runs: the content hash of its level or problem, else the id of its row."""
    return str(row.get("level_hash") or row.get("problem_hash") or row["id"])


def difficulty_text(task: str, row: Mapping[str, Any]) -> str | None:
    """Difficulty of a prompts row as the trajectories keep it; None where it, or the task, is not known.

    A text serves every task: the family of a problem is a name, and the length of a level is a number that the column
    `optimal_steps` holds as such.
    """
    value = TASKS[task].difficulty_of(row) if task in TASKS else None
    return None if value is None else str(value)
