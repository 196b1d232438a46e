"""Splits: disjoint by wall layout, near the shares, spread over lengths, the same in every order of the rows."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_sokoban_pipeline.envs.rows import SPLITS, overlaps, share_out
from geo_sokoban_pipeline.envs.sokoban.board import Board
from geo_sokoban_pipeline.envs.sokoban.config import SplitCounts, SplitShares
from geo_sokoban_pipeline.envs.sokoban.data import (
    LevelRow,
    collapse_rows,
    labelled_action,
    level_from_text,
    split_levels,
    spread_by_length,
)
from geo_sokoban_pipeline.envs.sokoban.levels import generate_levels

ALL = SplitCounts(train=None, validation=None, eval=None)
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


def test_no_layout_in_two_splits(levels):
    split, rule = split_levels(levels, SplitShares(), ALL, seed=3)
    assert rule == "layout"
    assert len(split) == len(levels)
    assert overlaps({name: [row.board.layout_hash for row, of in split if of == name] for name in SPLITS}) == 0
    assert all(any(of == name for _, of in split) for name in SPLITS)


def test_mirrored_and_reordered_levels_split_alike(levels):
    first = {row.row_id: of for row, of in split_levels(levels, SplitShares(), ALL, seed=3)[0]}
    mirrored = [LevelRow(row.row_id, "t", "d", row.board.transform(5), solution_length=1) for row in reversed(levels)]
    assert {row.row_id: of for row, of in split_levels(mirrored, SplitShares(), ALL, seed=3)[0]} == first
    assert {row.row_id: of for row, of in split_levels(levels, SplitShares(), ALL, seed=4)[0]} != first


def test_counts_are_limits(levels):
    split, _ = split_levels(levels, SplitShares(), SplitCounts(train=6, validation=0, eval=None), seed=3)
    counts = Counter(of for _, of in split)
    assert counts["train"] == 6
    assert counts["validation"] == 0
    assert sorted(Counter(row.solution_length for row, of in split if of == "train").values()) == [1] * 6


def test_one_layout_is_split_by_level():
    boards = [Board.from_text(f"#######\n#{row}#\n#######") for row in ("@$.  ", "@$ . ", "@$  .", " @$. ", "$@  .")]
    rows = [LevelRow(str(i), "t", "d", board) for i, board in enumerate(boards) for _ in range(2)]
    split, rule = split_levels(rows, SplitShares(), ALL, seed=0)
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
