"""Tags of Sokoban's episodes, found by a look at the moves.

The rules read moves and the environment's info alone, so they need neither boards nor images. Infos without the fields
of `SokobanEnv` (an environment of one's own) give no tags that depend on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from geo_sokoban_pipeline.envs.sokoban.env import answer_blocks, parse_actions

if TYPE_CHECKING:
    from geo_sokoban_pipeline.trajectories.index import StoredEpisode, StoredResponse


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
