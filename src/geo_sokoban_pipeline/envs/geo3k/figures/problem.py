"""A generated problem: question, drawing, exact answer, and the key that no two splits share."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from fractions import Fraction

from geo_sokoban_pipeline.envs.geo3k.config import Difficulty
from geo_sokoban_pipeline.envs.geo3k.figures.drawing import FigureLayout
from geo_sokoban_pipeline.envs.geo3k.figures.exact import exact
from geo_sokoban_pipeline.envs.geo3k.figures.figure import Figure
from geo_sokoban_pipeline.rewards.math_answer.exact_numbers import Surd
from geo_sokoban_pipeline.seeding import content_hash

Numbers = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """Answer of one plausible rule to a problem, such as `180 - a`; one of a problem's candidates is the right one."""

    rule: str
    label: str


@dataclass(frozen=True, slots=True)
class Sketch:
    """A problem as a family draws it, without an image.

    Attributes:
        question: as in Geometry3K, without `<image>`.
        numbers: all that the answer and the lengths and angles follow from, by name; orientation is not in it.
        value: exact, also where the label is rounded.
        label: spaced LaTeX.
        figure: to scale.
        upright: whether level lines stay level in the image.
        candidates: answers of the family's plausible rules, the right one among them; empty where none are known.
    """

    question: str
    numbers: Numbers
    value: Surd
    label: str
    figure: Figure
    upright: bool = True
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem.

    Attributes:
        family: name of the rule, such as `linear_pair`.
        difficulty: tiny, easy, medium or hard.
        sketch: question, numbers and answer.
        layout: the drawing in pixels, its labels placed.
        seed: of the generator that drew it.
    """

    family: str
    difficulty: Difficulty
    sketch: Sketch
    layout: FigureLayout
    seed: int


def problem_key(family: str, numbers: Numbers) -> str:
    """Content key of a family and its numbers, equal in every process: no two problems of any splits share it."""
    return content_hash("geo3k problem", family, json.dumps(sorted(numbers), separators=(",", ":")))


# Unknowns and how they are written: numbers, `x`, and linear expressions in `x`, and the questions about them.


_NAMES = ("ABCDEF", "PQRSTU", "JKLMNO", "RSTUVW", "WXYZAB", "DEFGHJ", "KLMNPQ", "GHJKLM")
_ASK_X = ("Find $x$.", "Find x.", "Find the value of $x$.", "Solve for $x$.", "Find $x$ in the figure.")


def point_names(generator: random.Random, count: int) -> str:
    """Letters for points: neighbours in the alphabet, as textbooks name them."""
    return generator.choice(_NAMES)[:count]


def ask_x(generator: random.Random) -> str:
    """A question for the value of x."""
    return generator.choice(_ASK_X)


@dataclass(frozen=True, slots=True)
class Linear:
    """`factor · x + constant`, as it stands in a figure."""

    factor: int
    constant: int

    def __str__(self) -> str:
        x = "x" if self.factor == 1 else f"{self.factor}x"
        return f"{x} {'+' if self.constant > 0 else '−'} {abs(self.constant)}" if self.constant else x

    @property
    def degrees(self) -> str:
        """With a degree sign, in brackets if it is a sum."""
        return f"({self})°" if self.constant else f"{self}°"


def linear_for(generator: random.Random, value: int, x: int, *, factors: tuple[int, int] = (2, 6)) -> Linear | None:
    """An expression with a value at x, None if no small numbers give it."""
    choices = [factor for factor in range(factors[0], factors[1] + 1) if 0 < abs(value - factor * x) <= 40]
    if not choices:
        return None
    factor = generator.choice(choices)
    return Linear(factor, value - factor * x)


@dataclass(frozen=True, slots=True)
class Related:
    """Two measures, one of which follows from the other, and how they are written.

    Attributes:
        first, second: measures.
        texts: of both, without a degree sign where `ask_second` asks by number.
        numbers: what is given, by name.
        answer: of the question.
        asks: `x`, or `first`: the measure of the first one, whose expression holds x.
    """

    first: int
    second: Fraction
    texts: tuple[str, str]
    numbers: Numbers
    answer: Surd
    asks: str


def related_measures(
    generator: random.Random,
    difficulty: Difficulty,
    relation: tuple[Fraction | int, int],
    bounds: tuple[int, int],
) -> Related:
    """Two angles or arcs in degrees with `second = factor · first + constant`.

    Args:
        difficulty: easy gives the first and asks for the second; medium writes one of them as an expression in x and
            gives the other; hard writes both as expressions and asks for the measure of the first.
        relation: factor and constant.
        bounds: least and greatest first measure.
    """
    factor, constant = relation
    while True:
        first = generator.randint(*bounds)
        second = factor * Fraction(first) + constant
        if first == second and factor != 1:
            continue
        if difficulty == "easy":
            return Related(first, second, (f"{first}°", "x°"), (("a", first),), exact(second), "x")
        if second.denominator != 1:
            continue
        x = generator.randint(4, 30)
        one = linear_for(generator, first, x)
        other = linear_for(generator, int(second), x)
        if difficulty == "medium" and generator.random() < 0.5 and one is not None:
            numbers: Numbers = (("p", one.factor), ("q", one.constant), ("b", int(second)))
            return Related(first, second, (one.degrees, f"{int(second)}°"), numbers, exact(x), "x")
        if difficulty == "medium" and other is not None:
            numbers = (("r", other.factor), ("s", other.constant), ("a", first))
            return Related(first, second, (f"{first}°", other.degrees), numbers, exact(x), "x")
        if difficulty == "hard" and one is not None and other is not None and other.factor != factor * one.factor:
            numbers = (("p", one.factor), ("q", one.constant), ("r", other.factor), ("s", other.constant))
            return Related(first, second, (one.degrees, other.degrees), numbers, exact(first), "first")
