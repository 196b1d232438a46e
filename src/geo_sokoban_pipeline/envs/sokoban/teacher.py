"""Teachers of the warm start: a player whose moves are written as the replies a policy is to learn."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from geo_sokoban_pipeline.envs.sokoban.board import Board
from geo_sokoban_pipeline.envs.sokoban.players import SOLVER_STATES, Player, make_player
from geo_sokoban_pipeline.options.policy import TeacherOptions


class SokobanTeacher:
    """Replies of one demonstration.

    Args:
        name: player that chooses the moves.
        patience: of the player `direct`.
        noise: share of moves that are replaced by a random legal one, in [0, 1].
        max_states: of the player `solver`, see `solve`.
    """

    def __init__(
        self, name: str, patience: int | None = None, noise: float = 0.0, max_states: int = SOLVER_STATES
    ) -> None:
        self._player: Player = make_player(name, patience, max_states)
        self._noise = noise

    def reply(self, env: Any, generator: random.Random, moves: int = 1) -> str | None:
        """The next reply, up to `moves` moves in an answer block; None: the teacher gives up at once."""
        board: Board = env.board
        chosen: list[str] = []
        while len(chosen) < moves and not board.is_solved:
            action = self._choose(board, generator)
            if action is None:
                break
            chosen.append(action.capitalize())
            board = board.move(action).board
        return f"<answer>{', '.join(chosen)}</answer>" if chosen else None

    def _choose(self, board: Board, generator: random.Random) -> str | None:
        action = self._player.choose(board, generator)
        if self._noise and generator.random() < self._noise:
            legal = board.legal_actions()
            action = generator.choice(legal) if legal else action
        return action


def build_teacher(
    name: str, patience: int | None = None, noise: float = 0.0, max_states: int = SOLVER_STATES
) -> SokobanTeacher:
    """Teacher of one demonstration; players keep state, so every episode gets its own."""
    return SokobanTeacher(name, patience, noise, max_states)


def describe_expert(options: TeacherOptions, rows: Sequence[Mapping[str, Any]]) -> str:
    """Whom the warm start imitates, in words."""
    noise = f", {options.noise:.0%} of its moves replaced by random ones" if options.noise else ""
    return f"it imitates the expert `{options.name}` on {len(rows)} levels{noise}"
