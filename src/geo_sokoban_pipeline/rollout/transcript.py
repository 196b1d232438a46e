"""Transcript: what was said in an episode, as tokens, pictures and turns that always cover one another.

Every message is encoded once, where it is added; a turn spans exactly the tokens of its message.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from geo_sokoban_pipeline.envs.data_uris import read_data_uri
from geo_sokoban_pipeline.policies.chat import join_placeholders, split_placeholders
from geo_sokoban_pipeline.policies.images import EncodedImage
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.engines.base import Result
from geo_sokoban_pipeline.rollout.ledger import TokenLedger
from geo_sokoban_pipeline.seeding import content_hash
from geo_sokoban_pipeline.trajectories import Turn

if TYPE_CHECKING:
    from geo_sokoban_pipeline.rollout.episode import PlaySettings

# Rows were checked against the limits of the data options; these only guard against what never passed them.
_MAX_IMAGE_BYTES = 64 << 20
_MAX_IMAGE_PIXELS = 1 << 26


class Transcript:
    """Tokens, pictures and turns of one episode.

    Attributes:
        ledger: all tokens, with masks and log-probs.
        images: all pictures, in the order of their pads.
        turns: all messages, in order.
        replies: texts of the policy's messages.
    """

    def __init__(self, policy: Policy, settings: PlaySettings) -> None:
        self.ledger = TokenLedger(np.empty(0, np.int32))
        self.images: list[EncodedImage] = []
        self.turns: list[Turn] = []
        self.replies: list[str] = []
        self._policy = policy
        self._filter = settings.image_filter
        self._rollout, self._rules = settings.rollout, settings.rollout.effective_rules
        self._versions: list[tuple[int, int, int]] = []

    def add_prompt(self, row: dict[str, Any]) -> None:
        """Begin with a row of a prompts data set."""
        images = [_decode(source) for source in row.get("images") or []]
        # Images without any placeholder column stay text: a null list never splits the prompt (seed defect 8).
        content = split_placeholders(row["prompt"], images) if images else [{"type": "text", "text": row["prompt"]}]
        encoded = self._read_images(content)
        messages = [{"role": "user", "content": content}]
        self.ledger = TokenLedger(self._policy.codec.encode_prompt(messages, [image.grid for image in encoded]))
        self._add_turn("user", row["prompt"], 0, encoded)

    def add_reply(self, result: Result) -> str:
        """Add what the engine has sampled; returns it as text."""
        start = self.ledger.length
        self.ledger.append(result.token_ids, result.log_probs, trainable=True)
        text = self.read_reply(result)
        self.replies.append(text)
        self._add_turn("assistant", text, start, [])
        self._versions += [(version, start + first, start + last) for version, first, last in result.spans]
        return text

    def read_reply(self, result: Result) -> str:
        """What the engine has sampled, as text without its end."""
        ids = result.token_ids
        return self._policy.codec.decode_reply(ids[:-1] if len(ids) and int(ids[-1]) in self._policy.end_ids else ids)

    def add_observation(self, message: dict[str, Any]) -> bool:
        """Add a message of the environment; False where the rules leave it out because it exceeds the budget."""
        encoded = self._read_images(message["content"])
        ids = self._policy.codec.encode_observation(
            message, [image.grid for image in encoded], separator=self._rules.turn_separator
        )
        budget = self.tokens_left()
        if self._rules.drop_overflowing_observation and budget is not None and len(ids) > budget:
            return False
        start = self.ledger.length
        self.ledger.append(ids, trainable=False)
        self._add_turn("user", join_placeholders(message["content"]), start, encoded)
        return True

    def tokens_left(self) -> int | None:
        """Tokens that may still be added, or None without a limit."""
        rollout, ledger = self._rollout, self.ledger
        limits = []
        if rollout.max_context_tokens is not None:
            limits.append(rollout.max_context_tokens - ledger.length)
        if rollout.max_response_tokens is not None:
            counted = ledger.sampled if self._rules.budget_counts == "sampled" else ledger.length - ledger.prompt_length
            if self._rules.budget_counts_prompt and rollout.max_context_tokens is None:
                counted += ledger.prompt_length
            limits.append(rollout.max_response_tokens - counted)
        return min(limits) if limits else None

    def response(self) -> str:
        """Everything after the prompt, as text with its markup."""
        return self._policy.codec.decode(self.ledger.token_ids[self.ledger.prompt_length :])

    def first_version(self) -> int | None:
        """Version of the weights that sampled the first reply; None without one."""
        return self._versions[0][0] if self._versions else None

    def weight_spans(self) -> list[tuple[int, int, int]]:
        """(version, start, end) of sampled tokens; neighbours of one version are one span."""
        spans: list[tuple[int, int, int]] = []
        for version, start, end in self._versions:
            if spans and spans[-1][0] == version:
                spans[-1] = (version, spans[-1][1], end)
            else:
                spans.append((version, start, end))
        return spans

    def _add_turn(self, role: str, text: str, start: int, images: list[EncodedImage]) -> None:
        shown = list(range(len(self.images), len(self.images) + len(images)))
        self.images.extend(images)
        turn = Turn(role=role, text=text, token_start=start, token_end=self.ledger.length, image_indices=shown)
        self.turns.append(turn)

    def _read_images(self, content: list[dict[str, Any]]) -> list[EncodedImage]:
        images = [item["image"] for item in content if item["type"] == "image"]
        if self._filter is not None:
            images = [self._filter(image) for image in images]
        return [self._policy.reader.read(image) for image in images]


@lru_cache(maxsize=256)
def _decode(uri: str) -> Image.Image:
    """Picture of a prompt; the episodes of a group share it."""
    image = read_data_uri(uri, max_bytes=_MAX_IMAGE_BYTES, max_pixels=_MAX_IMAGE_PIXELS)
    image.info["content_key"] = f"uri:{content_hash(uri)}"
    return image
