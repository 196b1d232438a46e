"""Levels too large to enumerate: pull boxes away from their targets at random, then let the solver count the moves.

Solvable by construction, because a pull is a push played backwards; the length is exact, because the solver verifies
it. A wanted shorter length is met by following the solution: the rest of a shortest solution is itself a shortest
solution.
"""

from __future__ import annotations

import random

from geo_sokoban_pipeline.envs.sokoban.board import Board
from geo_sokoban_pipeline.envs.sokoban.layout import Layout, bits
from geo_sokoban_pipeline.envs.sokoban.solver import SearchLimitError, solve

State = tuple[int, int]  # mask of boxes, index of the player

# Longer drags of one box make longer solutions than boxes that jitter in turn.
_SAME_BOX_SHARE = 0.6


def pulled_board(layout: Layout, boxes: int, generator: random.Random) -> Board | None:
    """A board reached from a solved one by 3 to 12 random pulls per box; None where no box can be pulled.

    Args:
        layout: walls with connected floor of more than `boxes` cells.
        boxes: number of boxes and targets.
        generator: source of every random choice.
    """
    *targets, player = generator.sample(list(bits(layout.floor)), boxes + 1)
    target_mask = sum(1 << target for target in targets)
    state: State = (target_mask, player)
    seen, last = {target_mask}, -1
    for _ in range(generator.randint(3 * boxes, 12 * boxes)):
        choices = [pull for pull in pulls(layout, state) if pull[0][0] not in seen]
        if not choices:
            break
        same = [pull for pull in choices if pull[1] == last]
        state, _, last = generator.choice(same if same and generator.random() < _SAME_BOX_SHARE else choices)
        seen.add(state[0])
    if state[0] == target_mask:
        return None
    reach = layout.reach(1 << state[1], layout.floor & ~state[0])
    return Board(layout, target_mask, state[0], generator.choice(list(bits(reach))))


def pulls(layout: Layout, state: State) -> list[tuple[State, int, int]]:
    """Every pull the player can walk to, as (state after it, index of the box before it, index after it)."""
    boxes, player = state
    free = layout.floor & ~boxes
    reach = layout.reach(1 << player, free)
    found = []
    for delta in layout.deltas.values():
        for stand in bits(reach):
            box, back = stand + delta, stand - delta
            if boxes >> box & 1 and free >> back & 1:
                found.append(((boxes ^ 1 << box ^ 1 << stand, back), box, stand))
    return found


def pulled_level(
    layout: Layout, boxes: int, bounds: tuple[int, int | None], max_states: int, generator: random.Random
) -> tuple[Board | None, int]:
    """A verified level whose fewest moves lie within bounds, drawn uniformly from what its longest form allows.

    Args:
        layout: walls with connected floor of more than `boxes` cells.
        boxes: number of boxes and targets.
        bounds: fewest moves, lowest and highest; highest None: the longest form itself.
        max_states: limit of the verifying search.
        generator: source of every random choice.

    Returns:
        (level, its fewest moves), or (None, fewest moves of what was found) where that is too short, 0 beyond the
        search limit.
    """
    board = pulled_board(layout, boxes, generator)
    if board is None:
        return None, 0
    try:
        solution = solve(board, max_states)
    except SearchLimitError:
        return None, 0
    low, high = bounds
    if solution is None or len(solution) < low:
        return None, len(solution or [])
    length = len(solution) if high is None else generator.randint(low, min(high, len(solution)))
    for action in solution[: len(solution) - length]:
        board = board.move(action).board
    return board, length
