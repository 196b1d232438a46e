"""Level texts: what is read, what is printed, and what is refused with which words."""

from __future__ import annotations

import pytest

from geo_sokoban_pipeline.envs.sokoban import Board

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
    assert len(board.walls) == 20


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


def test_printed_rows_follow_the_seed_format():
    board = Board.from_text("#######\n# @$. #\n#######").move("right").board
    assert board.to_symbols().split("\n")[1] == " # \t _ \t P \t √ \t _ \t # ".replace(" _ \t P", " _ \t _ \t P")
    assert board.to_xsb() == "#######\n#  @* #\n#######"


@pytest.mark.parametrize("text", ["@", "+$.", "#+#", "P", "S\nX", "@$.\n   "])
def test_open_grids_and_single_cells_are_levels_too(text):
    board = Board.from_text(text)
    assert Board.from_text(board.to_xsb()) == board
    assert Board.from_text(board.to_symbols()) == board


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
