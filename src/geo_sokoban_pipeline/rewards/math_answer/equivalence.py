"""Equivalence by math-verify, the last rule of the default grader. Runs in a worker process, which limits its time.

Answer and label come normalised and without a box; they are wrapped in one, because math-verify reads bare LaTeX only
in part. A letter before a parenthesis is a factor, which it would take for a function. Its own time limits use signals
and are off.
"""

from __future__ import annotations

import re

_FACTOR = re.compile(r"(?<![A-Za-z\\])([A-Za-z])\s*(?=\()")


def are_equivalent(answer: str, label: str) -> bool:
    """Whether math-verify holds an answer for a label.

    Args:
        answer, label: LaTeX of one formula each.
    """
    from math_verify import LatexExtractionConfig, parse, verify

    config = [LatexExtractionConfig(boxed_match_priority=0)]
    formulas = (_FACTOR.sub(r"\1 \\cdot ", text) for text in (label, answer))
    parsed = [
        parse(f"\\boxed{{{text}}}", config, fallback_mode="no_fallback", parsing_timeout=None) for text in formulas
    ]
    return all(parsed) and verify(*parsed, timeout_seconds=None)
