"""Evaluation of Sokoban: records of episodes, entries of the summary about moves and optimal lengths, tags.

The rules of tags read moves and the environment's info alone, so they need neither boards nor images. Infos without the
fields of `SokobanEnv` (an environment of one's own) give no tags that depend on them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.envs.metrics import (
    EpisodeRecord,
    FinishedEpisode,
    clusters_of,
    count_solved,
    mean_of,
    read_record,
)
from geo_sokoban_pipeline.envs.sokoban.env import SokobanEnvOptions, parse_actions
from geo_sokoban_pipeline.rewards.text import answer_blocks

if TYPE_CHECKING:
    from geo_sokoban_pipeline.trajectories.index import StoredEpisode, StoredResponse


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
    default = SokobanEnvOptions.model_fields["max_actions_per_turn"].default
    return int(options.env.args.get("max_actions_per_turn", default))


def move_limit(options: TrainOptions) -> int:
    """Largest number of moves of an episode, for policies and baselines."""
    return options.rollout.max_turns * moves_per_turn(options)


_OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}
_BACK_AND_FORTH = 4  # moves
_BLOCKED = 2  # responses
_LONGEST = 4000  # characters in which answer blocks are looked for


def tag_level(episode: StoredEpisode) -> dict[str, int]:
    """Tags of an episode.

    Returns:
        `deadlock`: 1, a box can never reach a target. `oscillation`: the most moves in a row that go back and forth, 4
        or more. `walking_into_walls`: responses none of whose moves moved anything, 2 or more. `no_move`: responses
        without a move. `hedge`: responses with several answer blocks of different moves.
    """
    signs = [_read_signs(said) for said in episode.responses]
    moves = [move for sign in signs for move in sign.moves]
    back_and_forth = _longest_oscillation(moves) if len(moves) >= _BACK_AND_FORTH else 0
    blocked = sum(sign.blocked for sign in signs)
    found = {
        "deadlock": int(episode.metrics.get("lost", 0.0) >= 0.5 and not episode.success),
        "oscillation": back_and_forth if back_and_forth >= _BACK_AND_FORTH else 0,
        "walking_into_walls": blocked if blocked >= _BLOCKED else 0,
        "no_move": sum(sign.invalid for sign in signs),
        "hedge": sum(sign.hedges for sign in signs),
    }
    return {name: count for name, count in found.items() if count}


class _Signs(NamedTuple):
    """A response: moves that changed the board, whether all were blocked, whether there is none or several."""

    moves: tuple[str, ...]
    blocked: bool
    invalid: bool
    hedges: bool


@lru_cache(4096)  # equal responses of a table are one object
def _read_signs(said: StoredResponse) -> _Signs:
    metrics = said.info.get("metrics")
    turn = metrics.get("turn_metrics") if isinstance(metrics, dict) else None
    turn = turn if isinstance(turn, dict) else {}
    valid, effective = turn.get("action_is_valid"), turn.get("action_is_effective")
    # A blocked response leaves the player where it is.
    moves = tuple(said.info.get("parsed_actions") or ()) if effective else ()
    return _Signs(moves, effective is False and bool(valid), valid is False, _names_several(said.text))


def _longest_oscillation(moves: Sequence[str]) -> int:
    longest, length = 0, 1
    for before, move in pairwise(moves):
        length = length + 1 if _OPPOSITE.get(before) == move else 1
        longest = max(longest, length)
    return longest


def _names_several(text: str) -> bool:
    blocks = answer_blocks(text[:_LONGEST])
    return len({tuple(parse_actions(block)) for block in blocks} - {()}) > 1 if len(blocks) > 1 else False
