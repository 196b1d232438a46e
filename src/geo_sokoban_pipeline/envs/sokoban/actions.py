"""Action grammar: which moves a reply asks for. The first answer block decides; words outside it move nobody."""

from __future__ import annotations

import re

from geo_sokoban_pipeline.envs.sokoban.layout import DIRECTIONS

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.IGNORECASE | re.DOTALL)
_SEPARATORS = re.compile(r"[,;\s]+")
_THINK_END = "</think>"


def parse_actions(text: str, max_actions: int | None = None, *, after_think: bool = True) -> list[str]:
    """Moves that a reply asks for, in order.

    Commas, semicolons and white space separate tokens; a token counts if it equals up, down, left or right in any
    case, so attached punctuation disqualifies it. Other tokens are skipped.

    Args:
        text: the whole reply.
        max_actions: moves after which reading stops; None: no limit.
        after_think: read only what follows the last `</think>`, if there is one. Off is the original's rule.
    """
    if after_think:
        text = text.rpartition(_THINK_END)[2]
    block = _ANSWER.search(text)
    tokens = _SEPARATORS.split((block.group(1) if block else text).lower())
    return [token for token in tokens if token in DIRECTIONS][:max_actions]
