"""Conversations made by hand, request by request, along a plan; and how each goes when it is alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from geo_sokoban_pipeline.config.rollout import SamplingOptions
from geo_sokoban_pipeline.envs.sokoban import Board
from geo_sokoban_pipeline.envs.sokoban.drawing import render_observation
from geo_sokoban_pipeline.rollout.engines.base import Request
from geo_sokoban_pipeline.rollout.engines.transformers import TransformersEngine

SAMPLED = SamplingOptions()


@dataclass(frozen=True)
class Plan:
    """A conversation: its seed, its level, and tokens per response."""

    seed: int
    level: int
    limits: tuple[int, ...]


BOARDS = [Board.from_text(f"#####\n#{row}#\n#   #\n#####\n#####\n#####") for row in ("@$.", ".$@", "$@.", "@ *")]


def say(policy, text, level):
    """Ids and images of a user turn about a board, or of the first one."""
    image = policy.reader.read(render_observation(BOARDS[level % len(BOARDS)], 16))
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}
    if text == "Go":
        return policy.codec.encode_prompt([message], [image.grid]), image
    return policy.codec.encode_observation(message, [image.grid], separator=True), image


class Talk:
    """A conversation that follows a plan."""

    def __init__(self, identity, plan, policy, sampling=SAMPLED):
        self.id, self.plan, self.policy, self.sampling = identity, plan, policy, sampling
        ids, image = say(policy, "Go", plan.level)
        self.ids, self.images, self.sampled, self.turn = ids, [image], 0, 0
        self.results = []

    @property
    def over(self):
        return self.turn == len(self.plan.limits)

    def request(self):
        limit = self.plan.limits[self.turn]
        return Request(self.id, self.ids, tuple(self.images), self.sampling, limit, self.plan.seed, self.sampled)

    def hear(self, result):
        self.results.append((result.token_ids.tolist(), result.finish_reason))
        self.log_probs = result.log_probs
        self.turn, self.sampled = self.turn + 1, self.sampled + len(result.token_ids)
        delta, image = say(self.policy, "Next?", self.plan.level + self.turn)
        self.ids = np.concatenate([self.ids, result.token_ids, delta])
        self.images.append(image)


alone: dict[Plan, list] = {}


def play_alone(policy, plan):
    if plan not in alone:
        engine, talk = TransformersEngine(policy, max_conversations=1), Talk(0, plan, policy)
        while not talk.over:
            engine.submit([talk.request()])
            talk.hear(engine.poll()[0])
        alone[plan] = talk.results
    return alone[plan]


def converse(engine, talks, draw, rows=512):
    """All talks to their ends, in random company, as many at a time as the engine has KV slots; log-probs of each
    response, by talk.
    """
    heard = {talk.id: [] for talk in talks}
    asked: set[int] = set()
    while not all(talk.over for talk in talks):
        held = {talk.id for talk in talks if talk.turn > 0 and not talk.over} | asked
        for talk in talks:
            # A conversation that pauses keeps its row, so not more may be open than there are rows.
            opens = talk.turn > 0 or len(held | {talk.id}) <= rows
            if opens and not talk.over and talk.id not in asked and draw.random() < 0.7:
                engine.submit([talk.request()])
                asked.add(talk.id)
                held.add(talk.id)
        for result in engine.poll():
            asked.discard(result.id)
            heard[result.id].append(result.log_probs)
            talks[result.id].hear(result)
        engine.release([talk.id for talk in talks if talk.over])
    return heard
