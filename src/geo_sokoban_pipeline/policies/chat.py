"""Chat encoding: the one place that uses the chat template, and extends a conversation by token deltas.

History is never rendered again. The first prompt is the template's rendering; a later observation is the difference
between two renderings of dummy messages, so a template that rewrites earlier turns cannot change an earlier token.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from cachetools import LRUCache

from geo_sokoban_pipeline.seeding import content_hash

Message = dict[str, Any]
_DUMMIES: tuple[Message, ...] = ({"role": "system", "content": "d"}, {"role": "user", "content": "d"})
_CACHED_TEXTS = 4096
_DECODING = threading.Lock()


class ChatCodec:
    """Encodes messages as token ids with image pads expanded, and decodes ids.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        merge_size: patches per side that one image token covers.
    """

    def __init__(self, tokenizer: Any, merge_size: int) -> None:
        self.tokenizer = tokenizer
        self.merge_size = merge_size
        self.template: str = tokenizer.chat_template
        self.image_pad_id = self._token_id("<|image_pad|>")
        self.end_id = self._token_id("<|im_end|>")
        self._encoded: LRUCache[Hashable, np.ndarray] = LRUCache(_CACHED_TEXTS)
        self._decoded: LRUCache[tuple[int, ...], str] = LRUCache(_CACHED_TEXTS)
        self.separator_ids = self._encode(self._separator())

    def encode_prompt(
        self, messages: Sequence[Message], grids: Sequence[tuple[int, int, int]], tools: list[Any] | None = None
    ) -> np.ndarray:
        """(L,) int32 ids of the template's rendering with the generation prompt.

        Raises:
            ValueError: the number of images in the text differs from that of the grids.
        """
        key = (*map(_message_key, messages), tuple(grids), repr(tools))
        return self._remember(key, lambda: self.expand(self._encode(self.render(messages, tools=tools)), grids))

    def encode_observation(
        self,
        message: Message,
        grids: Sequence[tuple[int, int, int]],
        *,
        separator: bool,
        tools: list[Any] | None = None,
    ) -> np.ndarray:
        """(L,) int32 ids that an observation adds: its turn and the header of the next response.

        Args:
            separator: begin with the template's text between a response's end token and the next turn (a newline in
                ChatML); slime omits it.
        """
        key = (_message_key(message), separator, tuple(grids), repr(tools))
        return self._remember(key, lambda: self.expand(self._encode_delta(message, separator, tools), grids))

    def render(
        self, messages: Sequence[Message], *, generation_prompt: bool = True, tools: list[Any] | None = None
    ) -> str:
        """Text of messages by the chat template, one `<|image_pad|>` an image."""
        plain = [_without_images(message) for message in messages]
        text = self.tokenizer.apply_chat_template(
            plain, tokenize=False, add_generation_prompt=generation_prompt, tools=tools, chat_template=self.template
        )
        return str(text)

    def render_observation(self, message: Message, *, tools: list[Any] | None = None) -> str:
        """Text that an observation adds after a response's end token, as `encode_observation` with separator."""
        before = self.render(_DUMMIES, generation_prompt=False, tools=tools)
        return self._separator() + self.render([*_DUMMIES, message], tools=tools).removeprefix(before)

    @cached_property
    def rewrites_history(self) -> bool:
        """Whether the template renders earlier responses differently from the last one.

        Templates of Thinking models do: they open the thoughts themselves, and omit them from earlier responses.
        """
        question: Message = {"role": "user", "content": "d"}
        response = "<think>\nd\n</think>\n\nd"
        later = self.render([question, {"role": "assistant", "content": response}, question])
        end = self.decode([self.end_id])
        return later != self.render([question]) + response + end + self.render_observation(question)

    def encode_text(self, text: str) -> np.ndarray:
        """(L,) int32 ids of a text; special tokens are recognised, none are added."""
        return self._remember((text,), lambda: self._encode(text))

    def decode(self, token_ids: np.ndarray | list[int], *, keep_special: bool = True) -> str:
        """Text of ids."""
        # The wrapper around the backend looks at every single id, which takes longer than decoding.
        ids = np.asarray(token_ids, np.int64).tolist()
        return str(self.tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=not keep_special))

    def decode_response(self, token_ids: np.ndarray | list[int]) -> str:
        """Text of a sampled span without its end token."""
        ids = tuple(map(int, token_ids))
        with _DECODING:  # also called by functions of a user's, in their thread
            if (known := self._decoded.get(ids)) is None:
                known = self._decoded[ids] = self.decode(list(ids[:-1] if ids[-1:] == (self.end_id,) else ids))
        return known

    def expand(self, token_ids: np.ndarray, grids: Sequence[tuple[int, int, int]]) -> np.ndarray:
        """Repeat each image pad by the number of tokens its image takes.

        Raises:
            ValueError: the numbers of pads and grids differ.
        """
        pads = token_ids == self.image_pad_id
        if int(pads.sum()) != len(grids):
            raise ValueError(f"the text holds {int(pads.sum())} images, but {len(grids)} were given.")
        if not len(grids):
            return token_ids
        repeats = np.ones(len(token_ids), np.int64)
        repeats[pads] = [t * h * w // self.merge_size**2 for t, h, w in grids]
        return np.repeat(token_ids, repeats)

    def hashes(self) -> dict[str, str]:
        """Content hashes of tokenizer and template, as trajectory files record them."""
        return {
            "tokenizer": content_hash(self.tokenizer.backend_tokenizer.to_str()),
            "template": content_hash(self.template),
        }

    def _separator(self) -> str:
        end = "<|im_end|>"
        text = self.render(
            [{"role": "user", "content": "d"}, {"role": "assistant", "content": "d"}], generation_prompt=False
        )
        return text[text.rindex(end) + len(end) :]

    def _encode_delta(self, message: Message, separator: bool, tools: list[Any] | None) -> np.ndarray:
        trim = len(self._encode(self.render(_DUMMIES, generation_prompt=False, tools=tools)))
        delta = self._encode(self.render([*_DUMMIES, message], tools=tools))[trim:]
        return np.concatenate([self.separator_ids, delta]) if separator else delta

    def _encode(self, text: str) -> np.ndarray:
        return np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)

    def _remember(self, key: Hashable, encode: Callable[[], np.ndarray]) -> np.ndarray:
        """Cached read-only ids: rendering and encoding a text are the most expensive part of an observation."""
        if (known := self._encoded.get(key)) is None:
            known = self._encoded[key] = encode()
            known.setflags(write=False)
        return known

    def _token_id(self, token: str) -> int:
        found = self.tokenizer.convert_tokens_to_ids(token)
        if found is None or found == self.tokenizer.unk_token_id:
            raise ValueError(f"the tokenizer has no {token}: it does not belong to a Qwen vision-language policy.")
        return int(found)


