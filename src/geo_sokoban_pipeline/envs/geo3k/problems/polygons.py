"""Angle sums of triangles and polygons."""

from __future__ import annotations

import random
from fractions import Fraction

from geo_sokoban_pipeline.envs.geo3k.problems.exact import ExactValue, exact
from geo_sokoban_pipeline.envs.geo3k.problems.figure import (
    Figure,
    Label,
    Mark,
    Point,
    Stroke,
    angle,
    corner_names,
    polar,
)
from geo_sokoban_pipeline.envs.geo3k.problems.problem import Numbers, Sketch
from geo_sokoban_pipeline.envs.geo3k.problems.unknowns import Linear, ask_x, linear_for, point_names
from geo_sokoban_pipeline.options.problems import Difficulty


def triangle_corners(left: float, right: float) -> tuple[Point, Point, Point]:
    """Corners of a triangle with a base of length 1 and these angles (degrees) at its ends; the third is the top."""
    height = 1 / (1 / _tangent(left) + 1 / _tangent(right))
    return 0j, 1 + 0j, complex(height / _tangent(left), height)


def triangle_angles(generator: random.Random, difficulty: Difficulty) -> Sketch:
    """The angles of a triangle add up to 180°; hard ones are all expressions, medium ones isosceles triangles."""
    if difficulty == "medium":
        return _isosceles(generator)
    while True:
        left, right = generator.randint(32, 98), generator.randint(32, 98)
        top = 180 - left - right
        if 30 <= top <= 110:
            break
    texts: tuple[str, ...]
    if difficulty == "easy":
        texts, value = (f"{left}°", f"{right}°", "x°"), exact(top)
        numbers: Numbers = (("a", min(left, right)), ("b", max(left, right)))
    else:
        x, expressions = _expressions(generator, (left, right, top))
        texts, value = tuple(each.degrees for each in expressions), exact(x)
        numbers = _numbered(expressions)
    return _triangle_sketch(generator, (left, right, top), texts, numbers, value)


def _isosceles(generator: random.Random) -> Sketch:
    """Equal sides face equal angles: from the top to the base, or the other way."""
    if generator.random() < 0.5:
        base = generator.randint(35, 72)
        given, value = base, exact(180 - 2 * base)
        texts, numbers = (f"{base}°", "", "x°"), (("base", base),)
    else:
        given = generator.randint(34, 110)
        value = exact(Fraction(180 - given, 2))
        texts, numbers = ("x°", "", f"{given}°"), (("top", given),)
    base_angle = given if numbers[0][0] == "base" else (180 - given) / 2
    angles = (base_angle, base_angle, 180 - 2 * base_angle)
    corners = triangle_corners(base_angle, base_angle)
    ticks = (Mark("tick", (corners[0], corners[2])), Mark("tick", (corners[1], corners[2])))
    return _triangle_sketch(generator, angles, texts, numbers, value, ticks)


def exterior_angle(generator: random.Random, difficulty: Difficulty) -> Sketch:
    """An exterior angle is the sum of the two remote interior ones."""
    while True:
        left, top = generator.randint(32, 85), generator.randint(32, 85)
        if 60 <= left + top <= 145:
            break
    outside = left + top
    corners = triangle_corners(left, 180 - outside)
    far = corners[1] + 0.55
    texts: tuple[str, str, str]
    if difficulty == "easy":
        texts, value = (f"{left}°", f"{top}°", "x°"), exact(outside)
        numbers: Numbers = (("a", min(left, top)), ("b", max(left, top)))
    elif difficulty == "medium":
        texts, value = (f"{left}°", "x°", f"{outside}°"), exact(top)
        numbers = (("a", left), ("exterior", outside))
    else:
        x = generator.randint(5, 25)
        inner, outer = linear_for(generator, top, x), linear_for(generator, outside, x)
        if inner is None or outer is None or inner.factor == outer.factor:
            return exterior_angle(generator, difficulty)
        texts, value = (f"{left}°", inner.degrees, outer.degrees), exact(x)
        numbers = (("a", left), *_numbered((inner, outer)))
    letters = point_names(generator, 4)
    figure = Figure(
        (Stroke((corners[1], corners[2], corners[0], far), arrows=1),),
        labels=(
            angle(texts[0], left, corners[0], corners[1], corners[2]),
            angle(texts[1], top, corners[2], corners[0], corners[1]),
            angle(texts[2], outside, corners[1], corners[2], far),
            *corner_names(letters[:3], corners),
        ),
    )
    return Sketch(ask_x(generator), numbers, value, value.label, figure, upright=False)


