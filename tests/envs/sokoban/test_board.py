"""Boards: their texts, the dynamics move by move and against oracle traces, distances, and slime's env_config."""

from __future__ import annotations

import json

import numpy as np
import pytest

from geo_sokoban_pipeline.envs.sokoban import Board
from geo_sokoban_pipeline.envs.sokoban.board import assignment_distance, greedy_distance

LEVEL = "######\n#@   #\n# $ .#\n#    #\n#    #\n######"
PUSHES = ("up", "down", "left", "right")


@pytest.mark.parametrize(
    ("before", "direction", "after", "moved", "pushed", "reward"),
    [
        ("#@ #", "right", "# @#", True, False, 0.01),
        ("#@ #", "left", "#@ #", False, False, -0.05),
        ("#@ #", "up", "#@ #", False, False, -0.05),  # off the grid is blocked like a wall
        ("@ ", "left", "@ ", False, False, -0.05),
        ("#@$ #", "right", "# @$#", True, True, 0.01),
        ("#@$#", "right", "#@$#", False, False, -0.05),
        ("@$", "right", "@$", False, False, -0.05),
        ("#@$$ #", "right", "#@$$ #", False, False, -0.05),
        ("#@$.#", "right", "# @*#", True, True, 1.01),
        ("#@* #", "right", "# +$#", True, True, -0.49),
        ("#@*.#", "right", "# +*#", True, True, 0.51),  # from target to target: both count
        ("#+ #", "right", "#.@#", True, False, 0.01),
    ],
)
def test_a_move_gives_board_flags_and_reward(before, direction, after, moved, pushed, reward):
    board = Board.from_text(before)
    move = board.move(direction)
    assert move.board.to_xsb() == after
    assert (move.moved, move.pushed) == (moved, pushed)
    assert move.reward == pytest.approx(reward, abs=1e-12)
    assert board.to_xsb() == before
    assert (direction in board.legal_actions()) is moved


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda board: board.move("jump"), "direction='jump'.*up, down, left, right"),
        (lambda board: board.box_target_distance("manhattan"), "distance='manhattan'"),
    ],
)
def test_unknown_words_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(Board.from_text(LEVEL))


@pytest.mark.parametrize(
    ("text", "solved"),
    [("#@*#", True), ("#@$.#", False), ("#@*$#", False), ("#@*.#", True), ("#@ #", True), ("#@.#", True)],
)
def test_solved_means_every_box_on_a_target(text, solved):
    assert Board.from_text(text).is_solved is solved


@pytest.mark.parametrize(
    ("boxes", "targets", "greedy", "assignment"),
    [
        ([], [(0, 0)], 0, 0),
        ([(0, 0)], [], 0, 0),
        ([(2, 2)], [(2, 4)], 2, 2),
        # The first box takes the second one's target: the greedy rule is longer than the best matching.
        ([(0, 3), (0, 5)], [(0, 0), (0, 4)], 6, 4),
        ([(0, 1), (0, 5)], [(0, 0)], 6, 1),  # the last target is never taken away
        ([(0, 0)], [(0, 3), (0, 1)], 1, 1),
        ([(0, 1)], [(0, 0), (0, 2)], 1, 1),
    ],
)
def test_distances(boxes, targets, greedy, assignment):
    assert greedy_distance(boxes, targets) == greedy
    assert assignment_distance(boxes, targets) == assignment


def play_gym_action(board: Board, action: int):
    """gym-sokoban's nine actions on a board of four: 0 rests, 1–4 push, 5–8 move only where no push is needed."""
    if action == 0:
        return board, False, False
    move = board.move(PUSHES[(action - 1) % 4])
    if action > 4 and move.pushed:
        return board, False, False
    return move.board, move.moved, move.pushed


def test_dynamics_agree_with_every_well_formed_trace(shared_data):
    played = 0
    for line in (shared_data / "gym_sokoban_traces.jsonl").read_text().splitlines():
        trace = json.loads(line)
        board = Board.from_text(trace["initial"])
        assert board.to_xsb() == trace["initial"]
        if not trace["well_formed"]:  # it can be read still
            continue
        for step, action in enumerate(trace["actions"]):
            board, moved, pushed = play_gym_action(board, action)
            where = f"{trace['source']}, step {step}"
            assert board == Board.from_text(trace["grids"][step]), where
            assert (moved, pushed) == (trace["moved_player"][step], trace["moved_box"][step]), where
            assert board.boxes_on_target == trace["boxes_on_target"][step], where
        assert board == Board.from_text(trace["final"])
        assert board.is_solved is trace["solved"]
        played += 1
    assert played > 100


def test_env_config_is_the_seeds():
    config = Board.from_text("######\n#+$  #\n#  * #\n#  $ #\n######").to_env_config(max_steps=7)
    assert config == {
        "grid_size": [5, 6],
        "num_boxes": 3,
        "render_mode": "vision",
        "max_steps": 7,
        "wall_fraction": 0.0,
        "initial_base_grid": [[0] * 6, [0, 2, 1, 1, 1, 0], [0, 1, 1, 2, 1, 0], [0, 1, 1, 1, 1, 0], [0] * 6],
        "initial_boxes": [[1, 2], [2, 3], [3, 3]],
        "initial_player": [1, 1],
    }


