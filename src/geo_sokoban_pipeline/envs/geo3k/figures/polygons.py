"""Problems about polygons: angle sums, areas, right, special and similar triangles."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from itertools import accumulate

from geo_sokoban_pipeline.envs.geo3k.config import Difficulty
from geo_sokoban_pipeline.envs.geo3k.figures.exact import exact
from geo_sokoban_pipeline.envs.geo3k.figures.figure import (
    Figure,
    Label,
    Mark,
    Point,
    Stroke,
    angle,
    corner_names,
    length,
    name,
    polar,
)
from geo_sokoban_pipeline.envs.geo3k.figures.problem import Linear, Numbers, Sketch, ask_x, linear_for, point_names
from geo_sokoban_pipeline.rewards.math_answer.exact_numbers import Surd


def triangle_corners(left: float, right: float) -> tuple[Point, Point, Point]:
    """Corners of a triangle with a base of length 1 and these angles (degrees) at its ends; the third is the top."""
    height = 1 / (1 / _tangent(left) + 1 / _tangent(right))
    return 0j, 1 + 0j, complex(height / _tangent(left), height)


def triangle_angles(generator: random.Random, difficulty: Difficulty) -> Sketch:
    """The angles of a triangle add up to 180°; hard ones are all expressions, medium ones isosceles triangles."""
    if difficulty == "medium":
        return _isosceles(generator)
    left = right = 0
    while not 30 <= (top := 180 - left - right) <= 110:
        left, right = generator.randint(32, 98), generator.randint(32, 98)
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
    left = top = 0
    while not 60 <= (outside := left + top) <= 145:
        left, top = generator.randint(32, 85), generator.randint(32, 85)
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
    value: Surd,
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
        # Side i leaves corner i; it has turned by the exterior angle there.
        directions = [polar(1.0, heading) for heading in accumulate(180 - each for each in angles)]
        lengths = [generator.uniform(0.7, 1.2) for _ in range(sides - 2)]
        rest = -sum((size * way for size, way in zip(lengths, directions, strict=False)), 0j)
        one, other = directions[-2:]
        cross = one.real * other.imag - one.imag * other.real
        near = (rest.real * other.imag - rest.imag * other.real) / cross
        far = (one.real * rest.imag - one.imag * rest.real) / cross
        if not (0.6 <= near <= 1.5 and 0.6 <= far <= 1.5):
            continue
        sides_drawn = (size * way for size, way in zip([*lengths, near], directions, strict=False))
        return angles, tuple(accumulate(sides_drawn, initial=0j))


def _tangent(degrees: float) -> float:
    direction = polar(1.0, degrees)
    return direction.imag / direction.real if abs(direction.real) > 1e-12 else 1e12


# Areas of triangles, parallelograms and trapezoids.


_SINES: dict[int, Surd] = {30: exact(Fraction(1, 2)), 45: exact(Fraction(1, 2), 2), 60: exact(Fraction(1, 2), 3)}
_ROUND = " Round to the nearest tenth if necessary."


def triangle_area(generator: random.Random, difficulty: Difficulty) -> Sketch:
    """Half of base times height; hard ones are isosceles with the height to be found."""
    if difficulty == "hard":
        return _isosceles_area(generator)
    base, height, scale = _two_lengths(generator, difficulty)
    wide, high = base / scale, height / scale
    foot = complex(wide * generator.choice((0.25, 0.3, 0.4, 0.6, 0.7, 0.75, 1.25)))
    corners, top = (0j, complex(wide)), foot + 1j * high
    strokes = [Stroke((*corners, top, 0j), "filled"), Stroke((*corners, top, 0j)), Stroke((top, foot), "dashed")]
    if foot.real > wide:
        strokes.append(Stroke((corners[1], foot), "dashed"))
    figure = Figure(
        tuple(strokes),
        marks=(Mark("right", (foot, 0j, top)),),
        labels=(_length(base, scale, *corners), _length(height, scale, foot, top)),
    )
    value = exact(Fraction(base * height, 2 * scale * scale))
    return _sketch("triangle", value, (("base", base), ("height", height), ("scale", scale)), figure, scale)


def _isosceles_area(generator: random.Random) -> Sketch:
    base = 2 * generator.randint(3, 15)
    side = generator.randint(round(0.62 * base), round(1.3 * base))
    height = exact(1, side**2 - (base // 2) ** 2)
    corners, top = (0j, complex(base)), complex(base / 2, float(height))
    chain = (*corners, top, 0j)
    figure = Figure(
        (Stroke(chain, "filled"), Stroke(chain)),
        marks=(Mark("tick", (corners[0], top)), Mark("tick", (corners[1], top))),
        labels=(length(str(base), base, *corners), length(str(side), side, corners[1], top)),
    )
    return _sketch("triangle", height * exact(Fraction(base, 2)), (("base", base), ("side", side)), figure)


def parallelogram_area(generator: random.Random, difficulty: Difficulty) -> Sketch:
    """Base times height; the slanted side is there to be left out, or (hard) to give the height by its angle."""
    if difficulty == "hard":
        degrees = generator.choice((30, 45, 60))
        base, side = generator.randint(8, 30), generator.randint(6, 24)
        if not 0.5 <= side / base <= 1.1:
            return parallelogram_area(generator, difficulty)
        lean = polar(side, degrees)
        figure = _parallelogram(
            complex(base),
            lean,
            (length(str(base), base, 0j, complex(base)), length(str(side), side, 0j, lean)),
            (angle(f"{degrees}°", degrees, 0j, complex(base), lean),),
        )
        value = _SINES[degrees] * exact(base * side)
        return _sketch("parallelogram", value, (("base", base), ("side", side), ("degrees", degrees)), figure)
    if difficulty == "easy":
        # Whole numbers all three: offset, height and slanted side of the leaning edge.
        offset, height, side = generator.choice([triple for triple in TRIPLES if triple[2] <= 26])
        base = generator.randint(round(0.9 * side), round(1.9 * side))
        scale = 1
    else:
        base, height, scale = _two_lengths(generator, difficulty)
        offset, side = round(height * generator.uniform(0.3, 0.7)), 0
    wide, lean = complex(base / scale), complex(offset / scale, height / scale)
    top, foot = lean, complex(offset / scale)
    labels = [_length(base, scale, 0j, wide), _length(height, scale, foot, top)]
    if side:
        labels.append(length(str(side), side, wide, wide + lean))
    figure = _parallelogram(wide, lean, tuple(labels), (), height=(top, foot))
    value = exact(Fraction(base * height, scale * scale))
    return _sketch("parallelogram", value, (("base", base), ("height", height), ("scale", scale)), figure, scale)


def trapezoid_area(generator: random.Random, difficulty: Difficulty) -> Sketch:
    """Height times the mean of both bases; hard ones are isosceles with a leg and an angle of 45° or 60°."""
    if difficulty == "hard":
        return _isosceles_trapezoid(generator)
    short, height, scale = _two_lengths(generator, difficulty, (0.5, 1.1))
    long = round(short * generator.uniform(1.4, 2.2))
    start = (long - short) * generator.choice((0.0, 0.3, 0.5, 0.7)) / scale
    left, right = 0j, complex(long / scale)
    top_left = complex(start, height / scale)
    top_right = top_left + short / scale
    foot = complex(top_left.real)
    chain = (left, right, top_right, top_left, left)
    strokes = [Stroke(chain, "filled"), Stroke(chain)]
    if start:
        strokes.append(Stroke((top_left, foot), "dashed"))
    figure = Figure(
        tuple(strokes),
        marks=(Mark("right", (foot, right, top_left)),),
        labels=(
            _length(long, scale, left, right),
            _length(short, scale, top_left, top_right),
            _length(height, scale, foot, top_left),
        ),
    )
    value = exact(Fraction((long + short) * height, 2 * scale * scale))
    numbers = (("short", short), ("long", long), ("height", height), ("scale", scale))
    return _sketch("trapezoid", value, numbers, figure, scale)


def _isosceles_trapezoid(generator: random.Random) -> Sketch:
    degrees, leg = generator.choice((45, 60)), 2 * generator.randint(3, 10)
    short = generator.randint(round(0.7 * leg), round(1.8 * leg))
    if degrees == 60:
        # The legs lean inwards by half their length each, so the long base is a whole number.
        long, lean = short + leg, polar(leg, 60)
        height = exact(Fraction(leg, 2), 3)
        given: Numbers = (("leg", leg), ("short", short), ("long", long), ("degrees", degrees))
        slanted: tuple[str, float] = (str(leg), leg)
    else:
        # Here the height is half the difference of the bases.
        long, lean = short + leg, complex(leg // 2, leg // 2)
        height = exact(leg // 2)
        given = (("long", long), ("short", short), ("degrees", degrees))
        slanted = ("", 0.0)
    left, right = 0j, complex(long)
    chain = (left, right, complex(right.real - lean.real, lean.imag), lean, left)
    labels: list[Label] = [length(str(long), long, left, right), length(str(short), short, chain[3], chain[2])]
    if slanted[0]:
        labels.append(length(slanted[0], slanted[1], right, chain[2]))
    labels.append(angle(f"{degrees}°", degrees, left, right, lean))
    ticks = (Mark("tick", (left, lean)), Mark("tick", (right, chain[2])))
    figure = Figure((Stroke(chain, "filled"), Stroke(chain)), (), ticks, tuple(labels))
    return _sketch("trapezoid", height * exact(Fraction(long + short, 2)), given, figure)


def _two_lengths(
    generator: random.Random, difficulty: Difficulty, ratios: tuple[float, float] = (0.4, 0.9)
) -> tuple[int, int, int]:
    """Base, height and the number by which both are divided: 10 (one decimal) for medium ones."""
    scale = 10 if difficulty == "medium" else 1
    base = generator.randint(6 * scale, 30 * scale)
    return base, generator.randint(round(ratios[0] * base), round(ratios[1] * base)), scale


def _parallelogram(
    wide: Point,
    lean: Point,
    labels: tuple[Label, ...],
    angles: tuple[Label, ...],
    height: tuple[Point, Point] | None = None,
) -> Figure:
    chain = (0j, wide, wide + lean, lean, 0j)
    strokes = [Stroke(chain, "filled"), Stroke(chain)]
    marks: tuple[Mark, ...] = ()
    if height is not None:
        top, foot = height
        strokes.append(Stroke((top, foot), "dashed"))
        marks = (Mark("right", (foot, wide, top)),)
    return Figure(tuple(strokes), (), marks, (*labels, *angles))


def _length(number: int, scale: int, start: Point, end: Point) -> Label:
    return length(exact(Fraction(number, scale)).decimal(), number / scale, start, end)


def _sketch(shape: str, value: Surd, numbers: Numbers, figure: Figure, scale: int = 1) -> Sketch:
    question = f"Find the area of the {shape}."
    if scale > 1:
        return Sketch(question + _ROUND, numbers, value, value.decimal(1), figure)
    return Sketch(question, numbers, value, value.label if value.as_rational() is None else value.decimal(), figure)


TRIPLES = tuple(
    (a, b, math.isqrt(a * a + b * b))
    for a in range(3, 49)
    for b in range(a + 1, 61)
    if math.isqrt(a * a + b * b) ** 2 == a * a + b * b and a / b > 0.4
)
_ROUNDS = (" Round to the nearest tenth.", " Round to the nearest tenth, if necessary.")


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
        shape, degrees = {"leg": exact(1), "other": exact(1), "hypotenuse": exact(1, 2)}, 45
        given, asked = ("leg", "hypotenuse") if difficulty == "easy" else generator.sample(("leg", "hypotenuse"), 2)
    else:
        shape, degrees = {"leg": exact(1), "other": exact(1, 3), "hypotenuse": exact(2)}, 60
        given = "leg" if difficulty == "easy" else generator.choice(sorted(shape))
        asked = generator.choice([side for side in sorted(shape) if side != given])
    size = generator.randint(3, 40)
    root = generator.choice((2, 3, 6)) if difficulty == "hard" else 1
    known = exact(size, root)
    values = {side: ratio * known / shape[given] for side, ratio in shape.items()}
    texts = {given: str(size) + (f"√{root}" if root > 1 else ""), asked: "x"}
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
    value: Surd,
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
        question += generator.choice(_ROUNDS)
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
        base = generator.randint(round(0.7 * (near + far)), round(1.2 * (near + far)))
        parallel = base * ratio
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


def _third_corner(one: complex, base: int, direction: complex) -> complex:
    """Point in a direction from the origin whose distance from `one` is `base`; level with `one` if there is none."""
    along = one.real * direction.real + one.imag * direction.imag
    rest = base**2 - (abs(one) ** 2 - along**2)
    if rest < 0:
        return complex(one.real + base, one.imag)
    return direction * (along + rest**0.5)
