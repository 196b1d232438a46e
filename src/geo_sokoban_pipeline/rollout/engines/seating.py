"""Seating: which conversation holds which row of the cache. A turn's batch always sits in the first rows.

Every held conversation has exactly one row and every row at most one conversation; rows are swapped, never copied over
one another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from geo_sokoban_pipeline.rollout.engines.base import FinishReason, Request
from geo_sokoban_pipeline.rollout.engines.kv_cache import ConversationCache


@dataclass
class HeldConversation:
    """A request in work and what the cache holds of its conversation.

    Attributes:
        row: of the cache; −1 before it has one.
        cached: tokens in the cache, the first ones of the conversation.
        pictures: pictures among them.
        position: M-RoPE position of the token after them.
        limit: tokens of the reply at most, 1 or more.
        reply, log_probs, finish: what has been sampled for the request.
    """

    request: Request
    limit: int = 1
    row: int = -1
    cached: int = 0
    pictures: int = 0
    position: int = 0
    reply: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None

    def ask(self, request: Request, limit: int) -> None:
        """Begin the next reply, of so many tokens at most."""
        self.request, self.limit, self.reply, self.log_probs, self.finish = request, limit, [], [], None

    def take(self, token: int, log_prob: float, end_ids: Collection[int]) -> None:
        """Add a sampled token to the reply, and note whether it ends it."""
        self.reply.append(token)
        self.log_probs.append(log_prob)
        if token in end_ids:
            self.finish = "stop"
        elif len(self.reply) >= self.limit:
            self.finish = "length"

    def agrees(self, draft: Sequence[int], step: int) -> bool:
        """Whether the token sampled last is number `step` of the draft, which has been read: it is cached then."""
        if self.finish is not None or self.reply[-1:] != list(draft[step : step + 1]):
            return False
        self.cached += 1
        self.position += 1
        return True

    def unread(self) -> np.ndarray:
        """(L,) int64 tokens that are not in the cache yet; nothing is sampled before a request is read to its end."""
        known, asked = self.cached, self.request.token_ids
        if known < len(asked):
            return asked[known:].astype(np.int64)
        return np.array(self.reply[known - len(asked) :], np.int64)

    def continues(self, request: Request) -> bool:
        """Whether a request goes on from what is cached: another one under a known id starts anew.

        Tokens and pictures must be those that were read and sampled, and something must be new. A reply that was never
        finished, because a pass failed, leaves nothing to go on from.
        """
        held, length = self.request.token_ids, len(self.request.token_ids)
        replied = request.token_ids[length : length + len(self.reply)].tolist()
        seen = [image.key for image in self.request.images]
        return (
            self.finish is not None
            and len(request.token_ids) > self.cached
            and replied == self.reply
            and np.array_equal(request.token_ids[:length], held)
            and [image.key for image in request.images[: len(seen)]] == seen
        )


class Seating:
    """Held conversations and their rows.

    Args:
        cache: whose rows are given out.
    """

    def __init__(self, cache: ConversationCache) -> None:
        self.cache = cache
        self.held: dict[int, HeldConversation] = {}
        self._owners: list[int | None] = [None] * cache.rows

    @property
    def free(self) -> int:
        """Rows that nobody holds."""
        return self.cache.rows - len(self.held)

    def hold(self, request: Request) -> HeldConversation:
        """Take up a new conversation; it has a row after `place`."""
        talk = self.held[request.id] = HeldConversation(request)
        return talk

    def release(self, ids: Iterable[int]) -> None:
        """Free the rows of conversations."""
        for identity in ids:
            talk = self.held.pop(identity, None)
            if talk is not None and talk.row >= 0:
                self._owners[talk.row] = None
                self.cache.lengths[talk.row] = 0

    def place(self, batch: list[HeldConversation]) -> None:
        """Give the batch the first rows, those with a past before the new ones, and sort it by row."""
        batch.sort(key=lambda talk: talk.cached == 0)
        taken = sum(talk.cached > 0 for talk in batch)
        self.gather(batch[:taken])
        new = batch[taken:]
        blockers = [r for r in range(taken, taken + len(new)) if self._owners[r] is not None]
        spare = [r for r in range(taken + len(new), self.cache.rows) if self._owners[r] is None]
        self._swap(blockers, spare[: len(blockers)])
        for row, talk in enumerate(new, start=taken):
            talk.row = row
            self._owners[row] = talk.request.id
            self.cache.lengths[row] = 0
        batch.sort(key=lambda talk: talk.row)

    def gather(self, talks: list[HeldConversation]) -> None:
        """Bring conversations that hold rows to the first rows; those already there keep their place."""
        count = len(talks)
        outside = [talk.row for talk in talks if talk.row >= count]
        inside = {talk.row for talk in talks}
        self._swap([row for row in range(count) if row not in inside], outside)

    def _swap(self, first: list[int], second: list[int]) -> None:
        self.cache.swap(first, second)
        for a, b in zip(first, second, strict=True):
            self._owners[a], self._owners[b] = self._owners[b], self._owners[a]
            for row in (a, b):
                owner = self._owners[row]
                if owner is not None:
                    self.held[owner].row = row
