"""Solver and properties of boards: lengths against brute force, unsolvable boards, the limit, Boxoban, symmetry."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_sokoban_pipeline.envs.sokoban import (
    DIRECTIONS,
    Board,
    SearchLimitError,
    enumerate_layouts,
    generate_levels,
    solve,
)
from geo_sokoban_pipeline.envs.sokoban.board import SYMMETRIES, bits
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


def test_boxoban_levels_are_solved_in_no_more_moves_than_stored(shared_data):
    boxoban = [json.loads(line) for line in (shared_data / "boxoban_sample.jsonl").read_text().splitlines()]
    assert len(boxoban) == 100
    solved = beaten = 0
    for number, level in enumerate(boxoban):
        board = Board.from_text(level["xsb"])
        assert play(board, [MOVES[letter] for letter in level["solution"]]).is_solved
        try:
            solution = solve(board, max_states=3_000 if number % 4 == 0 else 1)
        except SearchLimitError:
            continue
        assert solution is not None and play(board, solution).is_solved
        assert len(solution) <= level["moves"]
        solved += 1
        beaten += len(solution) < level["moves"]
    assert solved >= 12 and beaten >= 8


# Properties of any board: conservation, round trips, symmetry.


@st.composite
def boards(draw, max_side: int = 6, max_boxes: int = 3) -> Board:
    """Any board, with open borders and isolated cells too."""
    height, width = draw(st.integers(1, max_side)), draw(st.integers(2, max_side))
    codes = draw(st.lists(st.sampled_from([0, 1, 1, 1, 2]), min_size=height * width, max_size=height * width))
    order = draw(st.permutations(range(height * width)))
    player, *boxes = order[: 1 + draw(st.integers(0, min(max_boxes, height * width - 1)))]
    codes[player] = 6 if codes[player] == 2 else 5
    for box in boxes:
        codes[box] = 3 if codes[box] == 2 else 4
    return Board.from_codes(height, width, bytes(codes))


def transform_direction(direction: str, symmetry: int) -> str:
    """Direction that a move takes on the transformed grid: mirrored first, then turned clockwise."""
    if symmetry >= 4:
        direction = {"left": "right", "right": "left"}.get(direction, direction)
    clockwise = ("up", "right", "down", "left")
    return clockwise[(clockwise.index(direction) + symmetry) % 4]


moves = st.lists(st.sampled_from(DIRECTIONS), max_size=12)


@given(boards())
def test_texts_and_config_come_back_as_the_same_board(board):
    assert Board.from_text(board.to_xsb()) == Board.from_text(board.to_symbols()) == board
    assert Board.from_env_config(board.to_env_config()) == board
    assert Board.from_codes(board.height, board.width, board.codes()) == board


@given(boards(), moves)
def test_moves_keep_walls_targets_and_the_number_of_boxes(board, directions):
    here = board
    for direction in directions:
        before, (here, moved, pushed, _) = here, here.move(direction)
        assert moved == (here.player != before.player) and pushed == (here.boxes != before.boxes)
        assert (here.layout, here.targets, len(here.boxes)) == (board.layout, board.targets, len(board.boxes))
        assert here.player not in here.boxes and not here.box_mask & here.layout.walls


@given(boards(), st.sampled_from(SYMMETRIES), moves)
def test_play_on_a_mirror_image_is_the_mirror_image_of_play(board, symmetry, directions):
    mirrored = board.transform(symmetry)
    for direction in directions:
        here, there = board.move(direction), mirrored.move(transform_direction(direction, symmetry))
        assert here.board.transform(symmetry) == there.board and here[1:] == there[1:]
        board, mirrored = here.board, there.board


@given(boards(), st.sampled_from(SYMMETRIES))
def test_hashes_are_equal_for_all_symmetries(board, symmetry):
    mirrored = board.transform(symmetry)
    assert mirrored.canonical_hash == board.canonical_hash
    assert mirrored.layout_hash == board.layout_hash
    assert board.layout.transform(symmetry) == mirrored.layout
    assert mirrored.box_target_distance("assignment") == board.box_target_distance("assignment")


@given(boards(max_side=4), boards(max_side=4))
def test_equal_hashes_mean_equal_up_to_symmetry(one, other):
    images = {one.transform(symmetry) for symmetry in SYMMETRIES}
    assert (one.canonical_hash == other.canonical_hash) == (other in images)
    walls = {image.layout for image in images}
    assert (one.layout_hash == other.layout_hash) == (other.layout in walls)


@given(boards(max_boxes=4))
def test_the_best_matching_is_never_longer_than_the_greedy_one(board):
    if len(board.boxes) <= len(board.targets):
        assert board.box_target_distance("assignment") <= board.box_target_distance("greedy")


@given(boards(max_side=5, max_boxes=3))
@settings(max_examples=150, deadline=None)
def test_no_lost_board_has_a_solution(board):
    """Against a search by single moves: the solver leaves out what `is_lost` calls lost."""
    if board.is_lost:
        assert brute_force_length(board) is None
