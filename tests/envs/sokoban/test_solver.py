"""Solver: exact lengths against brute force, proofs of unsolvability, the limit, and real Boxoban levels."""

from __future__ import annotations

import json
import random

import pytest

from geo_sokoban_pipeline.envs.sokoban import (
    DIRECTIONS,
    Board,
    SearchLimitError,
    enumerate_layouts,
    generate_levels,
    solve,
)
from geo_sokoban_pipeline.envs.sokoban.board import bits
from geo_sokoban_pipeline.envs.sokoban.solver import shortest_walk

MOVES = {"U": "up", "D": "down", "L": "left", "R": "right"}


def play(board: Board, actions: list[str]) -> Board:
    for action in actions:
        move = board.move(action)
        assert move.moved, f"{action} is blocked on\n{board.to_xsb()}"
        board = move.board
    return board


def brute_force_length(board: Board) -> int | None:
    """Fewest moves by breadth-first search over single moves, without any pruning."""
    layer, seen, depth = [board], {board}, 0
    while layer:
        if any(here.is_solved for here in layer):
            return depth
        following = {here.move(direction).board for here in layer for direction in DIRECTIONS} - seen
        seen |= following
        layer, depth = list(following), depth + 1
    return None


@pytest.mark.parametrize(
    ("text", "solution"),
    [
        ("######\n#@   #\n# $ .#\n#    #\n######", ["down", "right", "right"]),
        ("#@*#", []),
        ("#+$ #", None),
        ("#####\n#@$.#\n#####", ["right"]),
        ("#.$@ #", ["left"]),
        ("######\n#@$ .#\n######", ["right", "right"]),
        ("#####\n#@  #\n#  $#\n#. ##\n#####", None),  # a box in a corner
        ("######\n#@$$.#\n######", None),
        ("#####\n#@$ #\n#####", None),  # no target at all
        ("######\n#@$* #\n######", None),  # more boxes than targets
        ("#######\n#@$..$#\n#######", None),  # the second box cannot be reached from its far side
        ("@ \n  ", []),
    ],
)
def test_solutions(text, solution):
    assert solve(Board.from_text(text)) == solution


LAYOUTS = [*enumerate_layouts(6, 6, (1, 3)), *enumerate_layouts(5, 6, (1, 2))]


def random_board(generator: random.Random) -> Board:
    layout = generator.choice(LAYOUTS)
    cells = list(bits(layout.floor))
    boxes = generator.randint(1, 3)
    targets = sum(1 << cell for cell in generator.sample(cells, generator.randint(boxes, 4)))
    *crates, player = generator.sample(cells, boxes + 1)
    return Board(layout, targets, sum(1 << crate for crate in crates), player)


def test_lengths_equal_brute_force_on_random_boards():
    generator = random.Random(5)
    lengths = []
    drawn = [random_board(generator) for _ in range(120)]
    long = [level.board for boxes in (1, 2) for level in generate_levels(15, 5, 6, 6, boxes, min_solution=10)]
    for board in drawn + long:
        solution, length = solve(board), brute_force_length(board)
        assert (None if solution is None else len(solution)) == length, board.to_xsb()
        if solution is not None:
            assert play(board, solution).is_solved
        lengths.append(length)
    assert None in lengths and max(length or 0 for length in lengths) > 15


def test_the_limit_is_an_error_that_names_it():
    board = Board.from_text(
        "##########\n#        #\n# $ $ $  #\n#  $ $   #\n#        #\n# .....@ #\n#        #\n##########"
    )
    with pytest.raises(SearchLimitError, match="max_states=20: no solution within 20 positions"):
        solve(board, max_states=20)
    with pytest.raises(ValueError, match="max_states=0"):
        solve(board, max_states=0)


def test_a_walk_through_a_wall_is_refused():
    layout = Board.from_text("#@# #").layout
    with pytest.raises(ValueError, match=r"cell \(0, 3\) cannot be reached"):
        shortest_walk(layout, (0, layout.index((0, 1))), layout.index((0, 3)))


@pytest.fixture(scope="module")
def boxoban(shared_data):
    return [json.loads(line) for line in (shared_data / "boxoban_sample.jsonl").read_text().splitlines()]


def test_stored_boxoban_solutions_solve_their_levels(boxoban):
    assert len(boxoban) == 100
    for level in boxoban:
        board = Board.from_text(level["xsb"])
        assert (board.height, board.width, len(board.boxes), len(board.targets)) == (10, 10, 4, 4)
        assert play(board, [MOVES[letter] for letter in level["solution"]]).is_solved


def test_boxoban_levels_are_solved_in_no_more_moves_than_stored(boxoban):
    solved = beaten = 0
    for level in boxoban[::4]:
        board = Board.from_text(level["xsb"])
        try:
            solution = solve(board, max_states=3_000)
        except SearchLimitError:
            continue
        assert solution is not None and play(board, solution).is_solved
        assert len(solution) <= level["moves"]
        solved += 1
        beaten += len(solution) < level["moves"]
    assert solved >= 12 and beaten >= 8
