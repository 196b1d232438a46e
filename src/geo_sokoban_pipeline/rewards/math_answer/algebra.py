"""Algebra: whether two formulas are equal, exactly. The last rule; it runs in worker processes, which limit its time.

Formulas are read by the grammar of exact numbers, with letters, functions and roots of any degree added, and SymPy
compares them. Between the rules and SymPy no text is changed. Ours instead of math-verify, which removes units and
primes, lowers letters, multiplies or adds a fraction as it likes, and rounds to six digits before it compares.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, TypeVar

import sympy
from sympy.functions.elementary.trigonometric import TrigonometricFunction

from geo_sokoban_pipeline.rewards.math_answer.default import IDENTIFIER, identifier
from geo_sokoban_pipeline.rewards.math_answer.exact_numbers import NoNumberError, Reader, half_unit

T = TypeVar("T")

_FUNCTIONS = {
    **{f"\\{name}": getattr(sympy, name) for name in ("sin", "cos", "tan", "cot", "sec", "csc")},
    **{f"\\arc{name}": getattr(sympy, f"a{name}") for name in ("sin", "cos", "tan")},
    **{"\\ln": sympy.log, "\\log": sympy.log},
}
_INVERSE = {f"\\{name}": f"\\arc{name}" for name in ("sin", "cos", "tan")}
_OPENING, _CLOSING = "([{", ")]}"
_LIST = re.compile(r"[,;]|(?<![A-Za-z\\])or(?![A-Za-z])")
_UNION = re.compile(r"\\cup(?![A-Za-z])")
_RELATION = re.compile(r"\\(?:leq|geq|neq|in)(?![A-Za-z])|[<>=]")
_END_OF_SEGMENT = re.compile(rf"\s*(?=[A-Z]){IDENTIFIER.pattern}")
_MIRRORED = {"<": ">", ">": "<", "\\leq": "\\geq", "\\geq": "\\leq"}
# Constants are compared to so many digits: no two numbers that fit into an answer and a label differ by less.
_DIGITS = 300
_NEGLIGIBLE = sympy.Rational(1, 10**250)


def are_equivalent(answer: str, label: str, links: Sequence[tuple[str, str, bool]] = ()) -> bool:
    """Whether an answer is the label.

    Lists, sets and unions are compared in any order, tuples and intervals in theirs. Equations are equal where they
    are so after multiplication by a number, or have solutions for each letter and the same ones, inequalities where
    they are so after multiplication by a positive number.

    Args:
        answer, label: normalised LaTeX of one formula each.
        links: left side, right side and whether they must be equal, not just to the digits written.

    Raises:
        NoNumberError: something is no formula of the grammar.
    """
    return all(_holds(*link) for link in links) and _are_same(answer, label)


def _holds(left: str, right: str, is_exact: bool) -> bool:
    if is_exact:
        return _are_same(left, right)
    halves = [half for side in (left, right) if (half := half_unit(side)) is not None]
    distance = abs(_read(left) - _read(right)).evalf(_DIGITS // 2)
    return bool(halves) and bool(distance <= sympy.Rational(*max(halves).as_integer_ratio()))


def _are_same(answer: str, label: str) -> bool:
    answer, label = (_without_braces(text.strip()) for text in (answer, label))
    for separator in (_LIST, _RELATION, _UNION):
        (pieces, signs), (wanted, wanted_signs) = (_split(text, separator) for text in (answer, label))
        if len(pieces) != len(wanted):
            return False
        if signs and separator is _RELATION:
            return _are_same_relation(pieces, signs, wanted, wanted_signs)
        if signs:
            return _match(pieces, wanted, _are_same)
    elements, wanted_elements = _elements(answer), _elements(label)
    if elements is None or wanted_elements is None:
        return elements is wanted_elements and _is_equal(_read(answer), _read(label))
    return (
        elements[0] == wanted_elements[0]
        and len(elements[1]) == len(wanted_elements[1])
        and all(map(_are_same, elements[1], wanted_elements[1]))
    )


def _are_same_relation(pieces: list[str], signs: list[str], wanted: list[str], wanted_signs: list[str]) -> bool:
    if len(signs) > 1 or "\\in" in (*signs, *wanted_signs):
        mirrored = [_MIRRORED.get(sign, sign) for sign in reversed(signs)]
        orders = [(pieces, signs), (pieces[::-1], mirrored)][: 1 if "\\in" in signs else 2]
        return any(given == wanted_signs and all(map(_are_same, sides, wanted)) for sides, given in orders)
    sign, difference = _as_difference(pieces[0], pieces[1], signs[0])
    wanted_sign, wanted_difference = _as_difference(wanted[0], wanted[1], wanted_signs[0])
    if sign != wanted_sign:
        return False
    if _is_zero(difference) or _is_zero(wanted_difference):
        return _is_zero(difference) and _is_zero(wanted_difference)
    ratio = sympy.simplify(difference / wanted_difference)
    if not ratio.free_symbols:
        return bool(ratio != 0 if sign in ("=", "\\neq") else ratio > 0)
    return sign == "=" and _have_same_solutions(difference, wanted_difference)


def _have_same_solutions(difference: Any, wanted: Any) -> bool:
    """Whether two formulas are 0 for the same values of each letter, and for any; complex ones tell more apart."""
    sides = sympy.Tuple(difference, wanted)
    if sides.has(TrigonometricFunction):  # SymPy solves for one period
        return False
    if not sides.has(sympy.Abs):  # SymPy solves it for real letters only
        sides = sides.subs({letter: sympy.Symbol(letter.name) for letter in sides.free_symbols})
    for letter in sorted(sides.free_symbols, key=str):
        solutions, wanted_solutions = (sympy.solve(side, letter) for side in sides)
        if not solutions or not _match(solutions, wanted_solutions, _is_equal):
            return False
    return True


def _as_difference(left: str, right: str, sign: str) -> tuple[str, Any]:
    """A relation to 0 by one of `=`, `\\neq`, `>` and `\\geq`."""
    difference = _read(left) - _read(right)
    if sign in ("=", "\\neq"):
        return sign, sympy.numer(sympy.together(difference))
    return (_MIRRORED[sign], -difference) if sign in ("<", "\\leq") else (sign, difference)


def _match(given: Sequence[T], wanted: Sequence[T], are_same: Callable[[T, T], bool]) -> bool:
    """Whether two lists hold the same in any order."""
    left = list(wanted)
    for one in given:
        found = next((at for at, other in enumerate(left) if are_same(one, other)), None)
        if found is None:
            return False
        del left[found]
    return not left


def _is_equal(one: Any, other: Any) -> bool:
    if one.has(sympy.nan, sympy.zoo):
        return False
    return bool(one == other) or _is_zero(one - other)


def _is_zero(difference: Any) -> bool:
    if difference.free_symbols:
        return bool(sympy.simplify(difference) == 0)
    # A number of many digits is no proof, but SymPy has none for most of what is no root.
    return bool(difference == 0) or bool(abs(difference.evalf(15, maxn=_DIGITS)) < _NEGLIGIBLE)


def _split(text: str, separator: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Pieces between separators that are in no brackets, and the separators."""
    pieces, signs, depth, start = [], [], 0, 0
    for found in re.finditer(rf"[(\[{{)\]}}]|{separator.pattern}", text):
        if found[0] in _OPENING:
            depth += 1
        elif found[0] in _CLOSING:
            depth -= 1
        elif depth == 0:
            pieces.append(text[start : found.start()].strip())
            signs.append(found[0])
            start = found.end()
    return [*pieces, text[start:].strip()], signs


