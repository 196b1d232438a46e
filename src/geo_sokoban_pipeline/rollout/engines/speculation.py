"""N-gram speculation: feed the likely next tokens ahead of their sampling, so that one forward pass yields several.

A proposal never changes a result: every token is still sampled from its own distribution, and everything after a wrong
proposal is dropped. A token is proposed if nearly all earlier responses with the same prefix continue with it, as in
the tags around an answer. This is speculative decoding (arXiv 2211.17192) with exact matches in place of rejection,
because draws are fixed in advance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


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
        node = self._find(prefix)
        proposed: list[int] = []
        while node is not None:
            token, following = self._most_frequent(node)
            if following is None or not following.following:
                break
            proposed.append(token)
            node = following
        return proposed

    def _find(self, prefix: Sequence[int]) -> _Node | None:
        if len(prefix) >= self._depth:
            return None
        node: _Node | None = self._root
        for token in prefix:
            node = node.following.get(token) if node is not None else None
        return node

    def _most_frequent(self, node: _Node) -> tuple[int, _Node | None]:
        if node.count < self._least or not node.following:
            return -1, None
        token, following = max(node.following.items(), key=lambda pair: pair[1].count)
        return (token, following) if following.count >= self._share * node.count else (-1, None)
