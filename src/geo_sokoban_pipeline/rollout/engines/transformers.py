"""Rollout engine in this process: batched sampling with one key-value cache that outlives the turns of a conversation.

What a conversation has paid for once is not paid again: its past stays in the cache and only new tokens are prefilled,
each distinct picture passes the vision tower once per weight version, and equal prompts of a group are prefilled once.
Log-probs equal a plain forward pass over the whole episode to 1e-4 in float32 (tested).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from geo_sokoban_pipeline.policies.forward import encode_images, place_images, run_text
from geo_sokoban_pipeline.policies.images import EncodedImage
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.policies.positions import extend_positions
from geo_sokoban_pipeline.rollout.engines.base import FinishReason, Request, Result
from geo_sokoban_pipeline.rollout.engines.feature_bank import FeatureBank
from geo_sokoban_pipeline.rollout.engines.kv_cache import ConversationCache
from geo_sokoban_pipeline.rollout.engines.sampling import sample_tokens, uniform_draws


@dataclass
class _Conversation:
    """A request in work and what the cache holds of its conversation."""

    request: Request
    row: int = -1
    cached: int = 0
    pictures: int = 0
    position: int = 0
    reply: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None


class TransformersEngine:
    """`RolloutEngine` over the policy's own model.

    Args:
        policy: its model is shared, not copied; the trainer changes the weights in place.
        max_conversations: conversations held at the same time; further ones wait.
        prefill_tokens: padded tokens of one prefill pass at most.
        reuse_cache: keep the cache between turns; off re-reads every conversation each turn (to measure its worth).
    """

    name = "transformers"
    software_version = transformers.__version__
    seeded = True

    def __init__(
        self, policy: Policy, *, max_conversations: int = 512, prefill_tokens: int = 16_384, reuse_cache: bool = True
    ) -> None:
        self.policy = policy
        self.version = 0
        self._core = policy.model.model
        self._head = policy.model.lm_head
        self._device = policy.model.device
        self._banned = torch.from_numpy(policy.banned_ids).to(self._device)
        self._prefill_tokens = prefill_tokens
        self._reuse = reuse_cache
        self._rows = max_conversations
        self._longest = int(policy.model.config.text_config.max_position_embeddings)
        self._queue: list[Request] = []
        self._aborted: list[Result] = []
        self._held: dict[int, _Conversation] = {}
        self._row_owner: list[int | None] = [None] * max_conversations
        self._cache = ConversationCache(len(self._core.language_model.layers), max_conversations)
        self._bank = FeatureBank()

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
            self._queue.append(request)

    @torch.inference_mode()
    def poll(self) -> list[Result]:
        """Answer as many queued requests as there are rows for: the turn's batch.

        Raises:
            RuntimeError: every row is held by a conversation that asks for nothing.
        """
        if self._aborted:
            aborted, self._aborted = self._aborted, []
            return aborted
        batch = self._admit()
        if not batch:
            return []
        self._encode_new_images(batch)
        fresh = [talk for talk in batch if talk.cached == 0]
        known = [talk for talk in batch if talk.cached > 0]
        logits: dict[int, Tensor] = {}
        if fresh:
            logits |= self._prefill_fresh(fresh)
        if known:
            logits |= self._prefill_known(known)
        self._decode(batch, logits)
        results = [self._finish(talk) for talk in batch]
        if not self._reuse:
            self.release([talk.request.id for talk in batch])
        return results

    def abort(self, ids: Iterable[int]) -> None:
        """Answer queued requests with `abort`; nothing else is in flight between two polls."""
        dropped = set(ids)
        nothing = np.empty(0, np.int32), np.empty(0, np.float32)
        self._aborted += [Result(r.id, *nothing, "abort", self.version) for r in self._queue if r.id in dropped]
        self._queue = [request for request in self._queue if request.id not in dropped]
        self.release(dropped)

    def release(self, ids: Iterable[int]) -> None:
        """Free the rows of conversations."""
        for identity in ids:
            talk = self._held.pop(identity, None)
            if talk is not None and talk.row >= 0:
                self._row_owner[talk.row] = None
                self._cache.lengths[talk.row] = 0

    def update_weights(self, weights: Iterable[tuple[str, Any]] | None, version: int) -> None:
        """Take new weights; everything computed with the old ones is forgotten."""
        if weights is not None:
            own = dict(self.policy.model.named_parameters())
            with torch.no_grad():
                for name, tensor in weights:
                    own[name].copy_(tensor)
        self.version = version
        self.release(list(self._held))
        self._bank = FeatureBank()
        # New buffers too: how far the old ones have grown must not show in anything.
        self._cache = ConversationCache(len(self._core.language_model.layers), self._rows)

    def close(self) -> None:
        """Free cache and features, forget requests."""
        self._queue, self._aborted = [], []
        self.release(list(self._held))
        self._bank = FeatureBank()
        self._cache = ConversationCache(len(self._core.language_model.layers), self._rows)

    def _admit(self) -> list[_Conversation]:
        free = sum(owner is None for owner in self._row_owner)
        batch: list[_Conversation] = []
        waiting: list[Request] = []
        for request in self._queue:
            talk = self._held.get(request.id)
            if talk is not None and not _continues(request, talk):
                self.release([request.id])
                free, talk = free + 1, None
            if talk is None and free == 0:
                waiting.append(request)
                continue
            if talk is None:
                free -= 1
                talk = self._held[request.id] = _Conversation(request)
            talk.request, talk.reply, talk.log_probs, talk.finish = request, [], [], None
            batch.append(talk)
        self._queue = waiting
        if waiting and not batch:
            raise RuntimeError(
                f"{len(waiting)} requests wait, but all rows (rollout.max_conversations={self._rows}) are held by "
                "conversations that ask for nothing; release those that have ended."
            )
        self._place(batch)
        return batch

    def _place(self, batch: list[_Conversation]) -> None:
        """Give the batch the first rows, those with a past before the new ones."""
        batch.sort(key=lambda talk: talk.cached == 0)
        self._move([talk for talk in batch if talk.cached > 0])
        taken = sum(talk.cached > 0 for talk in batch)
        new = batch[taken:]
        blockers = [r for r in range(taken, taken + len(new)) if self._row_owner[r] is not None]
        spare = [r for r in range(taken + len(new), self._rows) if self._row_owner[r] is None]
        self._swap(blockers, spare[: len(blockers)])
        for row, talk in enumerate(new, start=taken):
            talk.row = row
            self._row_owner[row] = talk.request.id
            self._cache.lengths[row] = 0
        batch.sort(key=lambda talk: talk.row)

    def _move(self, talks: list[_Conversation]) -> None:
        """Bring conversations that hold rows to the first rows; those already there keep their place."""
        count = len(talks)
        outside = [talk.row for talk in talks if talk.row >= count]
        inside = {talk.row for talk in talks}
        gaps = [row for row in range(count) if row not in inside]
        self._swap(gaps, outside)
        talks.sort(key=lambda talk: talk.row)

    def _swap(self, first: list[int], second: list[int]) -> None:
        self._cache.swap(first, second)
        for a, b in zip(first, second, strict=True):
            self._row_owner[a], self._row_owner[b] = self._row_owner[b], self._row_owner[a]
            for row in (a, b):
                owner = self._row_owner[row]
                if owner is not None:
                    self._held[owner].row = row

    def _encode_new_images(self, batch: list[_Conversation]) -> None:
        missing: dict[str, EncodedImage] = {}
        for talk in batch:
            for image in talk.request.images[talk.pictures :]:
                if image.key not in self._bank:
                    missing[image.key] = image
        if missing:
            processor = self.policy.image_processor
            self._bank.add(encode_images(self._core.visual, list(missing.values()), processor))

    def _prefill_fresh(self, talks: list[_Conversation]) -> dict[int, Tensor]:
        """Prefill conversations without a past, equal prompts once; returns last logits by row."""
        prompts: dict[tuple[bytes, tuple[str, ...]], list[_Conversation]] = {}
        for talk in talks:
            key = (talk.request.token_ids.tobytes(), tuple(image.key for image in talk.request.images))
            prompts.setdefault(key, []).append(talk)
        groups = sorted(prompts.values(), key=lambda members: len(members[0].request.token_ids))
        logits: dict[int, Tensor] = {}
        for chunk in _chunk(groups, [len(g[0].request.token_ids) for g in groups], self._prefill_tokens):
            targets = torch.full((len(chunk), max(map(len, chunk))), -1)
            for index, members in enumerate(chunk):
                targets[index, : len(members)] = torch.tensor([talk.row for talk in members])
            self._cache.begin_fresh(targets)
            last = self._pass([members[0] for members in chunk], mask=None)
            for index, members in enumerate(chunk):
                for talk in members:
                    self._note(talk, members[0].position)
                    logits[talk.row] = last[index]
        return logits

    def _prefill_known(self, talks: list[_Conversation]) -> dict[int, Tensor]:
        """Prefill what is new of conversations with a past; they hold the first rows."""
        feeds = [len(talk.request.token_ids) - talk.cached for talk in talks]
        mask = self._cache.begin(len(talks), max(feeds))
        last = self._pass(talks, mask)
        for talk in talks:
            self._note(talk, talk.position)
        return {talk.row: last[index] for index, talk in enumerate(talks)}

    def _pass(self, talks: list[_Conversation], mask: Tensor | None) -> Tensor:
        """Run the unread tokens of conversations; returns (N, V) logits after the last token of each."""
        feeds = [talk.request.token_ids[talk.cached :] for talk in talks]
        width = max(map(len, feeds))
        ids = np.zeros((len(talks), width), np.int64)
        positions = np.zeros((3, len(talks), width), np.int64)
        rows: list[np.ndarray] = []
        codec = self.policy.codec
        # Most feeds of a turn are equal; their positions differ by where they start.
        known: dict[tuple[bytes, tuple[tuple[int, int, int], ...]], tuple[np.ndarray, int]] = {}
        for index, (talk, feed) in enumerate(zip(talks, feeds, strict=True)):
            new = talk.request.images[talk.pictures :]
            grids = tuple(image.grid for image in new)
            key = (feed.tobytes(), grids)
            if key not in known:
                known[key] = extend_positions(feed, grids, codec.image_pad_id, codec.merge_size)
            placed, length = known[key]
            ids[index, : len(feed)] = feed
            positions[:, index, : len(feed)] = placed + talk.position
            talk.position += length
            rows.append(self._bank.rows([image.key for image in new]))
        hidden = self._run(ids, positions, np.concatenate(rows), mask)
        ends = torch.tensor([len(feed) - 1 for feed in feeds])
        return self._head(hidden[torch.arange(len(talks)), ends])

    def _run(self, ids: np.ndarray, positions: np.ndarray, rows: np.ndarray, mask: Tensor | None) -> Tensor:
        language = self._core.language_model
        tokens = torch.from_numpy(ids).to(self._device)
        embeddings = language.embed_tokens(tokens)
        image_mask, deepstack = None, []
        if len(rows):
            image_mask = tokens == self.policy.codec.image_pad_id
            picked = torch.from_numpy(rows).to(self._device)
            embeddings = place_images(embeddings, image_mask, self._bank.embeddings.index_select(0, picked))
            deepstack = [layer.index_select(0, picked) for layer in self._bank.deepstack]
        return run_text(
            language,
            embeddings,
            torch.from_numpy(positions).to(self._device),
            attention_mask=None if mask is None else mask.to(self._device),
            cache=self._cache,
            image_mask=image_mask,
            deepstack=deepstack,
        )

    def _note(self, talk: _Conversation, position: int) -> None:
        """Record that everything of a conversation's request is cached."""
        talk.cached = len(talk.request.token_ids)
        talk.pictures = len(talk.request.images)
        talk.position = position
        self._cache.lengths[talk.row] = talk.cached

    def _decode(self, batch: list[_Conversation], logits: dict[int, Tensor]) -> None:
        """Sample until every reply has ended; ended rows leave the batch at once."""
        running = sorted(batch, key=lambda talk: talk.row)
        scores = torch.stack([logits[talk.row] for talk in running])
        while running:
            self._take(running, scores)
            ended = [talk for talk in running if talk.finish is not None]
            running = [talk for talk in running if talk.finish is None]
            if not running:
                return
            if ended:
                self._move(running)
            mask = self._cache.begin(len(running), 1)
            ids = np.array([[talk.reply[-1]] for talk in running], np.int64)
            positions = np.array([talk.position for talk in running], np.int64)[None, :, None].repeat(3, axis=0)
            hidden = self._run(ids, positions, np.empty(0, np.int64), mask)
            self._cache.advance(len(running))
            for talk in running:
                talk.cached += 1
                talk.position += 1
            scores = self._head(hidden[:, 0])

    def _take(self, running: list[_Conversation], scores: Tensor) -> None:
        """Sample one token of each running reply and note whether it ends."""
        seeds = np.array([talk.request.seed for talk in running], np.int64)
        numbers = np.array([talk.request.sampled + len(talk.reply) for talk in running], np.int64)
        sampling = [talk.request.sampling for talk in running]
        chosen, log_probs = sample_tokens(scores, sampling, uniform_draws(seeds, numbers), self._banned)
        end = self.policy.codec.end_id
        for talk, token, log_prob in zip(running, chosen.tolist(), log_probs.tolist(), strict=True):
            talk.reply.append(token)
            talk.log_probs.append(log_prob)
            limit = self._longest - len(talk.request.token_ids)
            if talk.request.max_new_tokens is not None:
                limit = min(limit, talk.request.max_new_tokens)
            if token == end:
                talk.finish = "stop"
            elif len(talk.reply) >= limit:
                talk.finish = "length"

    def _finish(self, talk: _Conversation) -> Result:
        assert talk.finish is not None
        return Result(
            id=talk.request.id,
            token_ids=np.asarray(talk.reply, np.int32),
            log_probs=np.asarray(talk.log_probs, np.float32),
            finish_reason=talk.finish,
            weight_version=self.version,
        )


def _continues(request: Request, talk: _Conversation) -> bool:
    """Whether a request goes on from what is cached: another one under a known id starts anew."""
    held, length = talk.request.token_ids, len(talk.request.token_ids)
    replied = request.token_ids[length : length + len(talk.reply)].tolist()
    return len(talk.reply) > 0 and replied == talk.reply and np.array_equal(request.token_ids[:length], held)


def _chunk(items: list[Any], lengths: Sequence[int], budget: int) -> list[list[Any]]:
    """Cut a list sorted by length so that (longest × count) of each piece stays within a budget, one item at least."""
    chunks: list[list[Any]] = []
    for item, length in zip(items, lengths, strict=True):
        if chunks and length * (len(chunks[-1]) + 1) <= budget:
            chunks[-1].append(item)
        else:
            chunks.append([item])
    return chunks
