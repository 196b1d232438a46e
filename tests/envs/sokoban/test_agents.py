"""Players: single choices, patience, and the solve rates that the tiny-policy facts report for them."""

from __future__ import annotations

import random

import pytest

from geo_sokoban_pipeline.envs.sokoban import Board, generate_levels, make_agent


def choices(player_name: str, text: str, patience: int | None = 1) -> set[str | None]:
    board = Board.from_text(text)
    return {make_agent(player_name, patience).choose(board, random.Random(seed)) for seed in range(40)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#@$ .#", {"right"}),  # a push that lowers the distance
        ("#. @$ #", {"right", "left"}),  # blocked: any legal move, the push away included
        ("#@  $.#", {"right"}),
        ("#####\n#@  #\n#  $#\n#  .#\n#####", {"right", "down"}),  # a tie between two ways nearer
        ("#@$#", {None}),  # nothing can move
        ("#@ *$.#", {"right"}),  # walks to the box that is off its target
        ("######\n#.$$.#\n# @  #\n######", {"left", "right"}),  # under a box it cannot push up; nearer is impossible
    ],
)
def test_direct_choices(text, expected):
    assert choices("direct", text) == expected


@pytest.mark.parametrize(("patience", "moves"), [(0, 0), (1, 1), (3, 3)])
def test_direct_gives_up_at_the_block_after_its_patience(patience, moves):
    board, generator, player = Board.from_text("#.$@#"), random.Random(0), make_agent("direct", patience)
    assert player.choose(board, generator) == "left"
    stuck = Board.from_text("###\n# #\n#@#\n#$#\n#.#\n###".replace("$", " ").replace(".", "*"))
    made = 0
    while player.choose(stuck, generator) is not None:
        made += 1
        assert made < 20
    assert made == moves


def test_random_players():
    assert choices("random", "#@ #") == {"up", "down", "left", "right"}
    assert choices("random_legal", "#@ #") == {"right"}
    assert choices("random_legal", "#@#") == {None}


def test_solver_player_follows_a_plan_and_makes_a_new_one():
    board = Board.from_text("######\n#@   #\n# $ .#\n#    #\n######")
    player, generator = make_agent("solver"), random.Random(0)
    played = []
    for _ in range(3):
        played.append(player.choose(board, generator))
        board = board.move(played[-1]).board
    assert played == ["down", "right", "right"] and board.is_solved
    assert player.choose(Board.from_text("#.$@#"), generator) == "left"
    assert player.choose(Board.from_text("#$@ .#"), generator) is None


def test_unknown_players_and_negative_patience_are_refused():
    with pytest.raises(ValueError, match="player='oracle': must be one of random, random_legal, solver, direct"):
        make_agent("oracle")
    with pytest.raises(ValueError, match="patience=-1"):
        make_agent("direct", -1)


@pytest.fixture(scope="module")
def levels():
    return generate_levels(1200, 3, 6, 6, inner_walls=(1, 4), lengths=range(1, 9))


@pytest.mark.parametrize(
    ("name", "patience", "low", "high"),
    [
        ("random", 1, 0.10, 0.17),  # 13 % in the facts
        ("random_legal", 1, 0.14, 0.22),  # 18 %
        ("direct", 0, 0.24, 0.34),  # 30 %
        ("direct", 1, 0.31, 0.42),  # 37 %
        ("direct", None, 0.39, 0.52),  # 47 %
        ("solver", 1, 1.0, 1.0),
    ],
)
def test_solve_rates_with_ten_moves_are_near_the_facts(levels, name, patience, low, high):
    """An expert that gives up still ends in deadlocks, a tenth of its demonstrations (docs/learning.md)."""
    ends = []
    for index, level in enumerate(levels):
        board, player, generator = level.board, make_agent(name, patience), random.Random(index)
        for _ in range(10):
            action = player.choose(board, generator)
            if action is None or board.is_solved:
                break
            board = board.move(action).board
        ends.append(board)
    assert low <= sum(board.is_solved for board in ends) / len(ends) <= high
    assert (name, patience) != ("direct", 1) or 0.1 < sum(board.is_lost for board in ends) / len(ends) < 0.15
