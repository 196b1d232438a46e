"""Exact numbers: read from LaTeX, and equal or not without rounding.

A number is a sum of rational multiples of √n · π^k, kept in one canonical form. Square roots of different square-free
integers are linearly independent over the rationals and π is transcendental, so two such sums are the same number
exactly if they have the same terms.

Ours instead of SymPy: numbers are read in the caller without a time limit, so none may cost more than its few digits
(SymPy computes powers and factorials of any size), and the caller does not pay for importing it (0.35 s).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation, localcontext
from fractions import Fraction
from numbers import Real
from typing import Any

Term = tuple[int, int]  # square-free radicand, power of π
_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494")
_MOST_BITS = 2048  # of a numerator or denominator
_MOST_TERMS = 32
_LARGEST_RADICAND = 10**10  # above it, taking out squares would take milliseconds

_NUMBER = re.compile(r"\d+(?:\.\d*)?|\.\d+", re.ASCII)
_MIXED_LATEX = re.compile(r"\s*\\frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))")
_MIXED_PLAIN = re.compile(r"\s+(\d+)\s*/\s*(\d+)(?!\d)")
_SPACE = re.compile(r"\s*")
_DECIMAL = re.compile(r"\s*[-+]?\s*\d*(?:\.(\d*))?\s*(\\?%)?", re.ASCII)
_DEEPEST = 40
_MOST_DIGITS = 600
_TIMES = ("\\cdot", "\\times", "*")
_OVER = ("\\div", "/")
_PERCENT = ("\\%", "%")


class NoNumberError(ValueError):
    """A text that is no number of the grammar."""


class NoValueError(ValueError):
    """A number of the grammar that has no value, or one far too large for an answer."""


def read_number(text: str) -> Surd:
    """The exact number that a text writes.

    Args:
        text: normalised LaTeX, without units.

    Raises:
        NoNumberError: it is no number of this grammar.
        NoValueError: it divides by zero, or has more than about 600 digits.
    """
    try:
        value: Surd = Reader(text).read()
    except (ZeroDivisionError, TooLargeError) as error:
        raise NoValueError(str(error)) from error
    except OutsideError as error:
        raise NoNumberError(str(error)) from error
    return value


def within(answer: Surd, label: Surd, tolerance: float | Fraction) -> bool:
    """Whether two numbers differ by at most a tolerance; rational ones are compared exactly, as decimals."""
    difference = answer + -label
    exact = difference.as_rational()
    return abs(float(difference)) <= tolerance if exact is None else abs(exact) <= Fraction(str(tolerance))


def half_unit(text: str) -> Fraction | None:
    """Half a unit of a decimal's last digit, so much a rounded number may differ; None: the text is no decimal."""
    found = _DECIMAL.fullmatch(text)
    if found is None:
        return None
    digits = len(found[1] or "") + (2 if found[2] else 0)
    return Fraction(1, 2 * 10**digits)


def label_text(label: object) -> str:
    """A label or an answer as the text that is compared; empty for None, NaN and infinities, which are none."""
    try:
        digits = decimal_text(label)
    except ValueError:
        return ""
    return digits if digits is not None else "" if label is None else str(label)


def decimal_text(value: object) -> str | None:
    """Digits of a number without an exponent: of a float the fewest that mean it, of a `Decimal` those it was given.

    Returns:
        None: the value is no number, but a text, a fraction, or true or false.

    Raises:
        ValueError: the number is not finite, or has an exponent of hundreds.
    """
    if not isinstance(value, Real | Decimal) or isinstance(value, bool | Fraction):
        return None
    exact = Decimal(str(value))
    if not exact.is_finite() or abs(exact.adjusted()) > _MOST_DIGITS:
        raise ValueError(f"{value} is no number of at most {_MOST_DIGITS} digits")
    return format(exact, "f")


def decimal_of_json(text: str) -> float | Decimal:
    """A number of a JSON text, for `parse_float`: a float, or a `Decimal` where that has not the digits written."""
    number = float(text)
    try:
        return number if Decimal(text).as_tuple() == Decimal(str(number)).as_tuple() else Decimal(text)
    except InvalidOperation:  # its exponent has more digits than a Decimal's may have
        return number


