"""Rollout engine in this process: batched sampling with one key-value cache that outlives the turns of a conversation.

What a conversation has paid for once is not paid again: its past stays in the cache and only new tokens are read, each
distinct picture passes the vision tower once per weight version, and equal prompts of a group are read once. Where
replies nearly always go on alike, several tokens are sampled from one pass (see `drafts`). Log-probs equal a plain
forward pass over the whole episode to 1e-4 in float32 (tested).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from geo_sokoban_pipeline.policies.experts import turn_experts
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.engines.base import FinishReason, Request, Result
from geo_sokoban_pipeline.rollout.engines.drafts import DraftTree
from geo_sokoban_pipeline.rollout.engines.kv_cache import ConversationCache
from geo_sokoban_pipeline.rollout.engines.reading import Drafts, Reader, cut_passes
from geo_sokoban_pipeline.rollout.engines.replying import Score, extend_replies
from geo_sokoban_pipeline.rollout.engines.seating import HeldConversation, Seating


class TransformersEngine:
    """`RolloutEngine` over the policy's own model.

    Args:
        policy: its model is shared, not copied; the trainer changes the weights in place.
        max_conversations: conversations held at the same time; further ones wait.
        prefill_tokens: padded tokens of one pass at most, but one conversation at least.
        reuse_cache: keep the cache between turns; off re-reads every conversation each turn (to measure its worth).
        draft_share: part of the replies that must agree on a token for it to be read ahead; None: one token a pass.
    """

    name = "transformers"
    software_version = transformers.__version__
    seeded = True

    def __init__(
        self,
        policy: Policy,
        *,
        max_conversations: int = 512,
        prefill_tokens: int = 16_384,
        reuse_cache: bool = True,
        draft_share: float | None = 0.9,
    ) -> None:
        self.policy = policy
        self.version = 0
        self._banned = torch.from_numpy(policy.banned_ids).to(policy.model.device)
        self._pass_tokens = prefill_tokens
        self._reuse = reuse_cache
        self._draft_share = draft_share
        self._longest = int(policy.model.config.text_config.max_position_embeddings)
        self._queue: list[Request] = []
        self._answered: list[Result] = []
        self._rows = max_conversations
        self._forget()

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; see `RolloutEngine`.

        Raises:
            ValueError: a conversation already has a request in the queue.
        """
        waiting = {request.id for request in self._queue}
        for request in requests:
            if request.id in waiting:
                raise ValueError(f"conversation {request.id} already waits for a reply; poll or abort it first.")
            waiting.add(request.id)
            if self._limit(request) > 0:
                self._queue.append(request)
            else:
                # The context is full: nothing is read, and what is held of the conversation stays as it is.
                self._answered.append(_answer_nothing(request, "length", self.version))

    @torch.inference_mode()
    def poll(self) -> list[Result]:
        """Answer as many queued requests as there are rows for: the turn's batch.

        Raises:
            RuntimeError: every row is held by a conversation that asks for nothing.
        """
        if self._answered:
            answered, self._answered = self._answered, []
            return answered
        batch = self._admit()
        if not batch:
            return []
        with self.policy.computing():
            return self._answer(batch)

    def _answer(self, batch: list[HeldConversation]) -> list[Result]:
        """Replies of admitted conversations."""
        self._reader.look(batch)
        # Those with a past sit in the first rows, and a row keeps its place while the others are read.
        known = [talk for talk in batch if talk.cached > 0]
        self._read_fresh([talk for talk in batch if talk.cached == 0])
        self._read_on(known)
        while running := [talk for talk in batch if talk.finish is None]:
            self._seating.gather(running)
            self._read_on(sorted(running, key=lambda talk: talk.row))
        for talk in batch:
            self._drafts.learn(talk.reply)
        results = [self._finish(talk) for talk in batch]
        if not self._reuse:
            self.release([talk.request.id for talk in batch])
        return results

    def abort(self, ids: Iterable[int]) -> None:
        """Answer queued requests with `abort`; nothing else is in flight between two polls."""
        dropped = set(ids)
        self._answered += [_answer_nothing(r, "abort", self.version) for r in self._queue if r.id in dropped]
        self._queue = [request for request in self._queue if request.id not in dropped]
        self.release(dropped)

    def release(self, ids: Iterable[int]) -> None:
        """Free the rows of conversations."""
        self._seating.release(ids)

    def update_weights(self, weights: Iterable[tuple[str, Any]] | None, version: int) -> None:
        """Take new weights; everything computed with the old ones is forgotten."""
        if weights is not None:
            own = dict(self.policy.model.named_parameters())
            with torch.no_grad():
                for name, tensor in weights:
                    own[name].copy_(turn_experts(name, tensor))
        self.version = version
        self._forget()

    def close(self) -> None:
        """Free cache and features, forget requests."""
        self._queue, self._answered = [], []
        self._forget()

    def _forget(self) -> None:
        # New buffers too: how far the old ones have grown must not show in anything.
        cache = ConversationCache(len(self.policy.model.model.language_model.layers), self._rows)
        self._seating = Seating(cache)
        self._reader = Reader(self.policy, cache)
        self._drafts = DraftTree() if self._draft_share is None else DraftTree(share=self._draft_share)

    def _admit(self) -> list[HeldConversation]:
        seating = self._seating
        batch: list[HeldConversation] = []
        waiting: list[Request] = []
        for request in self._queue:
            talk = seating.held.get(request.id)
            if talk is not None and not talk.continues(request):
                seating.release([request.id])
                talk = None
            if talk is None and seating.free == 0:
                waiting.append(request)
                continue
            if talk is None:
                talk = seating.hold(request)
            talk.ask(request, self._limit(request))
            batch.append(talk)
        self._queue = waiting
        if waiting and not batch:
            raise RuntimeError(
                f"{len(waiting)} requests wait, but all rows (rollout.max_conversations={self._rows}) are held by "
                "conversations that ask for nothing; release those that have ended."
            )
        seating.place(batch)
        return batch

    def _read_fresh(self, talks: list[HeldConversation]) -> None:
        """Read conversations without a past, equal prompts once, and sample their first tokens."""
        prompts: dict[tuple[bytes, tuple[str, ...]], list[HeldConversation]] = {}
        for talk in talks:
            key = (talk.request.token_ids.tobytes(), tuple(image.key for image in talk.request.images))
            prompts.setdefault(key, []).append(talk)
        groups = sorted(prompts.values(), key=lambda members: len(members[0].request.token_ids))
        for chunk in cut_passes(groups, [len(g[0].request.token_ids) for g in groups], self._pass_tokens):
            targets = torch.full((len(chunk), max(map(len, chunk))), -1)
            for index, members in enumerate(chunk):
                targets[index, : len(members)] = torch.tensor([talk.row for talk in members])
            self._seating.cache.begin_fresh(targets)
            firsts = [members[0] for members in chunk]
            states = self._reader.read(firsts, [talk.unread() for talk in firsts], [[] for _ in firsts], mask=None)
            scores = self._reader.score_step(states, 0, list(range(len(chunk))))
            for first, *others in chunk:
                for talk in others:
                    talk.cached, talk.pictures, talk.position = first.cached, first.pictures, first.position
            sources = [index for index, members in enumerate(chunk) for _ in members]
            readers = [talk for members in chunk for talk in members]
            self._reply(readers, partial(_pick, scores[sources]), [[] for _ in readers])

    def _read_on(self, talks: list[HeldConversation]) -> None:
        """Read what is new of conversations with a past, drafts behind it, and sample; they hold the first rows."""
        unread = [talk.unread() for talk in talks]
        first = 0
        for chunk in cut_passes(list(zip(talks, unread, strict=True)), list(map(len, unread)), self._pass_tokens):
            readers = [talk for talk, _ in chunk]
            drafts = self._guess(readers)
            feeds = [np.append(new, draft).astype(np.int64) for (_, new), draft in zip(chunk, drafts, strict=True)]
            mask = self._seating.cache.begin(len(chunk), max(map(len, feeds)), first)
            states = self._reader.read(readers, feeds, drafts, mask)
            self._reply(readers, partial(self._reader.score_step, states), drafts)
            first += len(chunk)

    def _guess(self, talks: list[HeldConversation]) -> Drafts:
        """Drafts that go on with each reply; short enough that the last token of a full reply is sampled, never fed."""
        if self._draft_share is None:
            return [[] for _ in talks]
        beginnings = [tuple(talk.reply) for talk in talks]
        guesses = {beginning: self._drafts.guess(beginning) for beginning in set(beginnings)}
        return [
            guesses[beginning][: max(0, talk.limit - len(beginning) - 1)]
            for talk, beginning in zip(talks, beginnings, strict=True)
        ]

    def _reply(self, talks: list[HeldConversation], score: Score, drafts: Drafts) -> None:
        extend_replies(talks, score, drafts, self._banned, self.policy.end_ids)
        self._seating.cache.lengths[[talk.row for talk in talks]] = [talk.cached for talk in talks]

    def _limit(self, request: Request) -> int:
        """Tokens of a reply at most; 0 or less where the context is full."""
        room, wanted = self._longest - len(request.token_ids), request.max_new_tokens
        return room if wanted is None else min(room, wanted)

    def _finish(self, talk: HeldConversation) -> Result:
        assert talk.finish is not None
        return Result(
            id=talk.request.id,
            token_ids=np.asarray(talk.reply, np.int32),
            log_probs=np.asarray(talk.log_probs, np.float32),
            finish_reason=talk.finish,
            weight_version=self.version,
        )


def _pick(scores: Tensor, _: int, active: list[int]) -> Tensor:
    return scores[active]


def _answer_nothing(request: Request, reason: FinishReason, version: int) -> Result:
    return Result(request.id, np.empty(0, np.int32), np.empty(0, np.float32), reason, version)
