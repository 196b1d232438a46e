"""Exact answers: a rational number times a square root times, perhaps, π, and the forms of labels.

Labels have the form of Geometry3K's: `12`, `7.5`, `5 \\sqrt { 3 }`, `\\frac { 13 \\sqrt { 2 } } { 2 }`, `10 \\pi`.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal

from geo_sokoban_pipeline.rewards.math_answer.exact_numbers import Surd

AnswerForm = Literal["integer", "decimal", "surd", "fraction", "pi", "other"]


def exact(coefficient: Fraction | int, radicand: Fraction | int = 1, *, pi: bool = False) -> Surd:
    """`coefficient · √radicand · π`, π only if `pi`; a negative radicand is a ValueError."""
    value = Surd.rational(coefficient) * Surd.rational(radicand).root()
    return value * Surd.pi() if pi else value


# Forms of a label without blanks, the first that fits.
_FORMS: tuple[tuple[AnswerForm, str], ...] = (
    ("other", r".*[=<>].*"),
    ("pi", r".*\\pi.*"),
    ("surd", r".*\\sqrt.*"),
    ("fraction", r"-?(\\frac\{-?\d+\}\{\d+\}|\d+/\d+)"),
    ("integer", r"-?\d+"),
    ("decimal", r"-?\d*\.\d+"),
)


def answer_form(label: str) -> AnswerForm:
    """Class of an answer label, generated or of Geometry3K: π before surd before fraction.

    Args:
        label: LaTeX with or without spaces.
    """
    text = label.replace(" ", "")
    return next((form for form, pattern in _FORMS if re.fullmatch(pattern, text, re.DOTALL)), "other")