class Reader:
    """The grammar of numbers: a position in a text, moved on by everything that reads from it.

    It makes `Surd`s. Algebra makes its formulas of the same grammar, by other constructors and more bases.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0

    def read(self) -> Any:
        """The value of the whole text.

        Raises:
            NoNumberError: it is not of this grammar.
        """
        value = self._read_sum()
        self._skip_space()
        if self.at < len(self.text):
            raise NoNumberError("more than a number")
        return value

    def _rational(self, number: Fraction) -> Any:
        return Surd.rational(number)

    def _pi(self) -> Any:
        return Surd.pi()

    def _root(self, radicand: Any) -> Any:
        return radicand.root()

    def _read_sum(self) -> Any:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise NoNumberError("nested too deeply")
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

    def _read_product(self) -> Any:
        product = self._read_power()
        while True:
            if any(self._take(sign) for sign in _TIMES):
                product = product * self._read_signed_power()
            elif any(self._take(sign) for sign in _OVER):
                product = product / self._read_divisor(product)
            elif self._is_factor():
                product = product * self._read_power()
            else:
                return product

    def _is_factor(self) -> bool:
        """Whether what comes is multiplied although no sign says so."""
        return self._peeks("\\frac", "\\sqrt", "\\pi", "(", "{")

    def _read_divisor(self, dividend: Any) -> Any:
        return self._read_signed_power()

    def _read_signed_power(self) -> Any:
        return -self._read_power() if self._take("-") else self._read_power()

    def _read_power(self) -> Any:
        base = self._read_base()
        if self._take("^"):
            base = self._raise(base)
        if any(self._take(sign) for sign in _PERCENT):
            base = base / self._rational(Fraction(100))
        return base

    def _raise(self, base: Any) -> Any:
        negative = self._take("-")
        value = (self._read_group() if self._peeks("{", "(") else self._read_literal()).as_rational()
        if self._peeks("^") or value is None:
            raise NoNumberError("a power of powers, or with an irrational exponent")
        exponent = -value if negative else value
        if exponent.denominator == 1:
            return base**exponent.numerator
        if exponent.denominator == 2:
            return base.root() ** exponent.numerator
        raise NoNumberError("a root that is not a square root")

    def _read_base(self) -> Any:
        if self._take("\\pi"):
            return self._pi()
        if self._take("\\frac"):
            upper = self._read_argument()
            return upper / self._read_argument()
        if self._take("\\sqrt"):
            return self._root(self._read_group() if self._peeks("{", "(") else self._read_root_argument())
        if self._peeks("{", "("):
            return self._read_group()
        return self._read_literal(mixed=True)

    def _read_root_argument(self) -> Any:
        """The argument of a root without braces: a whole number, not its first digit, as TeX reads it."""
        return self._pi() if self._take("\\pi") else self._read_literal()

    def _read_argument(self) -> Any:
        """An argument of a fraction: a group, or one digit."""
        if self._peeks("{"):
            return self._read_group()
        if self._take("\\pi"):
            return self._pi()
        if self._peeks("\\sqrt"):
            return self._read_base()
        self._skip_space()
        digit = self.text[self.at : self.at + 1]
        if not (digit.isascii() and digit.isdigit()):
            raise NoNumberError("a fraction without parts")
        self.at += 1
        return self._rational(Fraction(int(digit)))

    def _read_group(self) -> Any:
        closing = "}" if self._take("{") else ")"
        if closing == ")" and not self._take("("):
            raise NoNumberError("no group")
        value = self._read_sum()
        if not self._take(closing):
            raise NoNumberError("a group that is not closed")
        return value

    def _read_literal(self, *, mixed: bool = False) -> Any:
        self._skip_space()
        found = _NUMBER.match(self.text, self.at)
        if found is None:
            raise NoNumberError("no number")
        if len(found[0]) > _MOST_DIGITS:
            raise NoValueError("too many digits")
        self.at = found.end()
        number = Fraction(found[0].rstrip(".") if found[0].endswith(".") else found[0])
        if mixed and found[0].isdigit():
            number += self._read_fraction_of_mixed()
        self._skip_space()
        if self.text[self.at : self.at + 1].isdigit() or self.text[self.at : self.at + 1] == ".":
            raise NoNumberError("two numbers side by side")
        return self._rational(number)

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


class OutsideError(ValueError):
    """A number that this form cannot hold; the message says why."""


class TooLargeError(OutsideError):
    """A number of far more digits than an answer has."""


class Surd:
    """An exact number.

    Args:
        terms: rational factor of each √radicand · π^power; radicands must be square-free and positive.

    Raises:
        OutsideError: there are too many terms.
        TooLargeError: a factor has more than about 600 digits.
    """

    __slots__ = ("terms",)

    def __init__(self, terms: Mapping[Term, Fraction]) -> None:
        self.terms = {term: factor for term, factor in terms.items() if factor}
        if len(self.terms) > _MOST_TERMS:
            raise OutsideError("too many terms")
        for factor in self.terms.values():
            if max(factor.numerator.bit_length(), factor.denominator.bit_length()) > _MOST_BITS:
                raise TooLargeError("too many digits")

    @classmethod
    def rational(cls, number: Fraction | int) -> Surd:
        """A rational number."""
        return cls({(1, 0): Fraction(number)})

    @classmethod
    def pi(cls) -> Surd:
        """π."""
        return cls({(1, 1): Fraction(1)})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Surd) and self.terms == other.terms

    def __hash__(self) -> int:
        return hash(frozenset(self.terms.items()))

    def __add__(self, other: Surd) -> Surd:
        terms = dict(self.terms)
        for term, factor in other.terms.items():
            terms[term] = terms.get(term, Fraction(0)) + factor
        return Surd(terms)

    def __neg__(self) -> Surd:
        return Surd({term: -factor for term, factor in self.terms.items()})

    def __mul__(self, other: Surd) -> Surd:
        terms: dict[Term, Fraction] = {}
        for (radicand, power), factor in self.terms.items():
            for (other_radicand, other_power), other_factor in other.terms.items():
                common = math.gcd(radicand, other_radicand)
                term = (radicand // common) * (other_radicand // common), power + other_power
                terms[term] = terms.get(term, Fraction(0)) + factor * other_factor * common
        return Surd(terms)

    def __truediv__(self, other: Surd) -> Surd:
        """Quotient.

        Raises:
            ZeroDivisionError: the divisor is 0.
            OutsideError: the divisor has more than two terms, or two with different powers of π.
        """
        return self * other._inverse()

    def __pow__(self, exponent: int) -> Surd:
        """Power.

        Raises:
            ZeroDivisionError: a negative power of 0.
            TooLargeError: it would have too many digits.
        """
        base = self._inverse() if exponent < 0 else self
        bits = max((max(f.numerator.bit_length(), f.denominator.bit_length()) for f in base.terms.values()), default=1)
        if abs(exponent) * bits > 2 * _MOST_BITS:
            raise TooLargeError("too many digits")
        power, square, left = Surd.rational(1), base, abs(exponent)
        while left:
            power = power * square if left & 1 else power
            left >>= 1
            square = square * square if left else square
        return power

    def root(self) -> Surd:
        """Square root.

        Raises:
            OutsideError: this is no rational number that is at least 0, or has a numerator or denominator too large.
        """
        if not self.terms:
            return self
        number = self.as_rational()
        if number is None or number < 0:
            raise OutsideError("a root of something that is no positive rational number")
        outer, inner = _square_free(number.numerator * number.denominator)
        return Surd({(inner, 0): Fraction(outer, number.denominator)})

    def as_rational(self) -> Fraction | None:
        """The number if it is rational, else None."""
        if not self.terms:
            return Fraction(0)
        return self.terms[1, 0] if self.terms.keys() == {(1, 0)} else None

    def __float__(self) -> float:
        return math.fsum(
            float(factor) * math.sqrt(radicand) * math.pi**power for (radicand, power), factor in self.terms.items()
        )

    @property
    def label(self) -> str:
        """Spaced LaTeX of a number of one term, as Geometry3K writes it, such as `\\frac { 5 } { 3 } \\pi`."""
        radicand, power, factor = self._only_term()
        over, under = abs(factor.numerator), factor.denominator
        root = f"\\sqrt {{ {radicand} }}" if radicand != 1 else ""
        number = str(over) if over != 1 or not (root or power) else ""
        # Geometry3K writes π behind a fraction, unless nothing else would stand above the line.
        behind = power and under != 1 and not (over == 1 and not root)
        above = " ".join(filter(None, (number, root, "\\pi" if power and not behind else "")))
        written = above if under == 1 else f"\\frac {{ {above or '1'} }} {{ {under} }}" + (" \\pi" if behind else "")
        return f"- {written}" if factor < 0 else written

    def decimal(self, places: int | None = None) -> str:
        """Decimal of a number of one term, half rounded up.

        Args:
            places: digits after the point, trailing zeros dropped. None: all of them.

        Raises:
            ValueError: `places` is None and the value has no finite decimal.
        """
        radicand, power, factor = self._only_term()
        with localcontext(prec=50):
            number = Decimal(factor.numerator) / factor.denominator * Decimal(radicand).sqrt() * (_PI if power else 1)
            if places is not None:
                number = number.quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP)
            elif Fraction(number) != self.as_rational():
                raise ValueError(f"{self.label} has no finite decimal; give the places to round to")
        text = f"{number:f}"
        return text.rstrip("0").rstrip(".") if "." in text else text

    def _only_term(self) -> tuple[int, int, Fraction]:
        """Radicand, power of π and factor of a number of one term, such as the answer to a generated problem."""
        (((radicand, power), factor),) = self.terms.items() or {(1, 0): Fraction(0)}.items()
        return radicand, power, factor

    def _inverse(self) -> Surd:
        terms = list(self.terms.items())
        if not terms:
            raise ZeroDivisionError("division by zero")
        if len(terms) == 1:
            ((radicand, power), factor) = terms[0]
            return Surd({(radicand, -power): 1 / (factor * radicand)})
        if len(terms) == 2 and terms[0][0][1] == terms[1][0][1]:
            conjugate = Surd({terms[0][0]: terms[0][1], terms[1][0]: -terms[1][1]})
            return conjugate * (self * conjugate)._inverse()
        raise OutsideError("division by a sum")


def _square_free(number: int) -> tuple[int, int]:
    """`(outer, inner)` with `outer² · inner` = number and `inner` square-free.

    Raises:
        OutsideError: the number is too large.
    """
    if number > _LARGEST_RADICAND:
        raise OutsideError("a root of too many digits")
    outer, inner, divisor = 1, 1, 2
    # A rest without a divisor up to its cube root is a prime, a product of two, or the square of one.
    while divisor**3 <= number:
        while number % (divisor * divisor) == 0:
            number //= divisor * divisor
            outer *= divisor
        if number % divisor == 0:
            number //= divisor
            inner *= divisor
        divisor += 1
    root = math.isqrt(number)
    return (outer * root, inner) if root * root == number else (outer, inner * number)
