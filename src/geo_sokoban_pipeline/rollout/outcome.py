"""What a reward function sees of a finished episode: plain values, no tokens, no engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """A finished episode.

    Attributes:
        prompt: the prompt's row.
        status: `completed` or `truncated`; aborted and failed episodes get no reward.
        replies: text of each reply, without end tokens.
        response: decoded text of everything after the prompt, observations and special tokens included.
        infos: what the environment reported of each turn that it was stepped with: fewer than replies where the last
            one was cut off, none where the first one was.
        env: `env.metadata()` where the environment has it: turn rewards, final bonus, distances, …
        measure: gives `metrics`.
    """

    prompt: dict[str, Any]
    status: str
    replies: list[str]
    response: str
    infos: list[dict[str, Any]]
    env: dict[str, Any] = field(default_factory=dict)
    measure: Callable[[], dict[str, float]] = field(default=dict, repr=False, compare=False)

    @cached_property
    def metrics(self) -> dict[str, float]:
        """`env.final_metrics()`, `success` among them; `{}` where the environment has none.

        They are asked for when they are read: an environment may have to wait for them.
        """
        return self.measure()
