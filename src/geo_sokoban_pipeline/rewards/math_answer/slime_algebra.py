"""Symbolic algebra of the original math checker without its use of `eval`.

SymPy's own reader turns a text into a Python expression; the original evaluates that, here its syntax tree is walked
and only numbers, symbols, operators and a handful of named functions have a meaning. Runs in a worker process, imports
SymPy when called.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from functools import cache
from typing import Any

_MOST_BITS = 1 << 17  # of a power or factorial of numbers; larger ones are where the original hangs
_MOST_FACTORIAL = 2000
# Names that SymPy's reader takes for functions and that are short enough to get past the original's count of letters.
_REFUSED = ("all", "eye", "fft", "fu", "gff", "hn1", "hn2", "id", "jn", "ntt", "yn")
_FUNCTIONS = ("csc", "ff", "frac", "im", "li", "ln", "re", "rf", "sqrt")
_CONSTANTS = ("nan", "oo", "pi", "zoo")
_MADE_BY_READER = ("Float", "Integer", "Number", "Rational", "Symbol")
_FACTORIALS = ("factorial", "factorial2")
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


class RefusedError(ValueError):
    """An expression that is not evaluated; the message says which part."""


def difference_vanishes(difference: str, tolerance: float | None) -> bool:
    """Whether a difference of two answers is zero.

    Args:
        difference: `(label)-(answer)`, in the symbolic form of the original.
        tolerance: None: the simplified difference must be zero; else its absolute value is at most this.
    """
    from sympy import simplify

    try:
        simplified = simplify(parse(difference))
        return bool(simplified == 0) if tolerance is None else bool(abs(simplified) <= tolerance)
    except MemoryError:
        raise
    except Exception:  # whatever goes wrong in reading or algebra means unequal, as in the original
        return False


def parse(text: str) -> Any:
    """SymPy expression of a text in Python's notation, `^` for powers and implied products allowed.

    Raises:
        RefusedError: it holds something that has no meaning here, or a number that would be too large.
    """
    from sympy.parsing import sympy_parser

    rules = (*sympy_parser.standard_transformations, sympy_parser.implicit_multiplication_application)
    code = sympy_parser.stringify_expr(text.replace("^", "**"), {}, _names(), rules)
    return _value(ast.parse(code.strip(), mode="eval").body)


@cache
def _names() -> dict[str, Any]:
    import sympy

    names = {name: getattr(sympy, name) for name in (*_FUNCTIONS, *_FACTORIALS, *_CONSTANTS, *_MADE_BY_READER)}
    return {**names, "Function": sympy.Function, **dict.fromkeys(_REFUSED, _refuse)}


def _refuse(*_: Any) -> Any:
    raise RefusedError("a function that answers have no use for")


def _value(node: ast.expr) -> Any:
    match node:
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand))
        case ast.Name(id=name) if name in _CONSTANTS:
            return _names()[name]
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _MADE_BY_READER:
            return _names()[name](*(_literal(argument) for argument in arguments))
        case ast.Call(func=function, args=arguments, keywords=[]):
            return _function(function)(*(_value(argument) for argument in arguments))
        case _:
            raise RefusedError(f"{type(node).__name__} has no meaning in an answer")


def _function(node: ast.expr) -> Callable[..., Any]:
    match node:
        case ast.Name(id=name) if name in _FUNCTIONS or name in _REFUSED:
            return _names()[name]
        case ast.Name(id=name) if name in _FACTORIALS:
            return lambda number: _factorial(name, number)
        case ast.Call(func=ast.Name(id="Function"), args=[ast.Constant(value=str(name))]):
            return _names()["Function"](name)
        case _:
            raise RefusedError("a call of something that is no function")


def _literal(node: ast.expr) -> Any:
    """A number or name as it stands in the code, or the number that such a call has made already."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int):
        return node.value
    return _value(node)


def _power(base: Any, exponent: Any) -> Any:
    """The power, unless it is a number of too many digits."""
    if base.is_number and exponent.is_Integer:
        bits = max(int(part).bit_length() for part in _integers(base))
        if bits * abs(int(exponent)) > _MOST_BITS:
            raise RefusedError("a power of too many digits")
    elif base.is_number and exponent.is_number and (exponent.is_infinite or abs(exponent) > _MOST_BITS):
        raise RefusedError("a power of too many digits")
    return base**exponent


def _integers(number: Any) -> list[int]:
    from sympy import Integer

    return [int(atom.p) * int(atom.q) for atom in number.atoms() if atom.is_Rational] or [Integer(2)]


def _factorial(name: str, number: Any) -> Any:
    if number.is_number and (not number.is_finite or abs(number) > _MOST_FACTORIAL):
        raise RefusedError("a factorial of too many digits")
    return _names()[name](number)
