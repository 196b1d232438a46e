"""Similar triangles: side by side, and one cut off another by a line parallel to its base."""

from __future__ import annotations

import random
from fractions import Fraction

from geo_sokoban_pipeline.envs.geo3k.problems.exact import exact
from geo_sokoban_pipeline.envs.geo3k.problems.figure import (
    Figure,
    Mark,
    Stroke,
    corner_names,
    length,
    name,
    polar,
)
from geo_sokoban_pipeline.envs.geo3k.problems.problem import Numbers, Sketch
from geo_sokoban_pipeline.envs.geo3k.problems.unknowns import ask_x, linear_for, point_names
from geo_sokoban_pipeline.options.problems import Difficulty

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
        written = linear_for(generator, int(unknown), x, factors=(1, 4))
        if written is None:
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
