"""Fewest moves to solve a board: A* whose edges are pushes, each costing the walk to it plus one.

The result is exact. The lower bound never exceeds the true rest, walks are shortest by flood fill, and only positions
that can never be solved are cut (dead cells, frozen boxes, boxes without a target of their own). Ties are broken by
order of discovery, so the solution is the same in every process.
"""

from __future__ import annotations

from functools import lru_cache
from heapq import heappop, heappush
from itertools import count

from geo_sokoban_pipeline.envs.sokoban.board import (
    DIRECTIONS,
    INFINITE,
    Board,
    Layout,
    bits,
    frozen_boxes,
    push_table,
    smallest_matching,
)

_STATES = 20_000  # that the search for the moves to the goal expands, a second at most
State = tuple[int, int]  # mask of boxes, index of the player
Push = tuple[int, str, State]  # moves, direction of the push, state after it


class SearchLimitError(RuntimeError):
    """The search reached its limit of states before it found a solution or proved that there is none."""


def solve(board: Board, max_states: int = 200_000) -> list[str] | None:
    """Shortest solution in moves, walks included.

    Args:
        board: any position.
        max_states: positions (boxes and player, right after a push) that may be expanded; about 50 µs and 1 kB each.

    Returns:
        Actions up, down, left, right; empty for a solved board; None only if it is proven that no solution exists.

    Raises:
        SearchLimitError: `max_states` positions were expanded and the question is still open.
    """
    if max_states < 1:
        raise ValueError(f"max_states={max_states}: must be at least 1")
    if board.is_solved:
        return []
    if board.box_mask.bit_count() > board.target_mask.bit_count():
        return None
    return _Search(board).run(max_states)


@lru_cache(maxsize=50_000)
def moves_to_goal(board: Board) -> int | None:
    """Moves of the shortest solution; −1 where there is none, None where the search reaches its limit."""
    try:
        actions = solve(board, _STATES)
    except SearchLimitError:
        return None
    return -1 if actions is None else len(actions)


class _Search:
    """One A* search: open heap, best known costs, and how each state was reached."""

    def __init__(self, board: Board) -> None:
        self.layout = board.layout
        self.targets = board.target_mask
        self.table = push_table(board.layout, board.target_mask)
        self.bounds: dict[int, int] = {}
        self.start: State = (board.box_mask, board.player_index)
        self.costs: dict[State, int] = {self.start: 0}
        self.parents: dict[State, tuple[State, str]] = {}

    def run(self, max_states: int) -> list[str] | None:
        order = count()
        heap = [(self.bound(self.start[0]), next(order), 0, self.start)]
        expanded = 0
        while heap:
            bound, _, cost, state = heappop(heap)
            if cost > self.costs[state]:
                continue  # a cheaper way here was found later
            if bound >= INFINITE:
                break
            if not state[0] & ~self.targets:
                return self.path(state)
            if expanded == max_states:
                raise SearchLimitError(
                    f"max_states={max_states}: no solution within {max_states} positions and {bound - 1} moves, "
                    "none excluded either; raise max_states, or keep the level without a solution length"
                )
            expanded += 1
            for moves, direction, after in pushes(self.layout, state, self.table.dead):
                total = cost + moves
                if total >= self.costs.get(after, INFINITE) or self.is_frozen(after, direction):
                    continue
                rest = self.bound(after[0])
                if rest < INFINITE:
                    self.costs[after] = total
                    self.parents[after] = (state, direction)
                    # Second key: later states first among equals, they are mostly deeper.
                    heappush(heap, (total + rest, -next(order), total, after))
        return None

    def bound(self, boxes: int) -> int:
        """Pushes that these boxes need at least, each with a target of its own; `INFINITE` if that is impossible."""
        if (found := self.bounds.get(boxes)) is None:
            found = smallest_matching([self.table.pushes[box] for box in bits(boxes)])
            self.bounds[boxes] = found
        return found

    def is_frozen(self, state: State, direction: str) -> bool:
        box = state[1] + self.layout.deltas[direction]
        frozen = frozen_boxes(box, state[0], self.layout.walls, self.table.dead, self.layout.stride)
        return bool(frozen & ~self.targets)

    def path(self, state: State) -> list[str]:
        legs: list[list[str]] = []
        while state in self.parents:
            before, direction = self.parents[state]
            legs.append([*shortest_walk(self.layout, before, state[1] - self.layout.deltas[direction]), direction])
            state = before
        return [action for leg in reversed(legs) for action in leg]


def pushes(layout: Layout, state: State, dead: int = 0) -> list[Push]:
    """Every push the player can walk to, nearest first.

    Args:
        layout: the walls.
        state: mask of boxes and index of the player.
        dead: mask of cells onto which no box may go.

    Returns:
        (moves with the push, direction, state after it) in order of moves.
    """
    boxes, player = state
    stride = layout.stride
    free = layout.floor & ~boxes
    onto = free & ~dead
    # Cells from which a push in each direction would succeed: a box one cell on, room two cells on.
    sides = (
        ("up", -stride, boxes << stride & onto << 2 * stride),
        ("down", stride, boxes >> stride & onto >> 2 * stride),
        ("left", -1, boxes << 1 & onto << 2),
        ("right", 1, boxes >> 1 & onto >> 2),
    )
    left = (sides[0][2] | sides[1][2] | sides[2][2] | sides[3][2]) & free
    found: list[Push] = []
    seen = frontier = 1 << player
    moves = 1
    while frontier and left:
        if frontier & left:
            left &= ~frontier
            for direction, delta, stands in sides:
                for stand in bits(frontier & stands):
                    box = stand + delta
                    found.append((moves, direction, (boxes ^ 1 << box ^ 1 << box + delta, box)))
        frontier = (frontier << 1 | frontier >> 1 | frontier << stride | frontier >> stride) & free & ~seen
        seen |= frontier
        moves += 1
    return found


def shortest_walk(layout: Layout, state: State, to: int) -> list[str]:
    """Actions of a shortest walk of the player to index `to` without a push; `to` must be reachable."""
    boxes, player = state
    free = layout.floor & ~boxes
    stride = layout.stride
    waves = [1 << player]
    seen = waves[0]
    while not seen >> to & 1:
        last = waves[-1]
        waves.append((last << 1 | last >> 1 | last << stride | last >> stride) & free & ~seen)
        if not waves[-1]:
            raise ValueError(f"cell {layout.cell(to)} cannot be reached by the player at {layout.cell(player)}")
        seen |= waves[-1]
    actions: list[str] = []
    for wave in waves[-2::-1]:
        direction = next(d for d in DIRECTIONS if wave >> (to - layout.deltas[d]) & 1)
        actions.append(direction)
        to -= layout.deltas[direction]
    return actions[::-1]