def _without_braces(text: str) -> str:
    return text[2:-2] if text.startswith("\\{") and text.endswith("\\}") else text


def _elements(text: str) -> tuple[str, list[str]] | None:
    """Brackets and elements of a tuple or an interval."""
    if text[:1] not in ("(", "[") or text[-1:] not in (")", "]"):
        return None
    elements = _split(text[1:-1], _LIST)[0]
    return (text[0] + text[-1], elements) if len(elements) > 1 else None


def _read(text: str) -> Any:
    return _FormulaReader(text).read()


class _FormulaReader(Reader):
    """Reads SymPy's formulas."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._within_bars = False

    def _rational(self, number: Fraction) -> Any:
        return sympy.Rational(number.numerator, number.denominator)

    def _pi(self) -> Any:
        return sympy.pi

    def _root(self, radicand: Any, degree: Any = sympy.Integer(2)) -> Any:  # noqa: B008
        if degree.is_odd and radicand.is_negative:  # SymPy's root would be a complex one
            return -sympy.root(-radicand, degree)
        return sympy.root(radicand, degree)

    def _read_sum(self) -> Any:
        first = super()._read_sum()
        return first / super()._read_sum() if self._take(":") else first

    def _read_divisor(self, dividend: Any) -> Any:
        """All that is multiplied without a sign: `a/2b` has 2b, but `1/2 bh` and `4/3\\pi` begin with a fraction."""
        divisor = self._read_signed_power()
        is_before_letter = self.text[self.at - 1] != " " and IDENTIFIER.match(self.text, self.at) is not None
        if dividend.is_Rational and divisor.is_Rational and not is_before_letter:
            return divisor
        while self._is_factor():
            divisor = divisor * self._read_power()
        return divisor

    def _is_factor(self) -> bool:
        return self._is_factor_of_argument() or self._peeks(*_FUNCTIONS)

    def _is_factor_of_argument(self) -> bool:
        if super()._is_factor() or self._peeks("\\infty") or (self._peeks("|") and not self._within_bars):
            return True
        before = self.text[: self.at].rstrip()[-1:]
        following = self.text[self.at : self.at + 1]
        is_number = following.isdigit() and not (before.isdigit() or before == ".")
        return is_number or IDENTIFIER.match(self.text, self.at) is not None

    def _read_base(self) -> Any:
        if self._take("\\infty"):
            return sympy.oo
        if self._take("|"):
            return self._read_absolute()
        if self._take("\\sqrt"):
            degree = self._read_enclosed("]") if self._take("[") else sympy.Integer(2)
            return self._root(self._read_root_argument(), degree)
        function = next((name for name in _FUNCTIONS if self._take(name)), None)
        if function is not None:
            return self._read_function(function)
        letter = self._read_letter()
        return super()._read_base() if letter is None else letter

    def _raise(self, base: Any) -> Any:
        exponent = self._read_exponent()
        if self._peeks("^"):
            raise NoNumberError("a power of powers")
        return base**exponent

    def _read_exponent(self) -> Any:
        if self._take("-"):
            return -self._read_exponent()
        self._skip_space()
        return self._read_literal() if self.text[self.at : self.at + 1].isdigit() else self._read_base()

    def _read_absolute(self) -> Any:
        if self._within_bars:
            raise NoNumberError("bars within bars")
        self._within_bars = True
        value = sympy.Abs(self._read_enclosed("|"))
        self._within_bars = False
        return value

    def _read_enclosed(self, closing: str) -> Any:
        value = self._read_sum()
        if not self._take(closing):
            raise NoNumberError("a group that is not closed")
        return value

    def _read_root_argument(self) -> Any:
        if self._peeks("{", "("):
            return self._read_group()
        letter = self._read_letter()
        return super()._read_root_argument() if letter is None else letter

    def _read_argument(self) -> Any:
        letter = self._read_letter(single=True)
        return super()._read_argument() if letter is None else letter

    def _read_letter(self, *, single: bool = False) -> Any:
        """A letter with its index and primes, or a segment, as a real number; `e` is Euler's. None: there is none.

        Args:
            single: read one letter of a segment such as `AB`, as TeX does behind `\\frac`.
        """
        self._skip_space()
        found = IDENTIFIER.match(self.text, self.at)
        if found is None:
            return None
        self.at = found.end()
        name = identifier(found)
        if name[0].isupper() and not single and (end := _END_OF_SEGMENT.match(self.text, self.at)):
            self.at = end.end()
            name = " ".join(sorted((name, identifier(end))))
        return sympy.E if name == "e" else sympy.Symbol(name, real=True)

    def _read_function(self, name: str) -> Any:
        base = self._read_argument() if name == "\\log" and self._take("_") else sympy.Integer(10)
        exponent = self._read_exponent() if self._take("^") else sympy.Integer(1)
        argument = self._read_group() if self._peeks("{", "(") else self._read_bare_argument()
        if exponent == -1 and name in _INVERSE:
            return _FUNCTIONS[_INVERSE[name]](argument)
        value = sympy.log(argument, base) if name == "\\log" else _FUNCTIONS[name](argument)
        return value**exponent

    def _read_bare_argument(self) -> Any:
        """Factors behind a function's name without a sign, and a quotient of them: `\\sin 2x`, `\\sin \\pi/6`."""
        product = self._read_signed_power()
        while True:
            if self._take("/"):
                product = product / self._read_signed_power()
            elif self._is_factor_of_argument():
                product = product * self._read_power()
            else:
                return product
