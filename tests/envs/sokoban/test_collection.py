"""Collections of levels as they are published: what is a level in them, and what is said about it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_sokoban_pipeline.envs.sokoban import Board
from geo_sokoban_pipeline.envs.sokoban.collection import Entry, classic_rows, read_collection
from geo_sokoban_pipeline.envs.sokoban.config import SokobanDataOptions
from geo_sokoban_pipeline.envs.sokoban.levels import generate_levels
from geo_sokoban_pipeline.envs.sokoban.sources import read_source

FOLDER = Path(__file__).parent / "collections"
ONE, TWO, THREE = "#####\n#@$.#\n#####", "#####\n#.$@#\n#   #\n#####", "  ####\n###  #\n#@$. #\n######"


def boards(entries: list[Entry]) -> list[Board]:
    return [Board.from_text(classic_rows(entry.rows)) for entry in entries]


def reading_of(path, **changes):
    parameters = {"source": "file", "file": {"path": str(path)}, **changes}
    return read_source(
        SokobanDataOptions.model_validate(parameters | {"counts": dict.fromkeys(("train", "validation", "eval"))})
    )


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("", []),
        ("No level here.\n# Nor here\n; nor here\n-----\n", []),
        (f"{ONE}\n\n{TWO}\n", [("level_0", ONE), ("level_1", TWO)]),
        (f"; Our levels\n\n{ONE}\n\n{TWO}\n", [("level_0", ONE), ("level_1", TWO)]),
        (f"; first\n{ONE}\n; second\n{TWO}", [("first", ONE), ("second", TWO)]),
        (f"; 17\n{ONE}\n\n; 3\n\n{TWO}\n", [("17", ONE), ("3", TWO)]),
        (f"\r\n{ONE}\n\n\n".replace("\n", "\r\n"), [("level_0", ONE)]),
        (f"\ufeff{ONE}\n; 1\n\n{TWO}\n; 2\n", [("1", ONE), ("2", TWO)]),
        (f"; Ours\n; by us\n\n; 1 'Duo'\n\n{ONE}\n\n; 2. Trio\n\n{TWO}", [("Duo", ONE), ("Trio", TWO)]),
        (f"Title: Same\n{ONE}\n\nTitle: Same\n{TWO}", [("Same", ONE), ("Same_2", TWO)]),
        (f"{ONE}\nTitle: A\nAuthor: B\n\n{TWO}\nTitle: C\n", [("A", ONE), ("C", TWO)]),
        (f"Title: All\n\n{ONE}\nTitle: A\n\n{TWO}\nTitle: C\n", [("A", ONE), ("C", TWO)]),
        (f"Head\n\nOne by one\n\n{ONE}\n\nTwo by two\n{TWO}\n", [("One by one", ONE), ("Two by two", TWO)]),
        (f"Level 1\n{ONE}\nLevel 2\n{TWO}\n", [("1", ONE), ("2", TWO)]),
        (f"# Level 1\n{ONE}\n-----\n#2\n{TWO}\n*****\n", [("1", ONE), ("2", TWO)]),
        (f"{ONE}\nuuRRddLLuurr\n\n{TWO}\nllddRR\n", [("level_0", ONE), ("level_1", TWO)]),
        (f"; 1\n{ONE}\n; 2\n#@x$.#\n######\n; 3\n{TWO}", [("1", ONE), ("2", "#@x$.#\n######"), ("3", TWO)]),
        (f"; 1\n{ONE}\n\nComment:\n{TWO}\nComment-End:\n; 2\n{THREE}", [("1", ONE), ("2", THREE)]),
        (f"; 1\n{ONE}\nComment: open\n; 2\n{THREE}", [("1", ONE), ("2", THREE)]),
        (f"{ONE}\n-----\n{TWO}\n***\n{THREE}\n---", [("level_0", ONE), ("level_1", TWO), ("level_2", THREE)]),
        (f"; 1\n{ONE}\n-----\n; 2\n{TWO}", [("1", ONE), ("2", TWO)]),
        *(
            (f"{ONE}\n{rule}\n{TWO}", [("level_0", ONE), ("level_1", TWO)])
            for rule in ("\xa0-----", "-\xa0-\xa0-", "\u2003***")
        ),
        ("5#|#@$.#|5#|\n-----\n5#|#.$@#|5#", [("level_0", "5#|#@$.#|5#|"), ("level_1", "5#|#.$@#|5#")]),
        ("5#|#@$.#|5#|\n5#|#.pb#|5#|", [("level_0", "5#|#@$.#|5#|"), ("level_1", "5#|#.pb#|5#|")]),
        *(
            (f"{ONE}\n{rule}\n{TWO}", [("level_0", ONE), ("level_1", TWO)])
            for rule in ("_____", "+++++", "— — —", "|===|", "\ufeff")
        ),
        *(
            (f"{one}\n{ONE}\n\n{two}\n\n{TWO}", [(one.strip(";/ "), ONE), (two.strip(";/ "), TWO)])
            for one, two in (("No. #1", "No. #2"), ("A #1", "A #2"), ("// No #1", "; No #2"))
        ),
        (f"; #1\n{ONE}\n; # 2\n{TWO}", [("1", ONE), ("2", TWO)]),
        (f"# A\n\n{ONE}\n\n# Bob\n\n{TWO}", [("A", ONE), ("Bob", TWO)]),
        ("_#2_\n#####\n#@$.#\n#####", [("level_0", "_#2_\n#####\n#@$.#\n#####")]),  # one wall in a row of floor
        ("#####\n-----\n#@$.#\n#####", [("level_0", "#####\n-----\n#@$.#\n#####")]),  # rows of floor
        ("## ##\n-----\n#####\n#@$.#\n#####", [("level_0", "## ##\n-----\n#####\n#@$.#\n#####")]),  # an ornament
        (f"; Small\n; (c) A. Tester\n\n; 1\n{ONE}\n; 2\n{TWO}", [("1", ONE), ("2", TWO)]),
        (f"; Small\n; Copyright 2001 A. Tester\n{ONE}\n; Second\n{TWO}", [("level_0", ONE), ("Second", TWO)]),
        (f"; © 2001 A. Tester\n; Small\n{ONE}\n; Second\n{TWO}", [("level_0", ONE), ("Second", TWO)]),
        (f"; (c) A. Tester\n; Small\n\n{ONE}\n\n; Second\n\n{TWO}", [("level_0", ONE), ("Second", TWO)]),
        (f"; (c) A. Tester\n; Small\n; First\n{ONE}\n; Second\n{TWO}", [("First", ONE), ("Second", TWO)]),
        (f"Copyright: A. Tester\n; Small\n{ONE}\n; Second\n{TWO}", [("level_0", ONE), ("Second", TWO)]),
        (f"Title: Small\nCopyright: A. Tester\n\n{ONE}\nTitle: Second\n{TWO}", [("level_0", ONE), ("Second", TWO)]),
        (f"; (c) A. Tester\n;\n; First\n{ONE}\n; Second\n{TWO}", [("First", ONE), ("Second", TWO)]),
        (f"; (c) A. Tester\n; 1\n{ONE}\n; 2\n{TWO}", [("1", ONE), ("2", TWO)]),
        (f"; Copyright A. Tester\n; Single\n{ONE}\n", [("Single", ONE)]),
        (f"Small\n© A. Tester\nFirst\n{ONE}\n\nSecond\n{TWO}", [("First", ONE), ("Second", TWO)]),
        (f"; Small\n\n{ONE}\n; Second\n{TWO}\n; Third\n{THREE}", [("level_0", ONE), ("Second", TWO), ("Third", THREE)]),
        (f"{ONE}\n\n{TWO}\n\n; Small\n; (c) A. Tester", [("level_0", ONE), ("level_1", TWO)]),
        (f"{ONE}\n\n{TWO}\n\nThe end", [("level_0", ONE), ("level_1", TWO)]),
        (f"{ONE}\n\n{TWO}\nTitle: Last", [("level_0", ONE), ("Last", TWO)]),
        (f"; First\n; a@b.org\n{ONE}\n; Second\n; a@b.org\n{TWO}", [("First", ONE), ("Second", TWO)]),
    ],
)
def test_levels_and_their_names(text, levels):
    assert [(entry.row_id, entry.rows) for entry in read_collection(text)] == levels


def test_what_is_said_about_a_level():
    text = (
        f"; Ten levels\n; Author: Head\n\n{ONE}\nTitle: First\nComment: easy\n\n{TWO}\nTitle: Second\n"
        f"Author: Guest\nComment:\nfrom the left\n####\n\nor not\nComment-End:\nDate: 2020\n"
    )
    first, second = read_collection(text)
    assert first.columns == {"title": "First", "author": "Head", "comment": "easy"}
    assert second.columns == {"title": "Second", "author": "Guest", "comment": "from the left\n####\nor not"}


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("5#|#@$.#|5#", ONE),
        ("5#\n#@$.#\n5#", ONE),
        ("5#\r\n#@$.#\r\n5#", ONE),
        (ONE.replace("\n", "\r"), ONE),
        ("2(2#)#|#@$.#|5#", ONE),
        ("#####|#pbo#|#####", ONE),
        ("#####\n#P-b#\n#####", "#####\n#+ $#\n#####"),
        ("#####\n#B_p#\n#####", "#####\n#* @#\n#####"),
        ("#####\n#P√_#\n#####", "#####\n#P√_#\n#####"),
        ("# \t P \t X \t O \t #", "# \t P \t X \t O \t #"),
        ("@-$.", "@-$."),
        ("5#|\n#@$.#|\n5#|", ONE),
        ("7#\n|#@-$-.#|\n7#", "#######\n#@ $ .#\n#######"),
        ("  5#|#@$.#|5#", ONE),
        ("\t#####\n\t#pbo#\n\t#####\t", "        #####\n        #@$.#\n        #####"),
        ("#\t#\t#\t#\t#\n#\t@\t$\t.\t#\t\n#\t#\t#\t#\t#", ONE),
        ("\t#\t#\t#\n#\t\t@\t#", " ###\n# @#"),
        ("#########\n#\t#\n#@$.    #", "#########\n#       #\n#@$.    #"),
        ("#####\n#@$.#\xa0\n\u2003####", "#####\n#@$.# \n ####"),
    ],
)
def test_other_spellings(text, rows):
    assert classic_rows(text) == rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5#|#@$.#|5", "run length '5'"),
        ("5#|2|#@$.#|5#", r"run length '2\|'"),
        ("5#3\n#@$.#\n5#", r"run length '3\\n'"),
        (" 9|#####\n10|#@$.#\n11|#####", r"row of the level begins with the number '9\|'"),
        ("1 #####\n2 #@$.#\n3 #####", "row of the level begins with the number '1'"),
        ("0#|#@$.#", "run length '0#'"),
        ("2(#@$.#", "brackets"),
        ("#@$.#)", "brackets"),
        ("9999999#@$.", "run length '9999999#'"),
        ("999(999(999(#)))@$.", "more than 100,000 cells"),
    ],
)
def test_faulty_run_lengths(text, message):
    with pytest.raises(ValueError, match=message):
        classic_rows(text)


def test_own_collection():
    """Its .sok file has other floor signs, letters, run lengths, a level in a comment, and an old encoding."""
    plain, sok = reading_of(FOLDER / "own.txt"), reading_of(FOLDER / "own.sok")
    assert (plain.rows_read, plain.rejected) == (sok.rows_read, sok.rejected) == (10, [])
    levels, titled = ([level for level, _ in reading.levels] for reading in (plain, sok))
    assert [level.row_id for level in levels] == ["1", "Corner shop", *map(str, range(3, 11))]
    assert {level.columns["author"] for level in levels} == {"A. Tester"}
    assert [level.solution_length for level in levels] == [13, 20, 16, 9, 7, 10, 12, 14, 3, 14]
    assert [level.board for level in titled] == [level.board for level in levels]
    assert [level.row_id for level in titled] == [
        *("First steps", "Corner shop", "Three rows", "The hook", "Up and left", "Two by two", "Well", "Crossing"),
        *("Café", "Café_2"),
    ]
    assert [level.columns["author"] for level in titled] == ["A. Tester", "Somebody Else", *["A. Tester"] * 8]


def test_a_folder_of_collections(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "000.txt").write_text(f"; 0\n{ONE}\n; 1\n#####\n#@?.#\n#####\n")
    (tmp_path / "a.sok").write_text(f"{TWO}\nTitle: T\n")
    (tmp_path / "a.xsb").write_text(THREE)
    (tmp_path / "README.txt").write_text("No levels in here.")
    (tmp_path / "notes.md").write_text(ONE)
    reading = reading_of(tmp_path)
    assert [(level.row_id, level.source) for level, _ in reading.levels] == [
        ("a.sok/T", "a.sok"),
        ("a.xsb/level_0", "a.xsb"),
        ("b/000/0", "b/000.txt"),
    ]
    assert [(row.row_id, row.source) for row in reading.rejected] == [("b/000/1", "b/000.txt")]
    assert [level.row_id for level, _ in reading_of(f"{tmp_path}@[1:2]").levels] == ["a.xsb/level_0"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no \.sok, \.txt, \.xsb in this folder"):
        reading_of(tmp_path / "empty")


def in_runs(row: str) -> str:
    return re.sub(r"(.)\1+", lambda run: f"{len(run[0])}{run[1]}", row)


NOTATIONS = {
    "floor of dashes": lambda rows: [row.replace(" ", "-") for row in rows],
    "floor of underlines": lambda rows: [row.replace(" ", "_") for row in rows],
    "no-break blanks": lambda rows: [row.replace(" ", "\xa0") for row in rows],
    "letters": lambda rows: [row.translate(str.maketrans("@+$*.", "pPbBo")) for row in rows],
    "leading tabs": lambda rows: ["\t" + row for row in rows],
    "trailing tabs": lambda rows: [row + "\t" for row in rows],
    "inner tabs": lambda rows: [re.sub(r"(?<=^.{5})   ", "\t", row) for row in rows],
    "a tab a cell": lambda rows: ["\t".join(row) for row in rows],
    "runs in lines": lambda rows: [in_runs(row.replace(" ", "-")) for row in rows],
    "runs in one line": lambda rows: ["|".join(in_runs(row.replace(" ", "_")) for row in rows)],
    "runs with both row signs": lambda rows: [in_runs(row.replace(" ", "-")) + "|" for row in rows],
    "runs of letters": lambda rows: [in_runs(row.translate(str.maketrans(" @+$*.", "-pPbBo"))) + "|" for row in rows],
}


@pytest.mark.parametrize("notation", NOTATIONS)
def test_levels_in_any_notation_are_the_same_boards(notation):
    """Alone, and several between rules of dashes."""
    texts = ["\n".join(NOTATIONS[notation](board.to_xsb().split("\n"))) for board in LEVELS]
    assert [boards(read_collection(text)) for text in texts] == [[board] for board in LEVELS]
    assert boards(read_collection("\n-----\n".join(texts))) == LEVELS


LEVELS = [
    *(level.board for level in generate_levels(12, 3, 6, 7, 2, 2, 12)),
    *boards(read_collection((FOLDER / "own.txt").read_text())),
]
BEFORE = ["", "; 7\n", "; a name\n\n", "Title: T\nAuthor: A\n\n", "Words, and more words.\n\n", "::\n:: x\n::\n\n"]
BEHIND = ["", "\n", "\nTitle: T\n", "\n; done\n", "\nComment:\n#####\n#@$.#\n#####\nComment-End:\n", "\n\nThe end"]


@settings(deadline=None)
@given(
    st.sampled_from(LEVELS),
    st.sampled_from([" ", "-", "_"]),
    st.integers(0, 3),
    st.data(),
    st.sampled_from(BEFORE),
    st.sampled_from(BEHIND),
)
def test_any_trimming_indent_and_comment_leaves_the_level(board, floor, indent, data, before, behind):
    rows = outside_blanked(board, floor)
    trimmed = [
        " " * indent + (row.rstrip(" ") + " " * data.draw(st.integers(0, 2)) if data.draw(st.booleans()) else row)
        for row in rows
    ]
    (entry,) = read_collection(before + "\n".join(trimmed) + behind)
    assert boards([entry]) == [board]
    assert Board.from_text("\n".join(trimmed)) == board


def outside_blanked(board: Board, floor: str) -> list[str]:
    """Rows that begin and end with blanks for walls that touch no other cell, as collections leave them out."""
    rows = board.to_xsb().replace(" ", floor).split("\n")
    height, width = len(rows), len(rows[0])

    def beside_a_cell(r: int, c: int) -> bool:
        around = [(r + i, c + j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
        return any(0 <= y < height and 0 <= x < width and rows[y][x] != "#" for y, x in around)

    def blanked(r: int, row: str) -> str:
        kept = [c for c, symbol in enumerate(row) if symbol != "#" or beside_a_cell(r, c)]
        return (" " * kept[0] + row[kept[0] : kept[-1] + 1]).ljust(width)

    return [blanked(r, row) for r, row in enumerate(rows)]
