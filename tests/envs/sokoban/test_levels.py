"""Level generator: exact lengths, no repeats, the same in every process, and a clear word when a setting runs out."""

from __future__ import annotations

from collections import Counter

import pytest

from geo_sokoban_pipeline.envs.sokoban import (
    Board,
    LevelsExhaustedError,
    enumerate_layouts,
    generate_levels,
    levels_of_layout,
    solve,
)
from geo_sokoban_pipeline.envs.sokoban.levels import bordered_layout, default_inner_walls
from geo_sokoban_pipeline.seeding import derive_seed


@pytest.mark.parametrize(
    ("count", "height", "width", "boxes", "low", "high"),
    [
        (60, 6, 6, 1, 1, 8),
        (20, 6, 6, 1, 12, 16),
        (15, 6, 7, 2, 4, 12),
        (15, 8, 8, 2, 5, 15),
        (3, 10, 10, 4, 6, 20),
        (8, 9, 12, 1, 3, None),
    ],
)
def test_levels_are_solvable_in_exactly_the_stated_moves(count, height, width, boxes, low, high):
    levels = generate_levels(count, 7, height, width, boxes, low, high)
    assert len({level.board.canonical_hash for level in levels}) == count
    for index, level in enumerate(levels):
        board = level.board
        assert (board.height, board.width, len(board.boxes), len(board.targets)) == (height, width, boxes, boxes)
        assert len(solve(board) or []) == level.solution_length
        assert low <= level.solution_length and (high is None or level.solution_length <= high)
        assert level.seed == derive_seed(7, "sokoban", "levels", index)
        assert board.layout.is_connected
        border = {*range(width), *range((height - 1) * width, height * width)} | {
            r * width + c for r in range(height) for c in (0, width - 1)
        }
        assert all(board.layout.codes[at] == 0 for at in border)
        inner = board.layout.codes.count(0) - len(border)
        assert default_inner_walls(height, width)[0] <= inner <= default_inner_walls(height, width)[1]


def test_lengths_give_equal_counts():
    levels = generate_levels(160, 1, 6, 6, lengths=range(1, 9))
    assert Counter(level.solution_length for level in levels) == dict.fromkeys(range(1, 9), 20)


def test_a_longer_call_starts_with_a_shorter_calls_levels():
    assert generate_levels(10, 3, 6, 6) == generate_levels(30, 3, 6, 6)[:10]
    assert generate_levels(5, 3, 8, 8, 2) == generate_levels(8, 3, 8, 8, 2)[:5]
    assert generate_levels(10, 3, 6, 6) != generate_levels(10, 4, 6, 6)
    assert generate_levels(0, 3, 6, 6) == []


def test_6x6_has_258_layouts_with_one_to_four_inner_walls():
    layouts = enumerate_layouts(6, 6)
    assert len(layouts) == len({layout.hash for layout in layouts}) == 258
    assert Counter(layout.codes.count(0) - 20 for layout in layouts) == {1: 3, 2: 20, 3: 66, 4: 169}
    assert all(layout.is_connected for layout in layouts)
    with pytest.raises(ValueError, match="inner_walls=\\(1, 16\\): a 10×10 grid has .* more than 100,000"):
        enumerate_layouts(10, 10)


@pytest.mark.parametrize("boxes", [1, 2])
def test_levels_of_a_layout_are_all_solvable_ones_with_exact_lengths(boxes):
    layout = bordered_layout(5, 6, (1,))
    levels = list(levels_of_layout(layout, boxes))
    assert len({board for board, _ in levels}) == len(levels) > 100
    for board, length in levels[:: len(levels) // 60]:
        assert len(solve(board) or []) == length
    bounded = list(levels_of_layout(layout, boxes, min_solution=2, max_solution=3))
    assert bounded == [(board, length) for board, length in levels if 2 <= length <= 3]


def test_levels_stand_on_the_given_layouts_only_in_any_orientation():
    layouts = enumerate_layouts(6, 6)[30:34]
    levels = generate_levels(80, 2, 6, 6, layouts=layouts, lengths=[2, 4])
    assert {level.board.layout_hash for level in levels} == {layout.hash for layout in layouts}
    assert len({level.board.layout for level in levels}) > len(layouts)
    flat = [level.board.layout for level in generate_levels(6, 2, 5, 7)]
    turned = generate_levels(12, 2, 7, 5, layouts=flat)
    assert {layout.hash for layout in flat} >= {level.board.layout_hash for level in turned}


def test_a_small_setting_is_emptied_completely_before_it_gives_up():
    every = {board.canonical_hash for layout in enumerate_layouts(5, 5) for board, _ in levels_of_layout(layout)}
    found = f"count=10000: found only {len(every)} distinct 5×5 levels with one box .* found: 10. Lower count"
    with pytest.raises(LevelsExhaustedError, match=found):
        generate_levels(10_000, 0, 5, 5)
    levels = generate_levels(10_000, 0, 5, 5, return_fewer=True)
    assert {level.board.canonical_hash for level in levels} == every


def test_a_length_that_runs_out_is_named_or_left_out():
    with pytest.raises(
        LevelsExhaustedError, match="found only 1 distinct 5×5 levels with one box and a solution of exactly 10 moves"
    ):
        generate_levels(8, 0, 5, 5, lengths=[10, 1])
    levels = generate_levels(8, 0, 5, 5, lengths=[10, 1], return_fewer=True)
    assert Counter(level.solution_length for level in levels) == {10: 1, 1: 4}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"min_solution": 40},
            "min_solution=40: no 6×6 level with one box needs 40 moves or more under these walls; largest found: 25",
        ),
        ({"lengths": [30]}, "lengths=30: no 6×6 level"),
        ({"height": 4, "width": 4}, "min_solution=1: no 4×4 level with one box needs 1 moves"),
    ],
)
def test_lengths_that_do_not_exist_are_an_error_with_the_way_out(arguments, message):
    with pytest.raises(LevelsExhaustedError, match=message) as caught:
        generate_levels(**{"count": 1, "seed": 0, "height": 6, "width": 6} | arguments)
    assert "raise height, width or boxes" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": -1}, "count=-1"),
        ({"height": 2}, "height=2"),
        ({"boxes": 0}, "boxes=0"),
        ({"boxes": 15}, "boxes=15: a 6×6 board with 1 inner walls has 15 floor cells"),
        ({"min_solution": 0}, "min_solution=0"),
        ({"min_solution": 5, "max_solution": 4}, "max_solution=4 is below min_solution=5"),
        ({"inner_walls": (3, 2)}, r"inner_walls=\[3, 2\]"),
        ({"inner_walls": (0, 17)}, r"inner_walls=\[0, 17\]"),
        ({"lengths": []}, r"lengths=\[\]"),
        ({"lengths": [9], "max_solution": 8}, "lengths: 9 lies outside"),
        ({"layouts": []}, r"layouts=\[\]"),
        ({"layouts": [Board.from_text("#@#").layout]}, "one is 1×3, the levels are 6×6"),
    ],
)
def test_values_out_of_range_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        generate_levels(**{"count": 1, "seed": 0, "height": 6, "width": 6} | arguments)