def split_placeholders(text: str, images: Sequence[Any], placeholder: str = "<image>") -> list[dict[str, Any]]:
    """Content items of a text with image placeholders; empty text items are dropped.

    Raises:
        AssertionError: too few or too many images for the placeholders, as in slime's loader (`docs/deviations.md`).
    """
    pieces = text.split(placeholder)
    needed = len(pieces) - 1
    assert len(images) >= needed, f"not enough images: {needed} placeholders, {len(images)} images"
    assert len(images) == needed, f"image count mismatch: {needed} placeholders, {len(images)} images"
    items: list[dict[str, Any]] = []
    for index, piece in enumerate(pieces):
        if piece:
            items.append({"type": "text", "text": piece})
        if index < needed:
            image = images[index]
            items.append(image if isinstance(image, dict) else {"type": "image", "image": image})
    return items


def join_placeholders(content: str | list[dict[str, Any]], placeholder: str = "<image>") -> str:
    """Text of content items, with a placeholder for each image; the inverse of `split_placeholders`."""
    if isinstance(content, str):
        return content
    return "".join(item["text"] if item["type"] == "text" else placeholder for item in content)


def _message_key(message: Message) -> Hashable:
    """Cache key of a message's rendering; None stands for an image, so no text can collide with it."""
    content = message["content"]
    parts = content if isinstance(content, str) else tuple(i["text"] if i["type"] == "text" else None for i in content)
    return (message["role"], parts, repr({**message, "content": None}) if len(message) > 2 else None)


def _without_images(message: Message) -> Message:
    content = message["content"]
    if isinstance(content, str):
        return message
    return {**message, "content": [item if item["type"] == "text" else {"type": "image"} for item in content]}
