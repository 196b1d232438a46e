"""Evaluation of Sokoban: records of episodes, and entries of the summary about moves and optimal lengths."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.envs.metrics import (
    EpisodeRecord,
    FinishedEpisode,
    clusters_of,
    count_solved,
    mean_of,
    read_record,
)
from geo_sokoban_pipeline.envs.sokoban.env import SokobanEnv


@dataclass(frozen=True)
class LevelRecord(EpisodeRecord):
    """Record of one episode in the evaluation.

    Attributes:
        steps: moves made; None where the environment does not count them.
        optimal_steps: fewest moves that solve the level; None where unknown.
    """

    steps: int | None
    optimal_steps: int | None


def record_level(episode: FinishedEpisode) -> LevelRecord:
    """Record of an episode for the summary."""
    length, steps = episode.row.get("solution_length"), episode.metrics.get("steps")
    return LevelRecord(
        **read_record(episode),
        steps=None if steps is None else int(steps),
        optimal_steps=None if length is None else int(length),
    )


def summarise_levels(records: Sequence[LevelRecord]) -> dict[str, Any]:
    """`steps_over_optimal` (mean of steps / optimal over solved episodes with both) and `by_length`."""
    detours = [
        record.steps / record.optimal_steps
        for record in records
        if record.success and record.steps is not None and record.optimal_steps
    ]
    return {"steps_over_optimal": mean_of(detours), "by_length": by_length(records)}


def by_length(records: Iterable[LevelRecord]) -> list[dict[str, Any]]:
    """Solve rate per optimal length, ascending: `length`, and the entries of `count_solved`.

    Episodes whose optimal length is unknown are in no row.
    """
    groups: dict[int, list[LevelRecord]] = defaultdict(list)
    for record in records:
        if record.optimal_steps is not None:
            groups[record.optimal_steps].append(record)
    return [
        {"length": length, **count_solved([one.success for one in group], clusters_of(group))}
        for length, group in sorted(groups.items())
    ]


def moves_per_turn(options: TrainOptions) -> int:
    """Moves of a response that the environment carries out."""
    default = inspect.signature(SokobanEnv).parameters["max_actions_per_turn"].default
    return int(options.env.args.get("max_actions_per_turn", default))


def move_limit(options: TrainOptions) -> int:
    """Largest number of moves of an episode, for policies and baselines."""
    return options.rollout.max_turns * moves_per_turn(options)
