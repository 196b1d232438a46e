"""Replying: the next tokens of replies, sampled one after another for as long as their drafts say what is sampled.

Logits are asked for step by step, and only of the replies that still go on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
from torch import Tensor

from geo_sokoban_pipeline.rollout.engines.sampling import sample_tokens, uniform_draws
from geo_sokoban_pipeline.rollout.engines.seating import HeldConversation

Score = Callable[[int, list[int]], Tensor]


def extend_replies(
    talks: Sequence[HeldConversation],
    score: Score,
    drafts: Sequence[Sequence[int]],
    banned_ids: Tensor,
    end_ids: Collection[int],
) -> None:
    """Sample the next token of each reply, and on where that is the token its draft has read ahead.

    Args:
        score: `score(step, active)`: (len(active), V) logits after `step` tokens of the drafts, of the talks with these
            numbers.
        drafts: the tokens that were read ahead for each.
        banned_ids: (K,) int64 ids that are never chosen.
        end_ids: tokens that end a reply.
    """
    active, step = list(range(len(talks))), 0
    while active:
        _extend([talks[number] for number in active], score(step, active), banned_ids, end_ids)
        active = [number for number in active if talks[number].agrees(drafts[number], step)]
        step += 1


def _extend(talks: Sequence[HeldConversation], scores: Tensor, banned_ids: Tensor, end_ids: Collection[int]) -> None:
    seeds = np.array([talk.request.seed for talk in talks], np.int64)
    numbers = np.array([talk.request.sampled + len(talk.reply) for talk in talks], np.int64)
    sampling = [talk.request.sampling for talk in talks]
    chosen, log_probs = sample_tokens(scores, sampling, uniform_draws(seeds, numbers), banned_ids)
    for talk, token, log_prob in zip(talks, chosen.tolist(), log_probs.tolist(), strict=True):
        talk.take(token, log_prob, end_ids)
