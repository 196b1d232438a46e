"""Reading: new tokens and pictures of conversations pass the model once, and leave keys, values and features behind.

A picture passes the vision tower once, whoever shows it and how often; a token passes the language model once. Logits
are made where somebody samples from them and nowhere else: with a large vocabulary they outweigh all other states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from geo_sokoban_pipeline.policies.images import EncodedImage
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.policies.positions import extend_positions
from geo_sokoban_pipeline.policies.text import place_images, run_text
from geo_sokoban_pipeline.policies.vision import encode_images
from geo_sokoban_pipeline.rollout.engines.feature_bank import FeatureBank
from geo_sokoban_pipeline.rollout.engines.kv_cache import ConversationCache
from geo_sokoban_pipeline.rollout.engines.seating import HeldConversation

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
        self._core = policy.model.model
        self._head = policy.model.lm_head
        self._device = policy.model.device

    def look(self, talks: Sequence[HeldConversation]) -> None:
        """Encode the pictures of requests that were not seen before."""
        missing: dict[str, EncodedImage] = {}
        for talk in talks:
            for image in talk.request.images[talk.pictures :]:
                if image.key not in self._bank:
                    missing[image.key] = image
        if missing:
            processor = self.policy.image_processor
            self._bank.add(encode_images(self._core.visual, list(missing.values()), processor))

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
        scores: Tensor = self._head(states[active, step])
        return scores

    def _run(
        self, ids: np.ndarray, positions: np.ndarray, rows: np.ndarray, mask: Tensor | None, wanted: np.ndarray
    ) -> Tensor:
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
            wanted=torch.from_numpy(wanted).to(self._device),
        )


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
