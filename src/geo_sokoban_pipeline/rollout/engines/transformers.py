"""Vision features of every picture seen under the current weights; a picture is looked up by content, never encoded
twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from geo_sokoban_pipeline.policies.experts import turn_experts
from geo_sokoban_pipeline.policies.images import EncodedImage
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.policies.qwen3_vl import ImageFeatures, extend_positions
from geo_sokoban_pipeline.rollout.engines.base import FinishReason, Request, Result
from geo_sokoban_pipeline.rollout.engines.kv_cache import ConversationCache
from geo_sokoban_pipeline.rollout.engines.sampling import sample_tokens, uniform_draws
from geo_sokoban_pipeline.rollout.engines.speculation import DraftTree


class FeatureBank:
    """Growing tables of feature rows.

    Attributes:
        tables: as those of `ImageFeatures`, with room behind the rows in use.
    """

    def __init__(self) -> None:
        self.tables: list[Tensor] = []
        self._rows: dict[str, np.ndarray] = {}
        self._used = 0

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, features: ImageFeatures) -> None:
        """Append the features of new pictures."""
        new = features.tables
        count = len(new[0])
        if not self.tables:
            self.tables = [torch.empty((0, table.shape[1]), dtype=table.dtype, device=table.device) for table in new]
        self._reserve(self._used + count)
        for table, rows in zip(self.tables, new, strict=True):
            table[self._used : self._used + count] = rows
        for key, offset in features.offsets.items():
            self._rows[key] = np.arange(offset, offset + features.counts[key]) + self._used
        self._used += count

    def rows(self, keys: Sequence[str]) -> np.ndarray:
        """(M,) int64 rows of pictures, one after the other."""
        return np.concatenate([self._rows[key] for key in keys]) if len(keys) else np.empty(0, np.int64)

    def _reserve(self, rows: int) -> None:
        held = len(self.tables[0])
        if rows <= held:
            return
        size = max(rows, 2 * held)
        for index, table in enumerate(self.tables):
            grown = table.new_empty((size, table.shape[1]))
            grown[: self._used] = table[: self._used]
            self.tables[index] = grown


# Seating: which conversation holds which row of the cache. A turn's batch always sits in the first rows.


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


# Reading: new tokens and pictures of conversations pass the model once, and leave keys, values and features behind.


Drafts = list[list[int]]


class Reader:
    """The policy's forward pass over conversations, under one version of its weights.

    Args:
        cache: where keys and values go.
    """

    def __init__(self, policy: Policy, cache: ConversationCache) -> None:
        self.policy = policy
        self._cache = cache
        self._bank = FeatureBank()
        self._device = policy.model.device

    def look(self, talks: Sequence[HeldConversation]) -> None:
        """Encode the pictures of requests that were not seen before."""
        missing: dict[str, EncodedImage] = {}
        for talk in talks:
            for image in talk.request.images[talk.pictures :]:
                if image.key not in self._bank:
                    missing[image.key] = image
        if missing:
            self._bank.add(self.policy.network.encode(list(missing.values())))

    def read(
        self, talks: Sequence[HeldConversation], feeds: Sequence[np.ndarray], drafts: Drafts, mask: Tensor | None
    ) -> Tensor:
        """Run the feeds of conversations, unread tokens with drafts behind them, and note the former as cached.

        Args:
            talks: their pictures have been looked at.
            feeds: (L,) int64 tokens of each.
            drafts: the last tokens of each feed that are guesses.
            mask: see `ConversationCache.begin`; None: causal over the feed.

        Returns:
            (N, 1 + longest draft, hidden) states after the last unread token and after each token of the draft.
        """
        ids = np.zeros((len(talks), max(map(len, feeds))), np.int64)
        positions = np.zeros((3, *ids.shape), np.int64)
        wanted = np.empty((len(talks), 1 + max(map(len, drafts))), np.int64)
        ahead = np.arange(wanted.shape[1])
        rows: list[np.ndarray] = []
        codec = self.policy.codec
        # Most feeds of a turn are equal; their positions differ by where they start.
        known: dict[tuple[bytes, tuple[tuple[int, int, int], ...]], tuple[np.ndarray, int]] = {}
        for index, (talk, feed, draft) in enumerate(zip(talks, feeds, drafts, strict=True)):
            new, size = talk.request.images[talk.pictures :], len(feed)
            key = (feed.tobytes(), tuple(image.grid for image in new))
            if key not in known:
                known[key] = extend_positions(feed, key[1], codec.image_pad_id, codec.merge_size)
            placed, length = known[key]
            ids[index, :size] = feed
            positions[:, index, :size] = placed + talk.position
            wanted[index] = np.minimum(ahead + size - len(draft), size) - 1
            if new:
                rows.append(self._bank.rows([image.key for image in new]))
            talk.position += length - len(draft)
            talk.cached += size - len(draft)
            talk.pictures = len(talk.request.images)
        pictures = np.concatenate(rows) if rows else np.empty(0, np.int64)
        return self._run(ids, positions, pictures, mask, wanted)

    def score_step(self, states: Tensor, step: int, active: list[int]) -> Tensor:
        """(len(active), V) logits of some conversations after `step` tokens of their drafts."""
        return self.policy.network.logits(states[active, step])

    def _run(
        self, ids: np.ndarray, positions: np.ndarray, rows: np.ndarray, mask: Tensor | None, wanted: np.ndarray
    ) -> Tensor:
        states: Tensor = self.policy.network(
            torch.from_numpy(ids).to(self._device),
            torch.from_numpy(positions).to(self._device),
            features=self._bank.tables,
            rows=torch.from_numpy(rows).to(self._device) if len(rows) else None,
            attention_mask=None if mask is None else mask.to(self._device),
            cache=self._cache,
            wanted=torch.from_numpy(wanted).to(self._device),
        )
        return states


def cut_passes(items: list[Any], lengths: Sequence[int], budget: int) -> list[list[Any]]:
    """Cut a list, in order, so that (longest × count) of each piece stays within a budget, one item at least."""
    chunks: list[list[Any]] = []
    longest = 0
    for item, length in zip(items, lengths, strict=True):
        longest = max(longest, length)
        if chunks and longest * (len(chunks[-1]) + 1) <= budget:
            chunks[-1].append(item)
        else:
            chunks.append([item])
            longest = length
    return chunks


# Replying: the next tokens of replies, sampled one after another for as long as their drafts say what is sampled.


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


# Rollout engine in this process: batched sampling with one key-value cache that outlives the turns of a conversation.


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
        cache = ConversationCache(self._rows)
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
