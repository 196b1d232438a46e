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
    scale = 10 if difficulty == "hard" else 1
    asked = generator.choice(("hypotenuse", "leg"))
    first, leg = _given_sides(generator, asked, difficulty, scale)
    one, other = Fraction(first, scale), Fraction(leg, scale)
    written = [(exact(side).decimal(), float(side)) for side in (one, other)]
    if asked == "hypotenuse":
        unknown = exact(1, one * one + other * other)
        sides = (written[0], written[1], ("x", float(unknown)))
        given: Numbers = (("leg", min(first, leg)), ("other", max(first, leg)))
    else:
        unknown = exact(1, one * one - other * other)
        sides = (("x", float(unknown)), written[1], written[0])
        given = (("hypotenuse", first), ("leg", leg))
    numbers, legs = (*given, ("scale", scale)), (sides[0][1], sides[1][1])
    rounded = difficulty == "hard"
    label = unknown.decimal(1) if rounded else unknown.label
    return _right_triangle(generator, legs, sides, (), numbers, unknown, label, rounded=rounded)


def _given_sides(generator: random.Random, asked: str, difficulty: Difficulty, scale: int) -> tuple[int, int]:
    """The hypotenuse (or a leg, where the hypotenuse is asked for) and a leg, `scale` times as long as they are."""
    if difficulty == "easy":
        one, other, hypotenuse = generator.choice(TRIPLES)
        if generator.random() < 0.5:
            one, other = other, one
        return (one, other) if asked == "hypotenuse" else (hypotenuse, one)
    first = generator.randint(4 * scale, 32 * scale)
    low, high = (0.5, 1.0) if asked == "hypotenuse" else (0.4, 0.92)
    return first, generator.randint(math.ceil(low * first), math.floor(high * first))


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
