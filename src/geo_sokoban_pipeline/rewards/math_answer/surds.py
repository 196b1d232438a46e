"""Exact numbers of geometry: sums of rational multiples of √n · π^k, kept in one canonical form.

Square roots of different square-free integers are linearly independent over the rationals and π is transcendental, so
two such sums are the same number exactly if they have the same terms: equality needs neither rounding nor algebra.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction

Term = tuple[int, int]  # square-free radicand, power of π
_MOST_BITS = 2048  # of a numerator or denominator
_MOST_TERMS = 32
_LARGEST_RADICAND = 10**10  # above it, taking out squares would take milliseconds


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
        for term, factor in _products(self, other):
            terms[term] = terms.get(term, Fraction(0)) + factor
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


def _products(left: Surd, right: Surd) -> Iterator[tuple[Term, Fraction]]:
    for (radicand, power), factor in left.terms.items():
        for (other_radicand, other_power), other_factor in right.terms.items():
            common = math.gcd(radicand, other_radicand)
            inner = (radicand // common) * (other_radicand // common)
            yield (inner, power + other_power), factor * other_factor * common


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
