"""Experts and baselines of Sokoban: they see the board itself and choose one move at a time."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from geo_sokoban_pipeline.config.policy import ExpertOptions
from geo_sokoban_pipeline.envs.sokoban.board import DIRECTIONS, Board
from geo_sokoban_pipeline.envs.sokoban.solver import SearchLimitError, solve

SOLVER_STATES = 200_000


class MovePolicy(Protocol):
    """Chooses moves during one episode."""

    def choose(self, board: Board, generator: random.Random) -> str | None:
        """A direction, or None if the agent gives up, which ends the episode."""


def make_agent(name: str, patience: int | None = 1, max_states: int = SOLVER_STATES) -> MovePolicy:
    """An agent for one episode.

    Args:
        name: `random` (any direction), `random_legal` (moves that change the board), `solver` (fewest moves), or
            `direct`.
        patience: of `direct` only, see `DirectAgent`.
        max_states: of `solver` only, see `solve`.

    Raises:
        ValueError: there is no agent of that name, or patience is negative.
    """
    agents: dict[str, Callable[[], MovePolicy]] = {
        "random": RandomAgent,
        "random_legal": RandomLegalAgent,
        "solver": partial(SolverAgent, max_states),
        "direct": partial(DirectAgent, patience),
    }
    if name not in agents:
        raise ValueError(f"player={name!r}: must be one of {', '.join(agents)}")
    return agents[name]()


class RandomAgent:
    """Any of the four directions, blocked ones included."""

    def choose(self, board: Board, generator: random.Random) -> str | None:
        """See `MovePolicy`."""
        return generator.choice(DIRECTIONS)


class RandomLegalAgent:
    """Uniform among the moves that change the board; gives up if there is none."""

    def choose(self, board: Board, generator: random.Random) -> str | None:
        """See `MovePolicy`."""
        legal = board.legal_actions()
        return generator.choice(legal) if legal else None


class SolverAgent:
    """Fewest moves; gives up on boards without a solution or beyond the search limit (see `solve`)."""

    def __init__(self, max_states: int = SOLVER_STATES) -> None:
        self._max_states = max_states
        self._plan: dict[Board, str] = {}

    def choose(self, board: Board, generator: random.Random) -> str | None:
        """See `MovePolicy`."""
        if board not in self._plan:
            self._make_plan(board)
        return self._plan.get(board)

    def _make_plan(self, board: Board) -> None:
        try:
            solution = solve(board, self._max_states)
        except SearchLimitError:
            solution = None
        # By board, not by turn: after a foreign move it makes a new plan.
        for action in solution or ():
            self._plan[board] = action
            board = board.move(action).board


class DirectAgent:
    """A heuristic without search, whose ceiling is low: it pushes nearer, walks nearer, and never plans a way round.

    It takes a push that lowers the distance of boxes and targets (Manhattan, best matching); else a step without a
    push that comes nearer to the closest box off target; ties at random. Where there is neither it is blocked and
    makes a random move that changes the board.

    Args:
        patience: random moves before it gives up when blocked once more; 0 gives up at the first block, None never
            does.

    Raises:
        ValueError: patience is negative.
    """

    def __init__(self, patience: int | None = 1) -> None:
        if patience is not None and patience < 0:
            raise ValueError(f"patience={patience}: must be 0 or more, or None to never give up")
        self._patience = patience
        self._blocks = 0

    def choose(self, board: Board, generator: random.Random) -> str | None:
        """See `MovePolicy`."""
        moves = {direction: move for direction in DIRECTIONS if (move := board.move(direction)).moved}
        if not moves:
            return None
        distance = board.box_target_distance("assignment")
        good = [
            d for d, move in moves.items() if move.pushed and move.board.box_target_distance("assignment") < distance
        ]
        if not good:
            reach = _box_distance(board)
            good = [d for d, move in moves.items() if not move.pushed and _box_distance(move.board) < reach]
        if good:
            return generator.choice(good)
        self._blocks += 1
        if self._patience is not None and self._blocks > self._patience:
            return None
        return generator.choice(list(moves))


def _box_distance(board: Board) -> int:
    """Manhattan distance from the player to the closest box that is not on a target; 0 if all are."""
    row, column = board.player
    off_target = board.layout.cells(board.box_mask & ~board.target_mask)
    return min((abs(row - r) + abs(column - c) for r, c in off_target), default=0)


# Experts of the warm start: an agent whose moves are written as the responses a policy is to learn.


class SokobanExpert:
    """Responses of one demonstration.

    Args:
        name: agent that chooses the moves.
        patience: of the agent `direct`.
        noise: share of moves that are replaced by a random legal one, in [0, 1].
        max_states: of the agent `solver`, see `solve`.
        moves: of a response, at most.
    """

    def __init__(
        self,
        name: str,
        patience: int | None = None,
        noise: float = 0.0,
        max_states: int = SOLVER_STATES,
        moves: int = 1,
    ) -> None:
        self._player: MovePolicy = make_agent(name, patience, max_states)
        self._noise, self._moves = noise, moves

    def respond(self, env: Any, generator: random.Random) -> str | None:
        """The next response, an answer block with moves; None: the expert gives up, or nothing is left to do."""
        board: Board = env.board
        chosen: list[str] = []
        while len(chosen) < self._moves and not board.is_solved:
            if (action := self._choose(board, generator)) is None:
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


# Agents keep state, so every demonstration gets an expert of its own.
build_teacher = SokobanExpert


def describe_expert(options: ExpertOptions, rows: Sequence[Mapping[str, Any]]) -> str:
    """The expert of the warm start in words."""
    noise = f", {options.noise:.0%} of its moves replaced by random ones" if options.noise else ""
    return f"SFT on the expert `{options.name}` on {len(rows)} levels{noise}"
