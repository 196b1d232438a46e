"""The engine in this process: prefill and decode over KV slots that keep a conversation's cache between turns.

A slot is a row of the KV buffers with its own length, so turns need no padding. The slots of a forward pass are swapped
to the front, and the pass works on views: no cached token is copied for attention. The buffers always hold finite
values, because attention multiplies masked positions by zero.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from geo_sokoban_pipeline.config.rollout import SamplingOptions
from geo_sokoban_pipeline.grpo.batching import plan_micro_batches
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.policies.qwen3_vl import ImageFeatures, extend_positions
from geo_sokoban_pipeline.policies.weights import WeightSource, transpose_experts
from geo_sokoban_pipeline.progress import note_progress
from geo_sokoban_pipeline.rollout.engines.base import FinishReason, Request, Result, empty_result

_GROWTH = 1.5
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Without cuDNN: it plans anew for each length of the cache, longer than a decoding step takes (docs/gpu.md).
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class SlotKvCache:
    """Buffers of (rows, key-value heads, capacity, head dimension), one pair per layer.

    They grow with the rows and the tokens in use. The tokens of a head are contiguous in memory: attention of one new
    token is twice as fast as with heads interleaved.

    Args:
        rows: maximum number of conversations.

    Attributes:
        lengths: (rows,) int64 cached tokens of each row.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.lengths = np.zeros(rows, np.int64)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._first = self._count = self._feed = self._end = 0
        self._span: tuple[Tensor, Tensor] | None = None
        self._fresh: tuple[Tensor, Tensor] | None = None

    @property
    def capacity(self) -> int:
        """Tokens per row before the buffers grow."""
        return self._keys[0].shape[2] if self._keys else 0

    @property
    def allocated_rows(self) -> int:
        """Rows that are allocated so far."""
        return self._keys[0].shape[0] if self._keys else 0

    def swap(self, first: Sequence[int], second: Sequence[int]) -> None:
        """Exchange rows pairwise; the two lists share no row."""
        source, target = [*second, *first], [*first, *second]
        used = int(self.lengths[source].max(initial=0))
        self.lengths[target] = self.lengths[source]
        if not used:
            return
        self._reserve(max(target) + 1, used)
        to, come_from = torch.tensor(target), torch.tensor(source)
        for buffer in (*self._keys, *self._values):
            buffer[to, :, :used] = buffer[come_from, :, :used]

    def begin(self, count: int, feed: int, first: int = 0) -> Tensor | None:
        """Start a pass that appends `feed` padded tokens to each of `count` rows, from row `first` on.

        Returns:
            (count or 1, 1, feed, S) bool mask, True where attention is allowed; None: no mask is needed.
        """
        lengths = self.lengths[first : first + count]
        longest = int(lengths.max())
        self._first, self._count, self._feed, self._end, self._fresh = first, count, feed, longest + feed, None
        self._reserve(first + count, self._end)
        uniform = longest == int(lengths.min())
        if uniform and feed == 1:
            self._span = None
            return None
        columns = torch.from_numpy((lengths[:1] if uniform else lengths)[:, None] + np.arange(feed))
        self._span = None if uniform else (torch.arange(count)[:, None], columns)
        return (torch.arange(self._end)[None, None] <= columns[:, :, None])[:, None]

    def begin_fresh(self, targets: Tensor) -> None:
        """Start a pass over new conversations.

        Args:
            targets: (rows of the pass, copies) int64; row i of the pass is written to rows `targets[i]`, -1 is ignored.
        """
        source, column = (targets >= 0).nonzero(as_tuple=True)
        self._fresh = (source, targets[source, column])

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object) -> tuple[Tensor, Tensor]:
        """Called by the attention: store (B, heads, L, dim) keys and values; returns all that the queries attend to."""
        if self._fresh is not None:
            return self._store_fresh(keys, values, layer)
        here, end = slice(self._first, self._first + self._count), self._end
        for buffer, new in ((self._keys[layer][here], keys), (self._values[layer][here], values)):
            if self._span is None:
                buffer[:, :, end - self._feed : end] = new
            else:
                rows, columns = self._span
                buffer[rows, :, columns] = new.transpose(1, 2)
        return self._keys[layer][here, :, :end], self._values[layer][here, :, :end]

    def _store_fresh(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        assert self._fresh is not None
        source, rows = (index.to(keys.device) for index in self._fresh)
        length = keys.shape[2]
        while len(self._keys) <= layer:
            shape = (self.allocated_rows, keys.shape[1], self.capacity, keys.shape[3])
            self._keys.append(keys.new_zeros(shape))
            self._values.append(values.new_zeros(shape))
        self._reserve(int(rows.max()) + 1, length)
        self._keys[layer][rows, :, :length] = keys.index_select(0, source)
        self._values[layer][rows, :, :length] = values.index_select(0, source)
        return keys, values

    def _reserve(self, rows: int, length: int) -> None:
        """Grow the buffers to at least this many rows and tokens."""
        held_rows, held = self.allocated_rows, self.capacity
        if not self._keys or (rows <= held_rows and length <= held):
            return
        rows = held_rows if rows <= held_rows else min(self.rows, max(rows, int(held_rows * _GROWTH)))
        length = held if length <= held else max(length, int(held * _GROWTH))
        for buffers in (self._keys, self._values):
            for index, old in enumerate(buffers):
                grown = old.new_empty((rows, old.shape[1], length, old.shape[3]))
                grown[:held_rows, :, :held] = old
                grown[:held_rows, :, held:] = 0
                grown[held_rows:] = 0
                buffers[index] = grown


Item = TypeVar("Item")
# (step, numbers of slots) → (len(numbers), V) logits after `step` proposed tokens
LogitsAt = Callable[[int, list[int]], Tensor]


class FeatureBank:
    """Vision features of every image encoded with the current weights, by content.

    Attributes:
        tables: as in `ImageFeatures`, of all images.
    """

    def __init__(self) -> None:
        self.tables: list[Tensor] = []
        self._rows: dict[str, np.ndarray] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def add(self, features: ImageFeatures) -> None:
        """Append the features of new images."""
        self.tables = self.tables or [table[:0] for table in features.tables]
        for key, offset in features.offsets.items():
            self._rows[key] = np.arange(offset, offset + features.counts[key]) + len(self.tables[0])
        for number, new in enumerate(features.tables):  # one after the other: a table is there twice while it grows
            self.tables[number] = torch.cat((self.tables[number], new))

    def rows(self, keys: Sequence[str]) -> np.ndarray:
        """(M,) int64 rows of images, one after the other."""
        return np.concatenate([self._rows[key] for key in keys]) if len(keys) else np.empty(0, np.int64)


@dataclass
class Slot:
    """A conversation in the KV cache, and the response that is sampled for its current request.

    Attributes:
        limit: tokens of the response at most, 1 or more.
        row: of the cache; −1 before `SlotManager.place`.
        cached: number of cached tokens, from the start of the conversation.
        images: number of images among the cached tokens.
        position: M-RoPE position of the first token after the cached ones.
        response, log_probs, finish: of the current request.
    """

    request: Request
    limit: int = 1
    row: int = -1
    cached: int = 0
    images: int = 0
    position: int = 0
    response: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None

    def begin(self, request: Request, limit: int) -> None:
        """Begin the response to a request."""
        self.request, self.limit, self.response, self.log_probs, self.finish = request, limit, [], [], None

    def append(self, token: int, log_prob: float, end_ids: Collection[int]) -> None:
        """Add a sampled token to the response; sets `finish` if it is the last."""
        self.response.append(token)
        self.log_probs.append(log_prob)
        if token in end_ids:
            self.finish = "stop"
        elif len(self.response) >= self.limit:
            self.finish = "length"

    def follows(self, proposal: Sequence[int], step: int) -> bool:
        """Whether the response is unfinished and its last token equals proposed token number `step`."""
        return self.finish is None and self.response[-1:] == list(proposal[step : step + 1])

    def uncached(self) -> np.ndarray:
        """(L,) int64 tokens that are not cached yet: of the request, or, once it is cached, of the response."""
        known, prompt = self.cached, self.request.token_ids
        if known < len(prompt):
            return prompt[known:].astype(np.int64)
        return np.array(self.response[known - len(prompt) :], np.int64)

    def is_continued_by(self, request: Request) -> bool:
        """Whether a request continues the cached conversation; otherwise its cache is dropped.

        Its tokens and images must begin with those of the last request and with its response, whose last token is not
        cached yet. A response that never finished, because a pass failed, cannot be continued.
        """
        held, length = self.request.token_ids, len(self.request.token_ids)
        responded = request.token_ids[length : length + len(self.response)].tolist()
        seen = [image.key for image in self.request.images]
        return (
            self.finish is not None
            and responded == self.response
            and np.array_equal(request.token_ids[:length], held)
            and [image.key for image in request.images[: len(seen)]] == seen
        )


class SlotManager:
    """Assigns rows of the KV cache to conversations; the batch of a pass is always in the first rows.

    Args:
        cache: the cache whose rows are assigned.
    """

    def __init__(self, cache: SlotKvCache) -> None:
        self.cache = cache
        self.slots: dict[int, Slot] = {}
        self._owners: list[int | None] = [None] * cache.rows

    @property
    def free(self) -> int:
        """Number of free rows."""
        return self.cache.rows - len(self.slots)

    def add(self, request: Request) -> Slot:
        """Slot of a new conversation; `place` gives it a row."""
        return self.slots.setdefault(request.id, Slot(request))

    def release(self, ids: Iterable[int]) -> None:
        """Free the rows of conversations. Unknown ids are ignored."""
        for identity in ids:
            if (slot := self.slots.pop(identity, None)) is not None and slot.row >= 0:
                self._owners[slot.row] = None
                self.cache.lengths[slot.row] = 0

    def place(self, batch: list[Slot]) -> None:
        """Move the batch to the first rows, cached conversations before new ones, and sort it by row."""
        batch.sort(key=lambda slot: slot.cached == 0)
        taken = sum(slot.cached > 0 for slot in batch)
        self.gather(batch[:taken])
        new = batch[taken:]
        blockers = [r for r in range(taken, taken + len(new)) if self._owners[r] is not None]
        spare = [r for r in range(taken + len(new), self.cache.rows) if self._owners[r] is None]
        self._swap(blockers, spare[: len(blockers)])
        for row, slot in enumerate(new, start=taken):
            slot.row = row
            self._owners[row] = slot.request.id
            self.cache.lengths[row] = 0
        batch.sort(key=lambda slot: slot.row)

    def gather(self, slots: list[Slot]) -> None:
        """Move slots that have rows to the first rows; those already there keep theirs."""
        count = len(slots)
        outside = [slot.row for slot in slots if slot.row >= count]
        inside = {slot.row for slot in slots}
        self._swap([row for row in range(count) if row not in inside], outside)

    def _swap(self, first: list[int], second: list[int]) -> None:
        self.cache.swap(first, second)
        for a, b in zip(first, second, strict=True):
            self._owners[a], self._owners[b] = self._owners[b], self._owners[a]
            for row in (a, b):
                if (owner := self._owners[row]) is not None:
                    self.slots[owner].row = row


# N-gram speculation: the likely next tokens are fed ahead of their sampling, so that one forward pass yields several. A
# proposal never changes a result: every token is still sampled from its own distribution, and everything after a wrong
# proposal is dropped. A token is proposed if nearly all earlier responses with the same prefix continue with it, as in
# the tags around an answer. This is speculative decoding (arXiv 2211.17192) with exact matches in place of rejection,
# because draws are fixed in advance.


@dataclass
class _Node:
    """Responses with the same prefix: their count, and their next tokens."""

    count: int = 0
    following: dict[int, _Node] = field(default_factory=dict)


class NgramProposer:
    """Counts prefixes of responses and proposes their continuations.

    Args:
        depth: leading tokens of a response that are counted; long free text does not repeat itself.
        share: share of the responses that must agree on a token, in (0.5, 1].
        least: responses with the prefix that must have been seen before anything is proposed.
    """

    def __init__(self, depth: int = 16, share: float = 0.9, least: int = 8) -> None:
        self._depth, self._share, self._least = depth, share, least
        self._root = _Node()

    def learn(self, response: Sequence[int]) -> None:
        """Count a response."""
        node = self._root
        node.count += 1
        for token in response[: self._depth]:
            node = node.following.setdefault(token, _Node())
            node.count += 1

    def propose(self, prefix: Sequence[int]) -> list[int]:
        """Tokens that nearly always follow this prefix; never a response's last token, which needs no next logits."""
        node = self._root if len(prefix) < self._depth else _Node()
        proposed: list[int] = []
        for token in prefix:
            node = node.following.get(token, _Node())
        while node.count >= self._least and node.following:
            token, following = max(node.following.items(), key=lambda pair: pair[1].count)
            if following.count < self._share * node.count or not following.following:
                break
            proposed.append(token)
            node = following
        return proposed


# The engine.


class TransformersEngine:
    """`RolloutEngine` over the policy's own model.

    Args:
        policy: its model is shared, not copied; the trainer changes the weights in place. An empty one gets its weights
            before the first `update_weights`.
        max_conversations: cached conversations at a time; further requests wait.
        prefill_tokens: padded tokens of one pass at most; a longer conversation has a pass of its own.
        reuse_cache: keep the cache between turns; off prefills every conversation each turn (for measurements).
        draft_share: share of the responses that must agree on a token for it to be proposed; None: no speculation, one
            token per pass.

    Attributes:
        context: tokens of a conversation at most.
        proposer: proposes tokens for n-gram speculation.
    """

    name = "transformers"
    in_process = True
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
        self._pass_tokens = prefill_tokens
        self._reuse = reuse_cache
        self._draft_share = draft_share
        self.context = int(policy.model.config.text_config.max_position_embeddings)
        self._queue: list[Request] = []
        self._answered: list[Result] = []
        self._rows = max_conversations
        self._reset()

    # The protocol.

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; see `RolloutEngine`.

        Raises:
            ValueError: a conversation already has a request in the queue.
        """
        waiting = {request.id for request in self._queue}
        for request in requests:
            if request.id in waiting:
                raise ValueError(f"conversation {request.id} already waits for a response; poll or abort it first.")
            waiting.add(request.id)
            if self._limit(request) > 0:
                self._queue.append(request)
            else:
                # The context is full: nothing is computed, and the conversation's slot is unchanged.
                self._answered.append(empty_result(request, "length", self.version))

    @torch.inference_mode()
    def poll(self) -> list[Result]:
        """Sample responses to as many queued requests as there are KV slots.

        Raises:
            RuntimeError: conversations without a request hold all slots.
        """
        if self._answered:
            answered, self._answered = self._answered, []
            return answered
        if not (batch := self._admit()):
            return []
        with self.policy.computing(), sdpa_kernel(_ATTENTION):
            self._encode_images(batch)
            # Cached conversations are in the first rows, and stay there while the new ones are prefilled.
            known = [slot for slot in batch if slot.cached > 0]
            self._prefill([slot for slot in batch if slot.cached == 0])
            self._decode(known)
            while running := [slot for slot in batch if slot.finish is None]:
                self._slots.gather(running)
                self._decode(sorted(running, key=lambda slot: slot.row))
        for slot in batch:
            self.proposer.learn(slot.response)
        results = [self._result(slot) for slot in batch]
        if not self._reuse:
            self.release([slot.request.id for slot in batch])
        return results

    def abort(self, ids: Iterable[int]) -> None:
        """Return queued requests with `abort`; no others are in flight between two polls."""
        dropped = set(ids)
        self._answered += [empty_result(r, "abort", self.version) for r in self._queue if r.id in dropped]
        self._queue = [request for request in self._queue if request.id not in dropped]
        self.release(dropped)

    def release(self, ids: Iterable[int]) -> None:
        """Free the slots of conversations."""
        self._slots.release(ids)

    def update_weights(self, weights: WeightSource | None, version: int) -> None:
        """Load new weights; drops everything computed with the old ones."""
        if weights is not None:
            own = dict(self.policy.model.named_parameters())
            with torch.no_grad():
                for name, tensor in weights.read():
                    own[name].copy_(transpose_experts(name, tensor))
        self.version = version
        self._reset()

    def offload(self) -> None:
        """Free cache and features; the weights are the trainer's."""
        self._reset()

    def close(self) -> None:
        """Free cache and features, drop requests."""
        self._queue, self._answered = [], []
        self._reset()

    # Batches.

    def _reset(self) -> None:
        # New buffers too: results and memory must not depend on how far the old ones have grown.
        self._cache = SlotKvCache(self._rows)
        self._slots = SlotManager(self._cache)
        self._bank = FeatureBank()
        self._device = self.policy.model.device
        self._banned = torch.from_numpy(self.policy.banned_ids).to(self._device)
        self.proposer = NgramProposer() if self._draft_share is None else NgramProposer(share=self._draft_share)

    def _admit(self) -> list[Slot]:
        """Move requests from the queue to slots; those without a free slot stay in the queue."""
        slots = self._slots
        batch: list[Slot] = []
        waiting: list[Request] = []
        for request in self._queue:
            if (slot := slots.slots.get(request.id)) is not None and not slot.is_continued_by(request):
                slots.release([request.id])
                slot = None
            if slot is None and slots.free == 0:
                waiting.append(request)
                continue
            slot = slot or slots.add(request)
            slot.begin(request, self._limit(request))
            batch.append(slot)
        self._queue = waiting
        if waiting and not batch:
            raise RuntimeError(
                f"{len(waiting)} requests wait, but conversations without a request hold all KV slots "
                f"(rollout.max_conversations={self._rows}); release those that have ended."
            )
        slots.place(batch)
        return batch

    def _limit(self, request: Request) -> int:
        """Tokens of a response at most; 0 or less if the context is full."""
        room, wanted = self.context - len(request.token_ids), request.max_new_tokens
        return room if wanted is None else min(room, wanted)

    def _result(self, slot: Slot) -> Result:
        assert slot.finish is not None
        return Result(
            id=slot.request.id,
            token_ids=np.asarray(slot.response, np.int32),
            log_probs=np.asarray(slot.log_probs, np.float32),
            finish_reason=slot.finish,
            weight_version=self.version,
        )

    # Prefill and decode.

    def _prefill(self, slots: list[Slot]) -> None:
        """Prefill new conversations, equal prompts once, and sample their first tokens."""
        prompts: dict[tuple[bytes, tuple[str, ...]], list[Slot]] = {}
        for slot in slots:
            key = (slot.request.token_ids.tobytes(), tuple(image.key for image in slot.request.images))
            prompts.setdefault(key, []).append(slot)
        groups = sorted(prompts.values(), key=lambda members: len(members[0].request.token_ids))
        for chunk in self._plan_passes(groups, [len(members[0].request.token_ids) for members in groups]):
            targets = torch.full((len(chunk), max(map(len, chunk))), -1)
            for index, members in enumerate(chunk):
                targets[index, : len(members)] = torch.tensor([slot.row for slot in members])
            self._cache.begin_fresh(targets)
            firsts = [members[0] for members in chunk]
            states = self._forward(firsts, [slot.uncached() for slot in firsts], [[] for _ in firsts], mask=None)
            logits = self._logits(states, 0, list(range(len(chunk))))
            for first, *others in chunk:
                for slot in others:
                    slot.cached, slot.images, slot.position = first.cached, first.images, first.position
            sources = [index for index, members in enumerate(chunk) for _ in members]
            members = [slot for members in chunk for slot in members]
            self._sample(members, partial(_pick, logits[sources]), [[] for _ in members])
            note_progress()

    def _decode(self, slots: list[Slot]) -> None:
        """Feed uncached and proposed tokens, and sample; the slots are in the first rows.

        In the first pass of a turn the uncached tokens are the last sampled one and the observation, later only the
        last sampled one.
        """
        uncached = [slot.uncached() for slot in slots]
        first = 0
        for chunk in self._plan_passes(list(zip(slots, uncached, strict=True)), list(map(len, uncached))):
            fed = [slot for slot, _ in chunk]
            proposals = self._propose(fed)
            feeds = [np.append(new, ids).astype(np.int64) for (_, new), ids in zip(chunk, proposals, strict=True)]
            states = self._forward(fed, feeds, proposals, self._cache.begin(len(chunk), max(map(len, feeds)), first))
            self._sample(fed, partial(self._logits, states), proposals)
            first += len(chunk)
            note_progress()

    def _plan_passes(self, items: list[Item], lengths: list[int]) -> list[list[Item]]:
        """Split items into forward passes, in order."""
        plan = plan_micro_batches(lengths, self._pass_tokens, order="given")
        return [[items[index] for index in batch] for batch in plan]

    def _propose(self, slots: list[Slot]) -> list[list[int]]:
        """Tokens that likely continue each response; never the last one under its limit, which is only sampled."""
        if self._draft_share is None:
            return [[] for _ in slots]
        begun = [tuple(slot.response) for slot in slots]
        proposed = {response: self.proposer.propose(response) for response in set(begun)}
        return [
            proposed[response][: max(0, slot.limit - len(response) - 1)]
            for slot, response in zip(slots, begun, strict=True)
        ]

    def _sample(self, slots: list[Slot], logits_at: LogitsAt, proposals: Sequence[Sequence[int]]) -> None:
        """Sample the next token of each response, and further ones as long as they equal the proposed ones.

        Every token is sampled from its own distribution; a matching proposal only means that the next logits exist.
        """
        active, step, end_ids = list(range(len(slots))), 0, self.policy.end_ids
        while active:
            sampled = [slots[number] for number in active]
            seeds = np.array([slot.request.seed for slot in sampled], np.int64)
            numbers = np.array([slot.request.sampled + len(slot.response) for slot in sampled], np.int64)
            sampling = [slot.request.sampling for slot in sampled]
            draws = uniform_draws(seeds, numbers)
            chosen, log_probs = sample_tokens(logits_at(step, active), sampling, draws, self._banned)
            for slot, token, log_prob in zip(sampled, chosen.tolist(), log_probs.tolist(), strict=True):
                slot.append(token, log_prob, end_ids)
            active = [number for number in active if slots[number].follows(proposals[number], step)]
            for number in active:  # the proposed token was fed, so it is cached
                slots[number].cached += 1
                slots[number].position += 1
            step += 1
        # The next pass overwrites the tokens after a wrong proposal.
        self._cache.lengths[[slot.row for slot in slots]] = [slot.cached for slot in slots]

    # All calls of the model.

    def _encode_images(self, slots: Sequence[Slot]) -> None:
        """Encode images of requests that are not in the bank."""
        shown = (image for slot in slots for image in slot.request.images[slot.images :])
        missing = {image.key: image for image in shown if image.key not in self._bank}
        if missing:
            self._bank.add(self.policy.network.encode(list(missing.values())))

    def _forward(
        self,
        slots: Sequence[Slot],
        feeds: Sequence[np.ndarray],
        proposals: Sequence[Sequence[int]],
        mask: Tensor | None,
    ) -> Tensor:
        """Feed tokens, and count all but the proposed ones as cached.

        Args:
            slots: conversations whose images are in the bank.
            feeds: (L,) int64 tokens of each.
            proposals: the last tokens of each feed that are proposals.
            mask: see `SlotKvCache.begin`; None: causal over the feed.

        Returns:
            (N, 1 + longest proposal, hidden) states after the last token before the proposal, and after each proposed
            token.
        """
        ids = np.zeros((len(slots), max(map(len, feeds))), np.int64)
        positions = np.zeros((3, *ids.shape), np.int64)
        wanted = np.empty((len(slots), 1 + max(map(len, proposals))), np.int64)
        ahead = np.arange(wanted.shape[1])
        shown: list[str] = []
        codec = self.policy.codec
        # Most feeds of a turn are equal, and their positions differ only by an offset.
        known: dict[tuple[bytes, tuple[tuple[int, int, int], ...]], tuple[np.ndarray, int]] = {}
        for index, (slot, feed, proposal) in enumerate(zip(slots, feeds, proposals, strict=True)):
            new, size = slot.request.images[slot.images :], len(feed)
            key = (feed.tobytes(), tuple(image.grid for image in new))
            if key not in known:
                known[key] = extend_positions(feed, key[1], codec.image_pad_id, codec.merge_size)
            placed, length = known[key]
            ids[index, :size] = feed
            positions[:, index, :size] = placed + slot.position
            wanted[index] = np.minimum(ahead + size - len(proposal), size) - 1
            shown += [image.key for image in new]
            slot.position += length - len(proposal)
            slot.cached += size - len(proposal)
            slot.images = len(slot.request.images)
        return self.policy.network(
            torch.from_numpy(ids).to(self._device),
            torch.from_numpy(positions).to(self._device),
            features=self._bank.tables,
            rows=torch.from_numpy(self._bank.rows(shown)).to(self._device) if shown else None,
            attention_mask=None if mask is None else mask.to(self._device),
            cache=self._cache,
            wanted=torch.from_numpy(wanted).to(self._device),
        )

    def _logits(self, states: Tensor, step: int, active: list[int]) -> Tensor:
        """(len(active), V) logits of some slots after `step` proposed tokens."""
        return self.policy.network.logits(states[active, step])


def _pick(logits: Tensor, _: int, active: list[int]) -> Tensor:
    return logits[active]


# Sampling: a draw is a function of the episode's seed and the token's number, never of the rest of the batch. Token n
# of an episode takes the n-th number of its random stream and inverts the cumulative distribution at it. Only float
# rounding of the logits can differ between batches.


def uniform_draws(seeds: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Numbers of per-episode random streams (SplitMix64, Steele et al. 2014).

    Args:
        seeds: (N,) int64 seeds.
        numbers: (N,) int64 index of the draw within the stream, from 0.

    Returns:
        (N,) float64 in [0, 1), multiples of 2^-53.
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds.astype(np.uint64)) + (numbers.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def sample_tokens(
    logits: Tensor, sampling: Sequence[SamplingOptions], draws: np.ndarray, banned_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Choose the next token of each row.

    Args:
        logits: (N, V) of any float type.
        sampling: N options.
        draws: (N,) float64 in [0, 1), one per row; unused by greedy rows.
        banned_ids: (K,) int64 ids that are never chosen.

    Returns:
        (N,) int64 ids, and (N,) float32 log-probs after temperature (greedy rows: untempered) and banned ids, before
        top-p and top-k.
    """
    scores = logits.float().index_fill(1, banned_ids, -torch.inf)
    greedy = [options.greedy for options in sampling]
    temperature = scores.new_tensor([1.0 if o.greedy else o.temperature for o in sampling])
    log_probs = torch.log_softmax(scores / temperature[:, None], dim=-1)
    if all(greedy):
        chosen = scores.argmax(-1)
    else:
        chosen = _invert(_restrict(log_probs.double().exp(), sampling), draws)
        if any(greedy):
            chosen = torch.where(scores.new_tensor(greedy, dtype=torch.bool), scores.argmax(-1), chosen)
    return chosen, log_probs.gather(1, chosen[:, None]).squeeze(1)


def _invert(probs: Tensor, draws: np.ndarray) -> Tensor:
    """(N,) first token of each row at which the cumulative distribution exceeds the draw."""
    cumulative = probs.cumsum(-1)
    total = cumulative[:, -1:]
    points = torch.from_numpy(draws).to(cumulative)[:, None] * total
    # If the product rounded up to the total, no token would exceed it.
    points = torch.minimum(points, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, points, right=True).squeeze(1)


def _restrict(probs: Tensor, sampling: Sequence[SamplingOptions]) -> Tensor:
    if all(options.top_p == 1.0 and options.top_k == 0 for options in sampling):
        return probs
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    top_p = torch.tensor([options.top_p for options in sampling], device=probs.device, dtype=probs.dtype)
    top_k = torch.tensor([options.top_k or probs.shape[1] for options in sampling], device=probs.device)
    before = ordered.cumsum(-1) - ordered
    keep = (before < top_p[:, None]) & (torch.arange(probs.shape[1], device=probs.device) < top_k[:, None])
    keep[:, 0] = True
    return torch.zeros_like(probs).scatter(1, order, torch.where(keep, ordered, torch.zeros_like(ordered)))
