"""Drafts: what most replies go on with is fed ahead of its sampling, so that one pass yields several tokens.

A draft is a guess that costs little and decides nothing: every token is still sampled from its own distribution, and
what follows a wrong guess is thrown away. Guesses come from the replies seen before, by their beginnings, where nearly
all of them agree; the marks around an answer are of that kind. (Speculative decoding, arXiv 2211.17192, with exact
matches in place of rejection, because draws are fixed in advance.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class _Node:
    """Replies that begin alike: how many there are, and how they go on."""

    count: int = 0
    following: dict[int, _Node] = field(default_factory=dict)


class DraftTree:
    """Beginnings of replies with their frequencies.

    Args:
        depth: tokens of a reply that are looked at; long free text does not repeat itself.
        share: part of the replies that must agree on a token, in (0.5, 1].
        least: replies that must have come by before anything is guessed.
    """

    def __init__(self, depth: int = 16, share: float = 0.9, least: int = 8) -> None:
        self._depth, self._share, self._least = depth, share, least
        self._root = _Node()

    def learn(self, reply: Sequence[int]) -> None:
        """Count a reply."""
        node = self._root
        node.count += 1
        for token in reply[: self._depth]:
            node = node.following.setdefault(token, _Node())
            node.count += 1

    def guess(self, beginning: Sequence[int]) -> list[int]:
        """Tokens that replies with this beginning nearly always go on with, except the last one before a reply's end.

        The end itself is never guessed: nothing would be sampled after it.
        """
        node = self._find(beginning)
        guessed: list[int] = []
        while node is not None:
            token, following = self._favourite(node)
            if following is None or not following.following:
                break
            guessed.append(token)
            node = following
        return guessed

    def _find(self, beginning: Sequence[int]) -> _Node | None:
        if len(beginning) >= self._depth:
            return None
        node: _Node | None = self._root
        for token in beginning:
            node = node.following.get(token) if node is not None else None
        return node

    def _favourite(self, node: _Node) -> tuple[int, _Node | None]:
        if node.count < self._least or not node.following:
            return -1, None
        token, following = max(node.following.items(), key=lambda pair: pair[1].count)
        return (token, following) if following.count >= self._share * node.count else (-1, None)
