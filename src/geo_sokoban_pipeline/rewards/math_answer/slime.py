"""Parity with the original math checker (`slime_exact`), with the same behind thoughts (`deepscaler`) and with its
historic tolerance variant (`geo3k`).

Verdicts are the original's, its faults included; only what made it hang is a verdict here, and no answer is evaluated
as Python. But for `deepscaler` the box is looked for in the whole response, thoughts included.
"""

from __future__ import annotations

from geo_sokoban_pipeline.rewards.math_answer.slime_text import (
    is_evaluable,
    is_fraction,
    is_integer,
    split_elements,
    string_form,
    symbolic_form,
)
from geo_sokoban_pipeline.rewards.math_answer.verdict import Differences, Grade, Undecided

_BOX = "\\boxed"
_THINK_END = "</think>"
_RESPONSE = "###Response"


def examine_slime(box: str, label: str, tolerance: float) -> Grade | Undecided:
    """Grade as the original does: equal as strings, or as elements of equal form whose difference vanishes.

    Args:
        box: content of the last box of a response.
        label: ground truth, with or without a box.
        tolerance: must be 0; the original has none.
    """
    expected = boxed_answer(label) if _BOX in label else label
    if not expected:
        return Grade(False, "no_label", box)
    if string_form(box) == string_form(expected):
        return Grade(True, "string", box)
    return _compare(box, expected, None)


def examine_geo3k(box: str, label: str, tolerance: float) -> Grade | Undecided:
    """Grade as the historic geometry checker does: no string form, and differences up to a tolerance vanish.

    Args:
        box: content of the last box of a response.
        label: ground truth without a box.
        tolerance: largest absolute difference that counts as zero; integers and plain fractions must agree exactly.
    """
    return _compare(box, label, tolerance) if label else Grade(False, "no_label", box)


def boxed_answer(text: str) -> str | None:
    """Content of the last box up to its matching brace; None: there is none, or it is not closed or not braced."""
    start = text.rfind(_BOX)
    if start < 0 or not text.startswith("{", start + len(_BOX)):
        return None
    start += len(_BOX)
    depth = 0
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start + 1 : at]
    return None


def behind_thoughts(text: str) -> str | None:
    """Content of the last box behind the last `</think>`, or else behind the first `###Response`; None: neither, or no
    box there.
    """
    if _THINK_END in text:
        return boxed_answer(text.rpartition(_THINK_END)[2])
    return boxed_answer(text.split(_RESPONSE)[1]) if _RESPONSE in text else None


def _compare(given: str, expected: str, tolerance: float | None) -> Grade | Undecided:
    label, answer = symbolic_form(expected), symbolic_form(given)
    if label == answer:
        return Grade(True, "string", given)
    differences = _differences(label, answer) if answer else None
    if differences is None or not all(is_evaluable(difference) for difference in differences):
        return Grade(False, "form", given)
    return Undecided(Differences(tuple(differences), tolerance), given) if differences else Grade(True, "form", given)


def _differences(label: str, answer: str) -> list[str] | None:
    """Differences that must vanish, element by element; None: the forms differ, or two plain fractions do."""
    labels, answers = split_elements(label), split_elements(answer)
    other_brackets = len(labels) > 1 and (label[0] != answer[0] or label[-1] != answer[-1])
    if other_brackets or len(labels) != len(answers):
        return None
    differences = []
    for wanted, got in zip(labels, answers, strict=True):
        if is_fraction(wanted) and is_fraction(got):
            if wanted != got:
                return None
        elif is_integer(wanted) != is_integer(got):
            return None
        else:
            differences.append(f"({wanted})-({got})")
    return differences
