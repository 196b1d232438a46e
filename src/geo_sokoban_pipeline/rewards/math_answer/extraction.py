"""Extraction: the answer is the last box of what was said after the thoughts.

A box must be braced and closed. Only the last one counts, complete or not: who writes on after a box and breaks the
next one has not answered.
"""

from __future__ import annotations

import re

_THINK_END = "</think>"
_BOX = "\\boxed"
_OPENING = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is a character of the answer


def extract_answer(response: str) -> str | None:
    """Content of the last box behind the last `</think>`, or in the whole text where there is none.

    Args:
        response: text of the policy; what an environment said must not be in it.

    Returns:
        None: there is no box, or the last one has no brace or is not closed.
    """
    text = response.rpartition(_THINK_END)[2]
    opening = _OPENING.match(text, text.rfind(_BOX)) if _BOX in text else None
    if opening is None:
        return None
    closing = matching_brace(text, opening.end() - 1)
    return None if closing is None else text[opening.end() : closing]


def matching_brace(text: str, opening: int) -> int | None:
    """Index of the brace that closes the one at `opening`; None: it is not closed."""
    depth = 0
    for found in _BRACE.finditer(text, opening):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return found.start()
    return None
