"""The graded text of an episode: the policy's responses without its thoughts, never an observation."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable

# slime's rule: a text is repetitive if its last 10,000 characters compress more than tenfold.
REPETITION_CHARACTERS = 10_000
REPETITION_RATIO = 10.0

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.IGNORECASE | re.DOTALL)
_THINK_END = "</think>"
_BOX = "\\boxed{"


def visible_text(response: str) -> str:
    """A response after its last `</think>`; all of it if there is none."""
    return response.rpartition(_THINK_END)[2]


def answer_blocks(text: str) -> list[str]:
    """Contents of the answer blocks behind the last `</think>`, in order; the first one decides."""
    return ANSWER.findall(visible_text(text))


def assistant_text(responses: Iterable[str], *, thoughts: bool = False) -> str:
    """Responses of an episode as one text, in order.

    Args:
        thoughts: keep them. Otherwise they are removed from each response by itself, so that an answer in an earlier
            response survives thoughts in a later one.
    """
    return "\n".join(response if thoughts else visible_text(response) for response in responses)


def has_box(text: str) -> bool:
    """Whether a text opens a box."""
    return _BOX in text


def has_format(text: str) -> bool:
    """Whether a box follows a think block, the form that `format_reward` rewards.

    The block must be closed; it may be opened in the prompt, as templates of Thinking models do.
    """
    _, closed, rest = text.partition(_THINK_END)
    return bool(closed) and "}" in rest.partition(_BOX)[2]


def repetition(text: str) -> bool:
    """Whether a text of more than 10,000 characters ends in repetition: its last 10,000 compress more than tenfold."""
    if len(text) <= REPETITION_CHARACTERS:
        return False
    raw = text[-REPETITION_CHARACTERS:].encode("utf-8", errors="replace")
    return len(raw) / len(zlib.compress(raw, level=9)) > REPETITION_RATIO