def test_env_config_comes_back_from_json_and_from_nested_arrays():
    board = Board.from_text(LEVEL)
    config = json.loads(json.dumps(board.to_env_config()))
    arrays = config | {
        # what pandas makes of a list of lists
        "initial_base_grid": np.array([np.array(row) for row in config["initial_base_grid"]] + [None], dtype=object)[
            :-1
        ],
        "initial_boxes": np.array([np.array([2, 2])]),
        "initial_player": np.array([1, 1]),
    }
    assert Board.from_env_config(config) == Board.from_env_config(arrays) == board


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"initial_player": None}, "initial_player missing"),
        ({"initial_base_grid": []}, "initial_base_grid is empty"),
        ({"initial_base_grid": [[1, 1], [1]]}, r"rows of \[1, 2\] cells"),
        ({"initial_base_grid": [[1, 5], [1, 1]]}, r"holds \[5\]"),
        ({"initial_boxes": [[0, 0]]}, r"initial_boxes=\[0, 0\] stands in a wall"),
        ({"initial_boxes": [[9, 0]]}, r"initial_boxes=\[9, 0\] lies outside the 6×6 grid"),
        ({"initial_boxes": [[2, 2, 2]]}, r"a cell is \[row, column\]"),
        ({"initial_boxes": [[1, 1]]}, "share a cell"),
        ({"initial_boxes": [[2, 2], [2, 2]], "num_boxes": 2}, "share a cell"),
        ({"grid_size": [5, 6]}, r"grid_size=\[5, 6\], but"),
        ({"num_boxes": 2}, "num_boxes=2, but"),
    ],
)
def test_bad_env_configs_name_key_and_value(change, message):
    with pytest.raises(ValueError, match=message):
        Board.from_env_config(Board.from_text(LEVEL).to_env_config() | change)


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("######\n#$ @.#\n#    #\n######", True),  # in a corner
        ("######\n#    #\n#$ @.#\n#    #\n######", True),  # along a wall without a target
        ("######\n#.   #\n#$ @ #\n#    #\n######", False),  # along a wall with one
        ("######\n#.   #\n# $@ #\n#    #\n######", False),
        ("######\n#*@  #\n######", False),  # solved
        ("#######\n# $$  #\n# $$ @#\n#.. ..#\n#     #\n#######", True),  # four that hold each other
        ("#######\n#. $ .#\n#  $ @#\n#     #\n#######", False),
    ],
)
def test_lost_boards(text, lost):
    assert Board.from_text(text).is_lost is lost


# Texts of levels: what is read, and what is refused with which words.

XSB = "######\n#@   #\n# $ .#\n#  * #\n#    #\n######"


def rows(text: str) -> str:
    return text.replace("/", "\n")


@pytest.mark.parametrize(
    "text",
    [
        XSB,
        f"\n\n  \n{XSB}\n\n",
        XSB.replace("\n", "\r\n"),
        XSB.replace(" ", "-"),
        XSB.replace(" ", "_"),
        rows("######/#P___#/#_X_O#/#__√_#/#____#/######"),
        rows("# # # # # #/# P _ _ _ #/# _ X _ O #/# _ _ √ _ #/# _ _ _ _ #/# # # # # #"),
        rows(
            " # \t # \t # \t # \t # \t # \t/ # \t P \t _ \t _ \t _ \t # \t/ # \t _ \t X \t _ \t O \t # \t/"
            " # \t _ \t _ \t √ \t _ \t # \t/ # \t _ \t _ \t _ \t _ \t # \t/ # \t # \t # \t # \t # \t # \t"
        ),
    ],
)
def test_all_spellings_of_a_level_are_one_board(text):
    board = Board.from_text(text)
    assert board == Board.from_text(XSB)
    assert (board.height, board.width, board.player) == (6, 6, (1, 1))
    assert board.boxes == ((2, 2), (3, 3)) and board.targets == ((2, 4), (3, 3))
    assert board.layout.codes.count(0) == 20


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty level text"),
        (" \n\n", "empty level text"),
        ("###\n# #\n###", "no player"),
        ("####\n#@@#\n####", "2 players"),
        ("####\n#@+#\n####", "2 players"),
        ("#####\n#P_S#\n#####", "2 players"),
        ("####\n#P_#\n###", "row 2 has 3 cells, row 0 has 4"),
        ("####\n#@x#\n####", "unknown symbol 'x' in row 1, column 2"),
        ("####\n#P?#\n####", r"unknown symbol '\?'"),
        ("####\n#@X#\n####", "mixes XSB '@' with the data set's symbols 'X'"),
        ("######\n#@ $.#\n\n######", "row 2 of the level is blank"),
        ("####\n#@\t#\n####", "mixes XSB"),
    ],
)
def test_bad_levels_are_refused_with_the_reason(text, message):
    with pytest.raises(ValueError, match=message):
        Board.from_text(text)


@pytest.mark.parametrize(
    ("text", "padded"),
    [
        ("#####/#@$.#/#####", "#####/#@$.#/#####"),
        ("  ####/###  #/#@$ .#/#####", "######/###  #/#@$ .#/######"),
        ("  ####  /###  #  /#@$ .#/#####   ", "######/###  #/#@$ .#/######"),
        ("   #####/   #@$.#/   #####", "#####/#@$.#/#####"),
        ("#####/#@$.#/#####/## ##", "#####/#@$.#/#####/#####"),  # a gap at the edge that leads nowhere
        ("#######/#   #/#@$.# #/#   #/#######", "#######/#   ###/#@$.###/#   ###/#######"),
        ("#######/#@$. #/### ###/# # # #/#######", "#######/#@$. ##/### ###/# # # #/#######"),  # closed rooms stay
        ("#####/#@$./#####", "#####/#@$.#/#####"),
        ("--####/###  #/#@$ .#/######", "--####/###  #/#@$ .#/######"),  # written floor is floor
    ],
)
def test_what_is_outside_of_the_walls_is_wall(text, padded):
    board = Board.from_text(rows(text))
    assert board == Board.from_text(rows(padded))
    assert board.to_xsb() == rows(padded)
