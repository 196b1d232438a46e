"""Scorers: how episodes of each world become records, and records rows of the evaluation summary.

Rows of all worlds have the names that the shared tables need (`policy`, `mode`, `episodes`, `solved`, `solve_rate`,
`low`, `high`, `mean_return`, `invalid_share`, `pass_at_k`); what stands beside them is the world's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.evaluation.answers import (
    answer_disguises,
    answer_numbers,
    describe_problems,
    record_answer,
    summarise_answers,
)
from geo_sokoban_pipeline.evaluation.levels import describe_levels, level_disguises, level_numbers, record_level
from geo_sokoban_pipeline.evaluation.metrics import Disguise, Ending, Rows, summarise_episodes
from geo_sokoban_pipeline.tasks import World, task_of


@dataclass(frozen=True)
class Scorer:
    """What the evaluation does differently in each world.

    Attributes:
        record: of an episode.
        summarise: the row of some records; takes the keywords `policy` and `mode`.
        describe: entries of the summary about what was played.
        numbers: of a row, as a validation reports them; None for what could not be measured.
        disguises: of the prompts that the options ask for; the last argument is the seed.
    """

    record: Callable[[Ending], Any]
    summarise: Callable[..., dict[str, Any]]
    describe: Callable[[Rows, TrainOptions], dict[str, Any]]
    numbers: Callable[[Mapping[str, Any]], dict[str, float | None]]
    disguises: Callable[[Rows, TrainOptions, int], list[Disguise]]


_SCORERS: dict[World, Scorer] = {
    "sokoban": Scorer(record_level, summarise_episodes, describe_levels, level_numbers, level_disguises),
    "geometry": Scorer(record_answer, summarise_answers, describe_problems, answer_numbers, answer_disguises),
}


def scorer_of(task: str) -> Scorer:
    """Scorer of a task's world."""
    return _SCORERS[task_of(task).world]
