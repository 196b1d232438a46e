"""Problems about triangles: Pythagoras, special right triangles, similarity."""

from __future__ import annotations

import math
import random
from fractions import Fraction

from geo_sokoban_pipeline.envs.geo3k.config import Difficulty
from geo_sokoban_pipeline.envs.geo3k.figures.exact import ExactValue, exact
from geo_sokoban_pipeline.envs.geo3k.figures.figure import (
    Figure,
    Label,
    Mark,
    Stroke,
    angle,
    corner_names,
    length,
    name,
    polar,
)
from geo_sokoban_pipeline.envs.geo3k.figures.problem import Numbers, Sketch, ask_x, linear_for, point_names

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


# Similar triangles: side by side, and one cut off another by a line parallel to its base.


_INTRODUCTIONS = ("Each pair of polygons is similar. ", "The triangles are similar. ")


def similar_triangles(generator: random.Random, difficulty: Difficulty) -> Sketch:
    """Corresponding sides have one ratio; medium answers are fractions, hard ones stand in an expression."""
    base, side, small = _proportion(generator, whole=difficulty != "medium")
    unknown = Fraction(side * small, base)
    ratio = Fraction(small, base)
    apex = polar(side, generator.choice((45, 50, 55, 65, 70, 75, 100, 105)))
    large = (0j, complex(base), apex)
    gap = 0.28 if difficulty != "hard" else 0.5
    shift = base * (1 + gap) - min(0.0, (apex * ratio).real)
    little = tuple(corner * float(ratio) + shift for corner in large)
    text, value = "x", exact(unknown)
    numbers: Numbers = (("base", base), ("side", side), ("small", small))
    if difficulty == "hard":
        x = generator.randint(2, 12)
        if (written := linear_for(generator, int(unknown), x, factors=(1, 4))) is None:
            return similar_triangles(generator, difficulty)
        text, value = str(written), exact(x)
        numbers = (*numbers, ("p", written.factor), ("q", written.constant))
    letters, others = generator.choice((("ABC", "DEF"), ("PQR", "STU"), ("JKL", "MNP"), ("GHJ", "XYZ")))
    figure = Figure(
        (Stroke((*large, large[0])), Stroke((*little, little[0]))),
        marks=tuple(
            Mark("angle", (corners[i], corners[(i + 1) % 3], corners[i - 1]), count)
            for corners in (large, little)
            for i, count in ((0, 1), (1, 2))
        ),
        labels=(
            length(str(base), base, large[0], large[1], large[2]),
            length(str(side), side, large[0], large[2], large[1]),
            length(str(small), small, little[0], little[1], little[2]),
            length(text, float(unknown), little[0], little[2], little[1]),
            *corner_names(letters, large),
            *corner_names(others, little),
        ),
    )
    similar = f"If $\\triangle {letters} \\sim \\triangle {others}$, find $x$."
    question = generator.choice((*(each + ask_x(generator) for each in _INTRODUCTIONS), similar))
    return Sketch(question, numbers, value, value.label, figure, upright=True)


def parallel_in_triangle(generator: random.Random, difficulty: Difficulty) -> Sketch:
    """A line parallel to one side divides the other two alike; hard ones ask for the parallel itself."""
    near, other, far = _proportion(generator, whole=difficulty != "medium", limits=(4, 24))
    top, opening = 0j, generator.choice((50, 55, 60, 65, 70))
    ratio = Fraction(near, near + far)
    unknown = Fraction(other * far, near)
    one, two = polar(near + far, -90 - opening / 2), polar(float(other + unknown), -90 + opening / 2)
    cut_one, cut_two = one * float(ratio), two * float(ratio)
    letters = point_names(generator, 5)
    labels = [length(str(near), near, top, cut_one, two), length(str(far), far, cut_one, one, two)]
    value, question = exact(unknown), ask_x(generator)
    numbers = (("near", near), ("far", far), ("other", other))
    if difficulty == "hard":
        base, parallel = _base(generator, near, far)
        two = _third_corner(one, base, polar(1.0, -90 + opening / 2))
        cut_two = two * float(ratio)
        value, numbers = exact(parallel), (("near", near), ("far", far), ("base", base))
        labels += [length("x", float(parallel), cut_one, cut_two), length(str(base), base, one, two, top)]
    else:
        labels += [length(str(other), other, top, cut_two, one), length("x", float(unknown), cut_two, two, one)]
    a, b, c, d, e = tuple(letters)
    labels += [name(a, top, one, two), name(b, one, top, two), name(c, two, top, one)]
    labels += [name(d, cut_one, cut_two), name(e, cut_two, cut_one)]
    if generator.random() < 0.5:
        question = f"If ${d}{e} \\parallel {b}{c}$, find $x$."
    figure = Figure(
        (Stroke((top, one, two, top)), Stroke((cut_one, cut_two))),
        marks=(Mark("parallel", (cut_one, cut_two)), Mark("parallel", (one, two))),
        labels=tuple(labels),
    )
    return Sketch(question, numbers, value, value.label, figure, upright=True)


def _proportion(generator: random.Random, *, whole: bool, limits: tuple[int, int] = (8, 40)) -> tuple[int, int, int]:
    """Three numbers whose fourth proportional `second · third / first` is whole or not, in sizes that can be drawn."""
    while True:
        first, second = generator.randint(*limits), generator.randint(*limits)
        third = generator.randint(limits[0] // 2, limits[1])
        fourth = Fraction(second * third, first)
        if not (0.45 <= third / first <= 0.85 and 0.55 <= second / first <= 1.6 and third < first):
            continue
        if (fourth.denominator == 1) == whole:
            return first, second, third


def _base(generator: random.Random, near: int, far: int) -> tuple[int, Fraction]:
    """Length of the base and of the parallel."""
    base = generator.randint(round(0.7 * (near + far)), round(1.2 * (near + far)))
    return base, Fraction(base * near, near + far)


def _third_corner(one: complex, base: int, direction: complex) -> complex:
    """Point in a direction from the origin whose distance from `one` is `base`; level with `one` if there is none."""
    along = one.real * direction.real + one.imag * direction.imag
    rest = base**2 - (abs(one) ** 2 - along**2)
    if rest < 0:
        return complex(one.real + base, one.imag)
    return direction * (along + rest**0.5)
