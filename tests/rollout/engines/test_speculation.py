"""N-gram speculation: it proposes what nearly all responses agree on, and nothing else."""

from __future__ import annotations

import pytest

from geo_sokoban_pipeline.rollout.engines.transformers import NgramProposer

OPEN, CLOSE, END = 1, 2, 3
UP, DOWN = 10, 11
ANSWERS = [[OPEN, UP, CLOSE, END]] * 6 + [[OPEN, DOWN, CLOSE, END]] * 6


@pytest.mark.parametrize(
    ("prefix", "proposed"),
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
def test_proposals_after_prefixes(prefix, proposed):
    proposer = NgramProposer(least=6)
    for response in ANSWERS:
        proposer.learn(response)
    assert proposer.propose(prefix) == proposed


@pytest.mark.parametrize(("share", "proposed"), [(0.9, [OPEN]), (0.95, [])])
def test_nearly_all_must_agree(share, proposed):
    proposer = NgramProposer(share=share)
    for response in [[OPEN, UP]] * 9 + [[DOWN, UP]]:
        proposer.learn(response)
    assert proposer.propose([]) == proposed


@pytest.mark.parametrize(("seen", "proposed"), [(7, []), (8, [OPEN, UP])])
def test_few_responses_are_no_evidence(seen, proposed):
    proposer = NgramProposer()
    for _ in range(seen):
        proposer.learn([OPEN, UP, END])
    assert proposer.propose([]) == proposed


def test_only_the_first_tokens_are_remembered():
    proposer = NgramProposer(depth=3)
    for _ in range(8):
        proposer.learn(list(range(10)))
    assert proposer.propose([]) == [0, 1]
    assert proposer.propose([0, 1, 2]) == []


def test_a_new_proposer_proposes_nothing():
    assert NgramProposer().propose([]) == []
