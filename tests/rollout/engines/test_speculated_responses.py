"""Whatever is proposed, responses and log-probs are those of an engine that speculates on nothing.

Right, corrupted and random proposals of any length, over conversations, turns and images, in few rows and short
passes.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from geo_sokoban_pipeline.config.rollout import SamplingOptions
from geo_sokoban_pipeline.rollout.engines.transformers import NgramProposer, TransformersEngine
from rollout.engines.talks import SAMPLED, Plan, Talk, converse

# float32 sums in another order; measured differences are below 1e-5.
TOLERANCE = 1e-4
GREEDY = SamplingOptions(greedy=True)
CUT = SamplingOptions(temperature=0.7, top_p=0.9, top_k=40)


class Oracle(NgramProposer):
    """Proposes from responses that it was given beforehand.

    Args:
        kind: `right`: the rest of such a response, cut anywhere; `corrupted`: with one token changed; `random`:
            anything.
    """

    def __init__(self, kind: str, responses: list[list[int]], seed: int) -> None:
        super().__init__()
        self.kind, self.responses, self.random = kind, responses, random.Random(seed)

    def propose(self, prefix):
        draw = self.random
        if self.kind == "random":
            return [draw.randrange(250) for _ in range(draw.randint(0, 7))]
        begun = [response for response in self.responses if len(response) > len(prefix)]
        known = [response for response in begun if response[: len(prefix)] == list(prefix)]
        rest = draw.choice(known)[len(prefix) :] if known else []
        rest = rest[: draw.randint(1, 8)]
        if self.kind == "corrupted" and rest:
            rest[draw.randrange(len(rest))] = draw.randrange(250)
        return rest


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["talker", "grouped"])
def test_no_proposal_changes_a_response(request, name, seed):
    policy, draw = request.getfixturevalue(name), random.Random(seed)
    plans = [
        Plan(draw.randint(0, 50), draw.randint(0, 3), tuple(draw.randint(1, 8) for _ in range(3))) for _ in range(6)
    ]
    sampling = [draw.choice([SAMPLED, SAMPLED, GREEDY, CUT]) for _ in plans]

    def begin():
        return [Talk(n, plan, policy, chosen) for n, (plan, chosen) in enumerate(zip(plans, sampling, strict=True))]

    expected = begin()
    plain = converse(TransformersEngine(policy, draft_share=None), expected, draw)
    for kind in ("right", "corrupted", "random"):
        rows, tokens = draw.randint(2, 6), draw.choice([1, 40, 120, 16_384])
        engine = TransformersEngine(policy, max_conversations=rows, prefill_tokens=tokens)
        engine.proposer = Oracle(kind, [ids for talk in expected for ids, _ in talk.results], seed)
        talks = begin()
        drafted = converse(engine, talks, draw, rows)
        for talk, other in zip(talks, expected, strict=True):
            assert talk.results == other.results, (kind, talk.plan, rows, tokens)
            for ours, theirs in zip(drafted[talk.id], plain[talk.id], strict=True):
                np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)


@pytest.mark.parametrize(("kind", "most"), [("right", 0.8), ("random", 1.0)])
def test_right_proposals_save_passes_and_logits_are_computed_for_open_responses_alone(talker, kind, most):
    """Otherwise the comparisons above would compare nothing, or proposals would cost logits that nobody samples."""
    policy = talker
    plans = [Plan(number, number, (8, 8)) for number in range(4)]
    expected = [Talk(n, plan, policy) for n, plan in enumerate(plans)]
    converse(TransformersEngine(policy, draft_share=None), expected, random.Random(0))
    passes, scored = [], []
    core, head = policy.model.model.language_model.norm, policy.model.lm_head
    handles = [
        core.register_forward_hook(lambda module, args, out: passes.append(out.shape)),
        head.register_forward_hook(lambda module, args, out: scored.append(out.shape)),
    ]
    engine = TransformersEngine(policy)
    engine.proposer = Oracle(kind, [ids for talk in expected for ids, _ in talk.results], 0)
    talks = [Talk(n, plan, policy) for n, plan in enumerate(plans)]
    converse(engine, talks, random.Random(0))
    for handle in handles:
        handle.remove()
    tokens = sum(len(ids) for talk in talks for ids, _ in talk.results)
    assert sum(rows for rows, *_ in passes) <= most * tokens
    assert all(len(shape) == 2 for shape in scored)
    assert sum(rows for rows, _ in scored) == tokens