def polygon_angles(generator: random.Random, difficulty: Difficulty) -> Sketch:
    """The angles of an n-sided polygon add up to (n - 2) · 180°: four sides, five, or six with expressions in x."""
    sides = {"easy": 4, "medium": 5, "hard": generator.choice((4, 5, 6))}[difficulty]
    angles, corners = _convex_polygon(generator, sides)
    asked = generator.randrange(sides)
    texts = [f"{each}°" for each in angles]
    if difficulty == "hard":
        other = (asked + generator.randint(1, sides - 1)) % sides
        x, expressions = _expressions(generator, (angles[asked], angles[other]))
        texts[asked], texts[other] = (each.degrees for each in expressions)
        value, hidden = exact(x), {asked, other}
        numbers: Numbers = _numbered(expressions)
    else:
        texts[asked] = "x°"
        value, hidden, numbers = exact(angles[asked]), {asked}, ()
    given = sorted(each for index, each in enumerate(angles) if index not in hidden)
    numbers = (*numbers, *((f"a{index}", each) for index, each in enumerate(given)))
    labels = tuple(
        angle(text, angles[i], corners[i], corners[(i + 1) % sides], corners[i - 1]) for i, text in enumerate(texts)
    )
    names = corner_names(point_names(generator, sides), corners) if generator.random() < 0.5 else ()
    figure = Figure((Stroke((*corners, corners[0])),), labels=(*labels, *names))
    return Sketch(ask_x(generator), numbers, value, value.label, figure, upright=False)


def _triangle_sketch(
    generator: random.Random,
    angles: tuple[float, float, float],
    texts: tuple[str, ...],
    numbers: Numbers,
    value: ExactValue,
    marks: tuple[Mark, ...] = (),
) -> Sketch:
    a, b, c = triangle_corners(angles[0], angles[1])
    rays = ((a, b, c), (b, c, a), (c, a, b))
    labels: list[Label] = [
        angle(text, degrees, *corner) for text, degrees, corner in zip(texts, angles, rays, strict=True) if text
    ]
    letters = point_names(generator, 3)
    question, label = ask_x(generator), value.decimal()
    if generator.random() < 0.5:
        labels += corner_names(letters, (a, b, c))
        if "x°" in texts and generator.random() < 0.5:
            around = [2, 0, 1]
            at = texts.index("x°")
            question = f"Find $m \\angle {letters[around[at]]}{letters[at]}{letters[(at + 1) % 3]}$."
    return Sketch(question, numbers, value, label, Figure((Stroke((a, b, c, a)),), (), marks, tuple(labels)), False)


def _expressions(generator: random.Random, values: tuple[int, ...]) -> tuple[int, tuple[Linear, ...]]:
    """An x and expressions in it with these values."""
    while True:
        x = generator.randint(5, 25)
        found = [linear_for(generator, value, x) for value in values]
        if all(each is not None for each in found):
            return x, tuple(each for each in found if each is not None)


def _numbered(expressions: tuple[Linear, ...]) -> Numbers:
    """Coefficients of expressions, independent of their order."""
    ordered = sorted((each.factor, each.constant) for each in expressions)
    return tuple(
        (f"{kind}{index}", number)
        for index, pair in enumerate(ordered)
        for kind, number in zip("pq", pair, strict=True)
    )


def _convex_polygon(generator: random.Random, sides: int) -> tuple[list[int], tuple[Point, ...]]:
    """Whole angles and corners, counterclockwise, of a polygon without long or short sides."""
    total = (sides - 2) * 180
    while True:
        angles = [generator.randint(68, 158) for _ in range(sides - 1)]
        angles.append(total - sum(angles))
        if not 68 <= angles[-1] <= 158:
            continue
        directions, heading = [], 0
        for each in angles:
            # Side i leaves corner i; it has turned by the exterior angle there.
            heading += 180 - each
            directions.append(polar(1.0, heading))
        lengths = [generator.uniform(0.7, 1.2) for _ in range(sides - 2)]
        rest = -sum((size * way for size, way in zip(lengths, directions, strict=False)), 0j)
        one, other = directions[-2:]
        cross = one.real * other.imag - one.imag * other.real
        near = (rest.real * other.imag - rest.imag * other.real) / cross
        far = (one.real * rest.imag - one.imag * rest.real) / cross
        if not (0.6 <= near <= 1.5 and 0.6 <= far <= 1.5):
            continue
        corners = [0j]
        for size, way in zip([*lengths, near], directions, strict=False):
            corners.append(corners[-1] + size * way)
        return angles, tuple(corners)


def _tangent(degrees: float) -> float:
    direction = polar(1.0, degrees)
    return direction.imag / direction.real if abs(direction.real) > 1e-12 else 1e12
