"""What a reward function sees of a finished episode: plain values, no tokens, no engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """A finished episode.

    Attributes:
        prompt: the prompt's row.
        status: `completed` or `truncated`; aborted and failed episodes get no reward.
        replies: text of each reply, without end tokens.
        response: decoded text of everything after the prompt, observations and special tokens included.
        infos: what the environment reported of each turn.
        env: `env.metadata()` where the environment has it: turn rewards, final bonus, distances, …
    """

    prompt: dict[str, Any]
    status: str
    replies: list[str]
    response: str
    infos: list[dict[str, Any]]
    env: dict[str, Any] = field(default_factory=dict)
