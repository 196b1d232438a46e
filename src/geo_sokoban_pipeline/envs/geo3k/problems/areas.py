"""Areas of triangles, parallelograms and trapezoids."""

from __future__ import annotations

import random
from fractions import Fraction

from geo_sokoban_pipeline.envs.geo3k.problems.exact import ExactValue, exact
from geo_sokoban_pipeline.envs.geo3k.problems.figure import Figure, Label, Mark, Point, Stroke, angle, length, polar
from geo_sokoban_pipeline.envs.geo3k.problems.problem import Numbers, Sketch
from geo_sokoban_pipeline.envs.geo3k.problems.right_triangles import TRIPLES
from geo_sokoban_pipeline.options.problems import Difficulty

_SINES: dict[int, ExactValue] = {30: exact(Fraction(1, 2)), 45: exact(Fraction(1, 2), 2), 60: exact(Fraction(1, 2), 3)}
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
    inner = complex(0)
    if foot.real > wide:
        strokes.append(Stroke((corners[1], foot), "dashed"))
    figure = Figure(
        tuple(strokes),
        marks=(Mark("right", (foot, inner, top)),),
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
    return _sketch("triangle", height * Fraction(base, 2), (("base", base), ("side", side)), figure)


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
        value = _SINES[degrees] * (base * side)
        return _sketch("parallelogram", value, (("base", base), ("side", side), ("degrees", degrees)), figure)
    if difficulty == "easy":
        offset, height, side = _lean(generator)
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
    return _sketch("trapezoid", height * Fraction(long + short, 2), given, figure)


def _two_lengths(
    generator: random.Random, difficulty: Difficulty, ratios: tuple[float, float] = (0.4, 0.9)
) -> tuple[int, int, int]:
    """Base, height and the number by which both are divided: 10 (one decimal) for medium ones."""
    scale = 10 if difficulty == "medium" else 1
    base = generator.randint(6 * scale, 30 * scale)
    return base, generator.randint(round(ratios[0] * base), round(ratios[1] * base)), scale


def _lean(generator: random.Random) -> tuple[int, int, int]:
    """Offset, height and slanted side of a leaning edge, all whole numbers."""
    return generator.choice([triple for triple in TRIPLES if triple[2] <= 26])


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


def _sketch(shape: str, value: ExactValue, numbers: Numbers, figure: Figure, scale: int = 1) -> Sketch:
    question = f"Find the area of the {shape}."
    if scale > 1:
        return Sketch(question + _ROUND, numbers, value, value.decimal(1), figure)
    label = value.label if value.radicand != 1 else value.decimal()
    return Sketch(question, numbers, value, label, figure)
