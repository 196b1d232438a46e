"""N-gram speculation: it proposes what nearly all responses agree on, and nothing else."""

from __future__ import annotations

import pytest

from geo_sokoban_pipeline.rollout.engines.transformers import NgramProposer

OPEN, CLOSE, END = 1, 2, 3
UP, DOWN = 10, 11
ANSWERS = [[OPEN, UP, CLOSE, END]] * 6 + [[OPEN, DOWN, CLOSE, END]] * 6


@pytest.mark.parametrize(
    ("options", "responses", "prefix", "proposed"),
    [
        *(
            ({"least": 6}, ANSWERS, prefix, proposed)
            for prefix, proposed in (
                ([], [OPEN]),
                ([OPEN], []),
                ([OPEN, UP], [CLOSE]),
                ([OPEN, UP, CLOSE], []),
                ([OPEN, UP, CLOSE, END], []),
                ([OPEN, 99], []),
                ([99], []),
            )
        ),
        # Nearly all must agree.
        ({"share": 0.9}, [[OPEN, UP]] * 9 + [[DOWN, UP]], [], [OPEN]),
        ({"share": 0.95}, [[OPEN, UP]] * 9 + [[DOWN, UP]], [], []),
        # Few responses are no evidence.
        ({}, [], [], []),
        ({}, [[OPEN, UP, END]] * 7, [], []),
        ({}, [[OPEN, UP, END]] * 8, [], [OPEN, UP]),
        # The first tokens alone are remembered.
        ({"depth": 3}, [list(range(10))] * 8, [], [0, 1]),
        ({"depth": 3}, [list(range(10))] * 8, [0, 1, 2], []),
    ],
)
def test_what_is_proposed(options, responses, prefix, proposed):
    proposer = NgramProposer(**options)
    for response in responses:
        proposer.learn(response)
    assert proposer.propose(prefix) == proposed
