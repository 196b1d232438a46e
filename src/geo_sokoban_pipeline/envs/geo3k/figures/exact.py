"""Exact answers: a rational number times a square root times, perhaps, π, and their labels in spaced LaTeX.

Every value is kept in lowest terms with a square-free radicand, so equal values are equal objects and have one label.
Labels have the form of Geometry3K's: `12`, `7.5`, `5 \\sqrt { 3 }`, `\\frac { 13 \\sqrt { 2 } } { 2 }`, `10 \\pi`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal, localcontext
from fractions import Fraction
from typing import Literal

AnswerForm = Literal["integer", "decimal", "surd", "fraction", "pi", "other"]

_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494")


@dataclass(frozen=True, slots=True)
class ExactValue:
    """`coefficient · √radicand · π` (π only if `pi`); build with `exact`, which reduces."""

    coefficient: Fraction
    radicand: int = 1
    pi: bool = False

    def __float__(self) -> float:
        return float(self.coefficient) * math.sqrt(self.radicand) * (math.pi if self.pi else 1.0)

    def __mul__(self, other: ExactValue | Fraction | int) -> ExactValue:
        """Product.

        Raises:
            ValueError: both hold π; no label of ours has π².
        """
        factor = other if isinstance(other, ExactValue) else ExactValue(Fraction(other))
        if self.pi and factor.pi:
            raise ValueError("a product with π² has no label")
        return exact(self.coefficient * factor.coefficient, self.radicand * factor.radicand, pi=self.pi or factor.pi)

    @property
    def label(self) -> str:
        """Spaced LaTeX, rational numbers as integers or fractions."""
        sign = "- " if self.coefficient < 0 else ""
        over, under = abs(self.coefficient.numerator), self.coefficient.denominator
        root = f"\\sqrt {{ {self.radicand} }}" if self.radicand != 1 else ""
        number = str(over) if over != 1 or not (root or self.pi) else ""
        # Geometry3K writes π behind a fraction, unless nothing else would stand above the line.
        behind = self.pi and under != 1 and not (over == 1 and not root)
        above = " ".join(filter(None, (number, root, "\\pi" if self.pi and not behind else "")))
        if under == 1:
            return sign + above
        return f"{sign}\\frac {{ {above or '1'} }} {{ {under} }}" + (" \\pi" if behind else "")

    def decimal(self, places: int | None = None) -> str:
        """Decimal label, half rounded up.

        Args:
            places: digits after the point, trailing zeros dropped. None: all of them.

        Raises:
            ValueError: `places` is None and the value has no finite decimal.
        """
        with localcontext() as context:
            context.prec = 50
            number = Decimal(self.coefficient.numerator) / Decimal(self.coefficient.denominator)
            if self.radicand != 1:
                number *= Decimal(self.radicand).sqrt()
            if self.pi:
                number *= _PI
            if places is None:
                if self.radicand != 1 or self.pi or Fraction(number) != self.coefficient:
                    raise ValueError(f"{self.label} has no finite decimal; give the places to round to")
                rounded = number
            else:
                rounded = number.quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP)
            text = f"{rounded:f}"
        return text.rstrip("0").rstrip(".") if "." in text else text


def exact(coefficient: Fraction | int, radicand: Fraction | int = 1, *, pi: bool = False) -> ExactValue:
    """`coefficient · √radicand · π` in lowest terms, the root rationalised and square-free.

    Raises:
        ValueError: the radicand is negative.
    """
    inner = Fraction(radicand)
    if inner < 0:
        raise ValueError(f"radicand={radicand}: a real root needs 0 or more")
    outer = Fraction(coefficient)
    if inner == 0 or outer == 0:
        return ExactValue(Fraction(0))
    # √(p/q) = √(p·q) / q
    outer, rest = outer / inner.denominator, inner.numerator * inner.denominator
    divisor = 2
    while divisor * divisor <= rest:
        while rest % (divisor * divisor) == 0:
            rest //= divisor * divisor
            outer *= divisor
        divisor += 1
    return ExactValue(outer, rest, pi)


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
