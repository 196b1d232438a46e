"""Sources and splits: what the generator promises, file formats, quarantine, errors that say the way out."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_sokoban_pipeline.envs.rows import SPLITS, BadRow, overlaps, read_rows, share_out, split_slice
from geo_sokoban_pipeline.envs.sokoban.board import Board
from geo_sokoban_pipeline.envs.sokoban.config import SokobanDataOptions, SplitCounts, SplitShares
from geo_sokoban_pipeline.envs.sokoban.data import (
    LevelRow,
    collapse_rows,
    labelled_action,
    level_from_text,
    prompt_row,
    raw_level_row,
    split_levels,
    spread_by_length,
)
from geo_sokoban_pipeline.envs.sokoban.levels import LevelsExhaustedError, generate_levels
from geo_sokoban_pipeline.envs.sokoban.solver import solve
from geo_sokoban_pipeline.envs.sokoban.sources import (
    known_layouts,
    read_source,
    setting_yield,
    split_yields,
)

ALL = {"train": None, "validation": None, "eval": None}
ONE, TWO, THREE = "#####\n#@$.#\n#####", "#####\n#.$@#\n#   #\n#####", "######\n#@ $.#\n######"


def options(**changes):
    return SokobanDataOptions.model_validate(changes)


def file_options(path, file_format="auto", **changes):
    return options(source="file", file={"path": str(path), "format": file_format}, counts=ALL, **changes)


def by_split(reading, key):
    return {split: [key(level) for level, of in reading.levels if of == split] for split in SPLITS}


def test_default_setting():
    default = SokobanDataOptions()
    reading = read_source(default)
    layouts = {split: set(names) for split, names in by_split(reading, lambda level: level.board.layout_hash).items()}
    hashes = by_split(reading, lambda level: level.board.canonical_hash)
    assert reading.split_rule == "layout"
    assert {split: len(names) for split, names in layouts.items()} == {"train": 173, "validation": 28, "eval": 57}
    for split, each in (("train", 768), ("validation", 32), ("eval", 80)):
        lengths = by_split(reading, lambda level: level.solution_length)[split]
        assert Counter(lengths) == dict.fromkeys(range(1, 9), each)
    assert overlaps(layouts) == overlaps(hashes) == 0
    assert all(len(set(names)) == len(names) for names in hashes.values())
    assert all(len(solve(level.board)) == level.solution_length for level, _ in reading.levels[::100])
    whole, parts = setting_yield(default), split_yields(default)
    assert sorted(whole) == [str(length) for length in range(1, 9)]
    assert sum(parts.values()) == sum(whole.values()) == 53_803
    assert all(parts[split] > getattr(default.counts, split) for split in parts)
    assert len(known_layouts(default)) == 258
    assert split_yields(SokobanDataOptions(height=10, width=10)) is None


def test_more_training_levels_leave_the_other_splits_as_they_are():
    few, more = (read_source(options(max_solution=3, counts={"train": n, "validation": 4, "eval": 4})) for n in (8, 30))
    held_out = [[level.board for level, split in reading.levels if split != "train"] for reading in (few, more)]
    assert held_out[0] == held_out[1]
    assert [level.board for level, of in more.levels if of == "train"][:6] == [
        level.board for level, of in few.levels if of == "train"
    ][:6]


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"inner_walls": (0, 0), "max_solution": 5}, "level"),
        # Hardly a level needs so many moves: the other lengths make up for those that run out.
        ({"min_solution": 19, "max_solution": 24}, "layout"),
        (
            {"height": 7, "width": 8, "boxes": 2, "inner_walls": (6, 9), "max_solution": 12},
            "layout",
        ),  # too many to list
        (
            {"height": 7, "width": 7, "boxes": 2, "inner_walls": (2, 4), "max_solution": 9, "equal_lengths": False},
            "layout",
        ),
    ],
)
def test_other_settings(changes, rule):
    reading = read_source(options(counts={"train": 16, "validation": 5, "eval": 8}, **changes))
    hashes = by_split(reading, lambda level: level.board.canonical_hash)
    assert reading.split_rule == rule
    assert {split: len(set(names)) for split, names in hashes.items()} == {"train": 16, "validation": 5, "eval": 8}
    assert overlaps(hashes) == 0
    if rule == "layout":
        assert overlaps(by_split(reading, lambda level: level.board.layout_hash)) == 0


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"height": 5, "width": 5, "inner_walls": (0, 0), "max_solution": 6}
            | {"counts": {"train": 900, "validation": 5, "eval": 8}},
            LevelsExhaustedError,
            r"sokoban.counts.train=900: 5×5 levels .* yield \d+ distinct ones",
        ),
        (
            {"min_solution": 90, "max_solution": 91, "counts": {"train": 8, "validation": 1, "eval": 1}},
            LevelsExhaustedError,
            "sokoban.counts.train=8: .* yield 0",
        ),
        ({"counts": ALL}, ValueError, "sokoban.counts.train=null"),
        ({"shares": {"train": 1, "validation": 0, "eval": 0}}, ValueError, "sokoban.shares.validation=0"),
        ({"source": "hub"}, ValueError, "sokoban.source=hub"),  # without a loader
    ],
)
def test_settings_that_cannot_be_generated(changes, error, message):
    with pytest.raises(error, match=message):
        read_source(options(**changes))


# Files


@pytest.mark.parametrize(
    ("path", "file", "window"),
    [
        ("a.parquet", "a.parquet", slice(None)),
        ("a.parquet@[2:5]", "a.parquet", slice(2, 5)),
        ("a.jsonl@[:5]", "a.jsonl", slice(None, 5)),
        ("a.jsonl@[-3:]", "a.jsonl", slice(-3, None)),
        ("a.jsonl@[:-1]", "a.jsonl", slice(None, -1)),
        ("a.jsonl@[:]", "a.jsonl", slice(None)),
        ("a.jsonl@[3]", "a.jsonl@[3]", slice(None)),
        ("a@[1:2]b.jsonl", "a@[1:2]b.jsonl", slice(None)),
        ("a.jsonl@[-:2]", "a.jsonl@[-:2]", slice(None)),
        ("~/a.jsonl", f"{Path.home()}/a.jsonl", slice(None)),
        ("~/a.jsonl@[2:]", f"{Path.home()}/a.jsonl", slice(2, None)),
    ],
)
def test_slice_syntax(path, file, window):
    assert split_slice(path) == (Path(file), window)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("window", "numbers"), [("", [0, 1, 2, 3]), ("@[1:3]", [1, 2]), ("@[-2:]", [2, 3]), ("@[:-3]", [0]), ("@[9:]", [])]
)
def test_rows_of_a_slice(tmp_path, suffix, window, numbers):
    path = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.table({"n": [0, 1, 2, 3]}), path)
    else:
        path.write_text('{"n": 0}\n\n{"n": 1}\n  \n{"n": 2}\n{"n": 3}')
    assert [(number, row["n"]) for number, row in read_rows(f"{path}{window}")] == [(n, n) for n in numbers]


def test_lines_that_are_no_rows_are_reported(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"n": 0}\n{"n": \n[1]\n\xff\n{"n": 1}\n')
    rows = [row for _, row in read_rows(str(path))]
    assert [isinstance(row, BadRow) for row in rows] == [False, True, True, True, False]
    assert [row.reason.split(":")[0] for row in rows[1:4]] == [
        "line is not JSON",
        "line is not a JSON object",
        "line is not JSON",
    ]


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("none.parquet", None, FileNotFoundError, "no file at"),
        ("none.txt", None, FileNotFoundError, "no file at"),
        ("torn.parquet", b"PAR1 torn", ValueError, "not a readable parquet file"),
        ("empty.txt", b"\n; nothing\n\n", ValueError, "holds no rows"),
        ("bad.txt", b"###\n#?#\n\n###\n#@#\n", ValueError, "none of its 2 rows is a playable level: .*unknown symbol"),
        ("bad.jsonl", b'{"xsb": "###"}\n{"xsb": 4}', ValueError, "none of its 2 rows"),
        ("rows.csv", b"a,b", ValueError, r"\.jsonl and \.parquet, not from \.csv"),
        ("prose.txt", b"There is no level\nin this # file.\n", ValueError, "prose.txt holds no rows and no levels"),
    ],
)
def test_files_that_stop_the_run(tmp_path, name, content, error, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=message):
        read_source(file_options(tmp_path / name, "raw_parquet" if name.endswith(".csv") else "auto"))


@pytest.mark.parametrize("name", ["levels.xsb", "levels.txt", "levels.jsonl"])
def test_levels_as_text(tmp_path, name):
    bad = "#####\n#@?.#\n#####"
    if name.endswith(".jsonl"):
        content = "\n".join(json.dumps({"xsb": text, "index": i}) for i, text in enumerate([ONE, bad, TWO, ONE, THREE]))
    else:
        content = "\n\n".join(f"; {i}\n{text}" for i, text in enumerate([ONE, bad, TWO, ONE, THREE]))
    (tmp_path / name).write_text(content)
    reading = read_source(file_options(tmp_path / name))
    assert {level.board for level, _ in reading.levels} == {Board.from_text(text) for text in (ONE, TWO, THREE)}
    assert {level.solution_length for level, _ in reading.levels} == {1, 2}
    assert (reading.rows_read, reading.rows_collapsed, reading.split_rule) == (5, 1, "layout")
    (rejected,) = reading.rejected
    assert rejected.reason.startswith("unknown symbol '?' in row 1")
    assert rejected.source == name
    assert rejected.row_id in ("1", "row_1")
    assert bad in rejected.raw.replace("\\n", "\n")


def test_boxoban_levels(shared_data):
    path = f"{shared_data / 'boxoban_sample.jsonl'}@[:12]"
    reading = read_source(file_options(path, "boxoban", solver_states=50))
    assert len(reading.levels) == 12
    assert any(level.solution_length is None for level, _ in reading.levels)
    assert {len(level.board.boxes) for level, _ in reading.levels} == {4}
    assert reading.levels[0][0].columns["difficulty"] == "unfiltered"
    assert not reading.rejected
    unsolved = read_source(file_options(shared_data / "boxoban_sample.jsonl", solver_states=0))
    assert len(unsolved.levels) == 100


@pytest.mark.parametrize("collapse", ["rows", "states", "levels"])
def test_real_rows(shared_data, collapse):
    reading = read_source(file_options(shared_data / "sokoban_raw_sample.parquet", collapse=collapse))
    assert (reading.rows_read, reading.rejected, reading.split_rule) == (400, [], "layout")
    assert sum(level.copies for level, _ in reading.levels) == 400
    expected = {"rows": 400, "states": 364, "levels": 97}[collapse]
    assert len(reading.levels) == expected == 400 - reading.rows_collapsed
    assert overlaps(by_split(reading, lambda level: level.board.layout_hash)) == 0
    assert {level.data_source for level, _ in reading.levels} == {"sokoban_6x6_1horizon"}


def test_our_own_prompts_are_a_processed_file(tmp_path):
    made = options(counts={"train": 9, "validation": 2, "eval": 2})
    rows = [prompt_row(raw_level_row(level, split, "layout"), made) for level, split in read_source(made).levels]
    rows[3]["images"] = ["https://example.com/board.png"]
    pd.DataFrame(rows).to_parquet(tmp_path / "prompts.parquet")
    reading = read_source(file_options(tmp_path / "prompts.parquet"))
    assert {level.board.to_xsb() for level, _ in reading.levels} == {
        row["level_xsb"] for row in rows if row is not rows[3]
    }
    assert [row.row_id for row in reading.rejected] == [rows[3]["id"]]
    assert all(level.prompt == rows[0]["prompt"] for level, _ in reading.levels)


# Splits: disjoint by wall layout, near the shares, spread over lengths, the same in every order of the rows.

NO_LIMITS = SplitCounts(train=None, validation=None, eval=None)
PATH = ["#@$ .#", "# @$.#"]


@pytest.fixture(scope="module")
def levels():
    drawn = generate_levels(120, 5, 6, 6, 1, 1, 6)
    return [
        LevelRow(f"l{i}", "t", "d", level.board, solution_length=level.solution_length) for i, level in enumerate(drawn)
    ]


def level(rows, action=None, row_id="a"):
    columns = {} if action is None else {"reward_model": {"ground_truth": [action]}}
    return level_from_text("\n".join(["######", rows, "######"]), row_id, "t", columns)


@given(st.lists(st.integers(1, 5) | st.none(), max_size=40), st.integers(0, 45), st.randoms(use_true_random=False))
def test_spread_by_length(lengths, count, generator):
    chosen = spread_by_length(range(len(lengths)), lengths, count, generator)
    assert len(chosen) == len(set(chosen)) == min(count, len(lengths))
    there, taken = Counter(lengths), Counter(lengths[i] for i in chosen)
    # A length is behind another one by two or more only where it has no more levels.
    assert all(taken[a] + 1 >= taken[b] or taken[a] == there[a] for a in there for b in there)


def test_mirrored_and_reordered_levels_split_alike(levels):
    first = {row.row_id: of for row, of in split_levels(levels, SplitShares(), NO_LIMITS, seed=3)[0]}
    mirrored = [LevelRow(row.row_id, "t", "d", row.board.transform(5), solution_length=1) for row in reversed(levels)]
    assert {row.row_id: of for row, of in split_levels(mirrored, SplitShares(), NO_LIMITS, seed=3)[0]} == first
    assert {row.row_id: of for row, of in split_levels(levels, SplitShares(), NO_LIMITS, seed=4)[0]} != first


def test_counts_are_limits(levels):
    split, _ = split_levels(levels, SplitShares(), SplitCounts(train=6, validation=0, eval=None), seed=3)
    counts = Counter(of for _, of in split)
    assert counts["train"] == 6
    assert counts["validation"] == 0
    assert sorted(Counter(row.solution_length for row, of in split if of == "train").values()) == [1] * 6


def test_one_layout_is_split_by_level():
    boards = [Board.from_text(f"#######\n#{row}#\n#######") for row in ("@$.  ", "@$ . ", "@$  .", " @$. ", "$@  .")]
    rows = [LevelRow(str(i), "t", "d", board) for i, board in enumerate(boards) for _ in range(2)]
    split, rule = split_levels(rows, SplitShares(), NO_LIMITS, seed=0)
    assert rule == "level"
    assert overlaps({name: [row.board.canonical_hash for row, of in split if of == name] for name in SPLITS}) == 0
    assert len({of for _, of in split}) == 3


@pytest.mark.parametrize(
    ("mode", "kept", "copies"),
    [
        ("rows", ["a", "b", "c", "d", "e"], [1] * 5),
        ("states", ["a", "b", "e"], [2, 2, 1]),
        ("levels", ["a", "e"], [4, 1]),
    ],
)
def test_collapse(mode, kept, copies):
    rows = [
        level(PATH[0], 4, "a"),
        level(PATH[1], 4, "b"),
        level(PATH[0][::-1], 3, "c"),  # the first path in a mirror
        level(PATH[1][::-1], 3, "d"),
        level("#@ $.#", 4, "e"),
    ]
    found = collapse_rows(rows, mode)
    assert [row.row_id for row in found] == kept
    assert [row.copies for row in found] == copies


@pytest.mark.parametrize(
    ("label", "action"),
    [([1], "up"), ([2], "down"), ([3], "left"), (4, "right"), ([5], None), ([1, 2], None), ("up", None)],
)
def test_labelled_action(label, action):
    assert labelled_action({"reward_model": {"ground_truth": label}}) == action
    assert labelled_action({}) is None


# Splits of any task.


@pytest.mark.parametrize(
    ("count", "shares", "sizes"),
    [
        (258, (0.67, 0.11, 0.22), (173, 28, 57)),
        (10, (0.5, 0.25, 0.25), (5, 3, 2)),
        (3, (0.9, 0.05, 0.05), (1, 1, 1)),
        (4, (0.98, 0.01, 0.01), (2, 1, 1)),
        (7, (1, 0, 0), (7, 0, 0)),
        (0, (0.5, 0.25, 0.25), (0, 0, 0)),
    ],
)
def test_share_out(count, shares, sizes):
    assigned = share_out(range(count), SplitShares(**dict(zip(SPLITS, shares, strict=True))), random.Random(1))
    assert tuple(len(assigned[split]) for split in SPLITS) == sizes
    assert sorted(item for items in assigned.values() for item in items) == list(range(count))


@pytest.mark.parametrize(
    ("keys", "count"), [({"a": ["x", "x"], "b": ["y"]}, 0), ({"a": ["x"], "b": ["x"], "c": ["x", "z"]}, 1)]
)
def test_overlaps(keys, count):
    assert overlaps(keys) == count
