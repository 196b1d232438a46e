"""Right triangles: Pythagoras, and the two special ones whose sides have fixed ratios."""

from __future__ import annotations

import math
import random
from fractions import Fraction

from geo_sokoban_pipeline.envs.geo3k.problems.exact import ExactValue, exact
from geo_sokoban_pipeline.envs.geo3k.problems.figure import Figure, Label, Mark, Stroke, angle, corner_names, length
from geo_sokoban_pipeline.envs.geo3k.problems.problem import Numbers, Sketch
from geo_sokoban_pipeline.envs.geo3k.problems.unknowns import ask_x, point_names
from geo_sokoban_pipeline.options.problems import Difficulty

TRIPLES = tuple(
    (a, b, math.isqrt(a * a + b * b))
    for a in range(3, 49)
    for b in range(a + 1, 61)
    if math.isqrt(a * a + b * b) ** 2 == a * a + b * b and a / b > 0.4
)
_ROUND = (" Round to the nearest tenth.", " Round to the nearest tenth, if necessary.")


def pythagoras(generator: random.Random, difficulty: Difficulty) -> Sketch:
    """Two sides of a right triangle give the third: whole numbers, surds, or decimals to be rounded."""
    if difficulty == "easy":
        one, other, _ = generator.choice(TRIPLES)
        scale = 1
    else:
        scale = 1 if difficulty == "medium" else 10
        one = generator.randint(3 * scale, 20 * scale)
        other = generator.randint(math.ceil(0.45 * one), math.floor(2.2 * one))
    asked = generator.choice(("hypotenuse", "leg"))
    squares = (Fraction(one, scale) ** 2, Fraction(other, scale) ** 2)
    if asked == "leg" and difficulty != "easy":
        # The given side `one` becomes the hypotenuse, so that what is given stays short to write.
        one, other = max(one, other), min(one, other)
        squares = (Fraction(one, scale) ** 2, Fraction(other, scale) ** 2)
        if not 0.35 < other / one < 0.93:
            return pythagoras(generator, difficulty)
        unknown = exact(1, squares[0] - squares[1])
        legs = (float(unknown), other / scale)
        sides = (("x", float(unknown)), (_written(other, scale), other / scale), (_written(one, scale), one / scale))
        given: Numbers = (("hypotenuse", one), ("leg", other))
    elif asked == "leg":
        hypotenuse = math.isqrt(one * one + other * other)
        if generator.random() < 0.5:
            one, other = other, one
        unknown, legs = exact(one), (float(one), float(other))
        sides = (("x", float(one)), (str(other), float(other)), (str(hypotenuse), float(hypotenuse)))
        given = (("hypotenuse", hypotenuse), ("leg", other))
    else:
        unknown = exact(1, squares[0] + squares[1])
        legs = (one / scale, other / scale)
        sides = ((_written(one, scale), legs[0]), (_written(other, scale), legs[1]), ("x", float(unknown)))
        given = (("leg", min(one, other)), ("other", max(one, other)))
    numbers = (*given, ("scale", scale))
    label = unknown.decimal(1) if difficulty == "hard" else unknown.label
    return _right_triangle(generator, legs, sides, (), numbers, unknown, label, rounded=difficulty == "hard")


def special_right_triangle(generator: random.Random, difficulty: Difficulty) -> Sketch:
    """Sides of triangles with 45° and 45° or 30° and 60°: hard ones are given with a root."""
    half_square = generator.random() < 0.45
    if half_square:
        shape = {"leg": exact(1), "other": exact(1), "hypotenuse": exact(1, 2)}
        degrees = 45
    else:
        shape = {"leg": exact(1), "other": exact(1, 3), "hypotenuse": exact(2)}
        degrees = 60
    if half_square:
        given, asked = ("leg", "hypotenuse") if difficulty == "easy" else generator.sample(("leg", "hypotenuse"), 2)
    else:
        given = "leg" if difficulty == "easy" else generator.choice(sorted(shape))
        asked = generator.choice([side for side in sorted(shape) if side != given])
    size = generator.randint(3, 40)
    root = generator.choice((2, 3, 6)) if difficulty == "hard" else 1
    known = exact(size, root)
    unit = known * exact(1 / shape[given].coefficient, Fraction(1, shape[given].radicand))
    values = {side: ratio * unit for side, ratio in shape.items()}
    texts = {given: str(known.coefficient) + (f"√{root}" if root > 1 else ""), asked: "x"}
    sides = tuple((texts.get(side, ""), float(values[side])) for side in ("leg", "other", "hypotenuse"))
    numbers = (("degrees", degrees), (given, size), ("root", root))
    legs = (float(values["leg"]), float(values["other"]))
    # The angle beside the short leg, or the one opposite to it.
    corner = generator.choice((1, 2))
    marked = ((corner, degrees if corner == 1 else 90 - degrees),)
    return _right_triangle(generator, legs, sides, marked, numbers, values[asked], values[asked].label)


def _written(number: int, scale: int) -> str:
    return str(number) if scale == 1 else exact(Fraction(number, scale)).decimal()


def _right_triangle(
    generator: random.Random,
    legs: tuple[float, float],
    sides: tuple[tuple[str, float], ...],
    angles: tuple[tuple[int, int], ...],
    numbers: Numbers,
    value: ExactValue,
    label: str,
    *,
    rounded: bool = False,
) -> Sketch:
    """Right angle at the origin, one leg to the right, the other upwards.

    Args:
        sides: text (empty: not written) and length of the level leg, the upright leg and the hypotenuse.
        angles: number of the corner (1: right, 2: top) and its degrees.
    """
    corner, right, top = 0j, complex(legs[0]), complex(0, legs[1])
    ends = ((corner, right, top), (corner, top, right), (right, top, corner))
    labels: list[Label] = [length(text, size, *end) for (text, size), end in zip(sides, ends, strict=True) if text]
    rays = {1: (right, corner, top), 2: (top, corner, right)}
    labels += [angle(f"{degrees}°", degrees, *rays[at]) for at, degrees in angles]
    question = ask_x(generator)
    if generator.random() < 0.4:
        letters = point_names(generator, 3)
        labels += corner_names(letters, (corner, right, top))
        asked = [text for text, _ in sides].index("x")
        if generator.random() < 0.6:
            pair = ((0, 1), (0, 2), (1, 2))[asked]
            question = f"Find ${letters[pair[0]]}{letters[pair[1]]}$."
    if rounded:
        question += generator.choice(_ROUND)
    marks = (Mark("right", (corner, right, top)),)
    figure = Figure((Stroke((corner, right, top, corner)),), (), marks, tuple(labels))
    return Sketch(question, numbers, value, label, figure, upright=False)
