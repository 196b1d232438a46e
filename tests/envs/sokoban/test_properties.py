"""Properties of boards and solver over generated levels: conservation, round trips, symmetry."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from geo_sokoban_pipeline.envs.sokoban import DIRECTIONS, Board, solve
from geo_sokoban_pipeline.envs.sokoban.board import SYMMETRIES


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
    assert Board.from_text(board.to_xsb()) == board
    assert Board.from_text(board.to_symbols()) == board
    assert Board.from_env_config(board.to_env_config()) == board
    assert Board.from_codes(board.height, board.width, board.codes()) == board


@given(boards(), moves)
def test_moves_keep_walls_targets_and_the_number_of_boxes(board, directions):
    here = board
    for direction in directions:
        before, (here, moved, pushed, _) = here, here.move(direction)
        assert moved == (here.player != before.player) and pushed == (here.boxes != before.boxes)
        assert (here.walls, here.targets, len(here.boxes)) == (board.walls, board.targets, len(board.boxes))
        assert here.player not in here.boxes and not set(here.boxes) & set(here.walls)
        assert here.layout_hash == board.layout_hash


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


@settings(max_examples=60)
@given(boards(max_side=5, max_boxes=2), st.sampled_from(SYMMETRIES))
def test_solution_length_is_equal_for_all_symmetries(board, symmetry):
    solution, mirrored = solve(board), solve(board.transform(symmetry))
    assert (solution is None) == (mirrored is None)
    assert solution is None or mirrored is None or len(solution) == len(mirrored)


@given(boards(max_boxes=4))
def test_the_best_matching_is_never_longer_than_the_greedy_one(board):
    if len(board.boxes) <= len(board.targets):
        assert board.box_target_distance("assignment") <= board.box_target_distance("greedy")


def can_be_solved(board: Board) -> bool:
    """Plain breadth-first search over cells: it knows nothing of dead cells, frozen boxes or masks."""
    walls, targets = set(board.walls), set(board.targets)
    start = (board.player, frozenset(board.boxes))
    seen, frontier = {start}, [start]
    while frontier:
        (row, column), boxes = frontier.pop()
        if boxes <= targets:
            return True
        for down, right in ((-1, 0), (1, 0), (0, -1), (0, 1)):
            here, beyond = (row + down, column + right), (row + 2 * down, column + 2 * right)
            moved = boxes - {here} | {beyond} if here in boxes else boxes
            free = inside(board, here) and here not in walls
            if here in boxes:
                free = free and inside(board, beyond) and beyond not in walls and beyond not in boxes
            if free and (here, moved) not in seen:
                seen.add((here, moved))
                frontier.append((here, moved))
    return False


def inside(board: Board, cell: tuple[int, int]) -> bool:
    return 0 <= cell[0] < board.height and 0 <= cell[1] < board.width


@given(boards(max_side=5, max_boxes=3))
@settings(max_examples=300, deadline=None)
def test_no_lost_board_has_a_solution(board):
    """Against a search of its own: the solver leaves out what `is_lost` calls lost."""
    if board.is_lost:
        assert not can_be_solved(board)


@given(boards(max_side=4, max_boxes=2))
@settings(max_examples=200, deadline=None)
def test_the_solver_finds_a_solution_where_there_is_one(board):
    assert (solve(board) is not None) == can_be_solved(board)
