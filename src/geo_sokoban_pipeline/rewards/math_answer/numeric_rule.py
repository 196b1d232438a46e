"""Numeric rule: an answer and a label that are both exact numbers are the same number or not.

Read are numbers as answers write them: decimals, percentages, mixed numbers, fractions, roots, π, sums, products,
quotients and small integer powers. What is not in this grammar is left to other rules; what is in it is decided here.
"""

from __future__ import annotations

import re
from fractions import Fraction

from geo_sokoban_pipeline.rewards.math_answer.surds import OutsideError, Surd, TooLargeError

_NUMBER = re.compile(r"\d+(?:\.\d*)?|\.\d+", re.ASCII)
_MIXED_LATEX = re.compile(r"\s*\\frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))")
_MIXED_PLAIN = re.compile(r"\s+(\d+)\s*/\s*(\d+)(?!\d)")
_SPACE = re.compile(r"\s*")
_DEEPEST = 40
_MOST_DIGITS = 600
_TIMES = ("\\cdot", "\\times", "*")
_OVER = ("\\div", "/")
_PERCENT = ("\\%", "%")


class UnreadableError(ValueError):
    """A text that is no number of the grammar."""


class NoValueError(ValueError):
    """A number of the grammar that has no value, or one far too large for an answer."""


def read_number(text: str) -> Surd:
    """The exact number that a text writes.

    Args:
        text: normalised LaTeX, without units.

    Raises:
        UnreadableError: it is no number of this grammar.
        NoValueError: it divides by zero, or has more than about 600 digits.
    """
    reader = _Reader(text)
    try:
        value = reader.read_sum()
    except (ZeroDivisionError, TooLargeError) as error:
        raise NoValueError(str(error)) from error
    except OutsideError as error:
        raise UnreadableError(str(error)) from error
    if not reader.at_end():
        raise UnreadableError("more than a number")
    return value


def within(answer: Surd, label: Surd, tolerance: float) -> bool:
    """Whether two numbers differ by at most a tolerance; rational ones are compared exactly, as decimals."""
    difference = answer + -label
    exact = difference.as_rational()
    return abs(float(difference)) <= tolerance if exact is None else abs(exact) <= Fraction(str(tolerance))


class _Reader:
    """A position in a text, moved on by everything that reads from it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0

    def at_end(self) -> bool:
        self._skip_space()
        return self.at == len(self.text)

    def read_sum(self) -> Surd:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise UnreadableError("nested too deeply")
        negative = self._take("-")
        if not negative:
            self._take("+")
        total = -self._read_product() if negative else self._read_product()
        while True:
            if self._take("+"):
                total = total + self._read_product()
            elif self._take("-"):
                total = total + -self._read_product()
            else:
                self.depth -= 1
                return total

    def _read_product(self) -> Surd:
        product = self._read_power()
        while True:
            if any(self._take(sign) for sign in _TIMES):
                product = product * self._read_signed_power()
            elif any(self._take(sign) for sign in _OVER):
                product = product / self._read_signed_power()
            elif self._peeks("\\frac", "\\sqrt", "\\pi", "(", "{"):
                product = product * self._read_power()
            else:
                return product

    def _read_signed_power(self) -> Surd:
        return -self._read_power() if self._take("-") else self._read_power()

    def _read_power(self) -> Surd:
        base = self._read_base()
        if self._take("^"):
            base = self._raise(base)
        if any(self._take(sign) for sign in _PERCENT):
            base = base / Surd.rational(100)
        return base

    def _raise(self, base: Surd) -> Surd:
        negative = self._take("-")
        value = (self._read_group() if self._peeks("{", "(") else self._read_literal()).as_rational()
        if self._peeks("^") or value is None:
            raise UnreadableError("a power of powers, or with an irrational exponent")
        exponent = -value if negative else value
        if exponent.denominator == 1:
            return base**exponent.numerator
        if exponent.denominator == 2:
            return base.root() ** exponent.numerator
        raise UnreadableError("a root that is not a square root")

    def _read_base(self) -> Surd:
        if self._take("\\pi"):
            return Surd.pi()
        if self._take("\\frac"):
            upper = self._read_argument()
            return upper / self._read_argument()
        if self._take("\\sqrt"):
            return (self._read_group() if self._peeks("{", "(") else self._read_root_argument()).root()
        if self._peeks("{", "("):
            return self._read_group()
        return self._read_literal(mixed=True)

    def _read_root_argument(self) -> Surd:
        """What a root without braces covers: a whole number, as it is meant, not its first digit, as TeX reads it."""
        return Surd.pi() if self._take("\\pi") else self._read_literal()

    def _read_argument(self) -> Surd:
        """An argument of a fraction: a group, or one digit."""
        if self._peeks("{"):
            return self._read_group()
        if self._take("\\pi"):
            return Surd.pi()
        if self._peeks("\\sqrt"):
            return self._read_base()
        self._skip_space()
        digit = self.text[self.at : self.at + 1]
        if not (digit.isascii() and digit.isdigit()):
            raise UnreadableError("a fraction without parts")
        self.at += 1
        return Surd.rational(int(digit))

    def _read_group(self) -> Surd:
        closing = "}" if self._take("{") else ")"
        if closing == ")" and not self._take("("):
            raise UnreadableError("no group")
        value = self.read_sum()
        if not self._take(closing):
            raise UnreadableError("a group that is not closed")
        return value

    def _read_literal(self, *, mixed: bool = False) -> Surd:
        self._skip_space()
        found = _NUMBER.match(self.text, self.at)
        if found is None:
            raise UnreadableError("no number")
        if len(found[0]) > _MOST_DIGITS:
            raise NoValueError("too many digits")
        self.at = found.end()
        number = Fraction(found[0].rstrip(".") if found[0].endswith(".") else found[0])
        if mixed and found[0].isdigit():
            number += self._read_fraction_of_mixed()
        self._skip_space()
        if self.text[self.at : self.at + 1].isdigit() or self.text[self.at : self.at + 1] == ".":
            raise UnreadableError("two numbers side by side")
        return Surd.rational(number)

    def _read_fraction_of_mixed(self) -> Fraction:
        for pattern in (_MIXED_LATEX, _MIXED_PLAIN):
            if found := pattern.match(self.text, self.at):
                upper, lower = (int(part) for part in found.groups() if part)
                if 0 < upper < lower:
                    self.at = found.end()
                    return Fraction(upper, lower)
        return Fraction(0)

    def _skip_space(self) -> None:
        found = _SPACE.match(self.text, self.at)
        self.at = found.end() if found else self.at

    def _peeks(self, *words: str) -> bool:
        self._skip_space()
        return any(self.text.startswith(word, self.at) and not self._goes_on(word) for word in words)

    def _take(self, word: str) -> bool:
        if not self._peeks(word):
            return False
        self.at += len(word)
        return True

    def _goes_on(self, word: str) -> bool:
        """Whether a macro's name is longer than the word: `\\pitchfork` is not `\\pi`."""
        return word[-1].isalpha() and self.text[self.at + len(word) : self.at + len(word) + 1].isalpha()
