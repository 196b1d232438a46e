"""Action grammar: which responses ask for which moves."""

from __future__ import annotations

import pytest

from geo_sokoban_pipeline.envs.sokoban import parse_actions


@pytest.mark.parametrize(
    ("response", "actions"),
    [
        ("<answer>Up, left</answer>", ["up", "left"]),
        ("<answer>fly</answer> up", []),  # an answer block without a move counts as no move
        ("<ANSWER>\nDown\n</Answer>", ["down"]),
        ("<answer>up</answer><answer>down</answer>", ["up"]),
        ("<answer>up", []),  # an open block is no block, and "<answer>up" is no token
        ("<answer> up", ["up"]),
        ("Right,Right,Right", ["right"] * 3),
        ("up;down\nleft\tright", ["up", "down", "left"]),
        ("up,down , , left", ["up", "down", "left"]),
        ("up. (left) 'down' right!", []),  # attached punctuation disqualifies
        ("I go UP then dOwN", ["up", "down"]),
        ("upward left", ["left"]),
        ("↑", []),
        ("", []),
        ("<answer></answer>", []),
        ("<answer>up left down right</answer>", ["up", "left", "down"]),
        ("<think>up <answer>up</answer></think><answer>left</answer>", ["left"]),
        ("<think>a</think> up <think>b</think> down", ["down"]),
        ("<think><answer>up</answer>", ["up"]),
    ],
)
def test_action_grammar(response, actions):
    assert parse_actions(response, 3) == actions


def test_action_grammar_of_the_original_reads_thoughts_too():
    assert parse_actions("<think><answer>up</answer></think><answer>left</answer>", 3, after_think=False) == ["up"]
    assert parse_actions("up down left right up") == ["up", "down", "left", "right", "up"]
