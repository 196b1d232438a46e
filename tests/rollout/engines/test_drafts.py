"""Draft tree: it guesses what nearly all replies agree on, and nothing else."""

from __future__ import annotations

import pytest

from geo_sokoban_pipeline.rollout.engines.speculation import DraftTree

OPEN, CLOSE, END = 1, 2, 3
UP, DOWN = 10, 11
ANSWERS = [[OPEN, UP, CLOSE, END]] * 6 + [[OPEN, DOWN, CLOSE, END]] * 6


@pytest.mark.parametrize(
    ("beginning", "guessed"),
    [
        ([], [OPEN]),
        ([OPEN], []),
        ([OPEN, UP], [CLOSE]),
        ([OPEN, UP, CLOSE], []),
        ([OPEN, UP, CLOSE, END], []),
        ([OPEN, 99], []),
        ([99], []),
    ],
)
def test_guesses_after_beginnings(beginning, guessed):
    tree = DraftTree(least=6)
    for reply in ANSWERS:
        tree.learn(reply)
    assert tree.guess(beginning) == guessed


@pytest.mark.parametrize(("share", "guessed"), [(0.9, [OPEN]), (0.95, [])])
def test_nearly_all_must_agree(share, guessed):
    tree = DraftTree(share=share)
    for reply in [[OPEN, UP]] * 9 + [[DOWN, UP]]:
        tree.learn(reply)
    assert tree.guess([]) == guessed


@pytest.mark.parametrize(("seen", "guessed"), [(7, []), (8, [OPEN, UP])])
def test_few_replies_are_no_evidence(seen, guessed):
    tree = DraftTree()
    for _ in range(seen):
        tree.learn([OPEN, UP, END])
    assert tree.guess([]) == guessed


def test_only_the_first_tokens_are_remembered():
    tree = DraftTree(depth=3)
    for _ in range(8):
        tree.learn(list(range(10)))
    assert tree.guess([]) == [0, 1]
    assert tree.guess([0, 1, 2]) == []


def test_a_new_tree_guesses_nothing():
    assert DraftTree().guess([]) == []
