"""Angles and arcs of circles: central and inscribed angles, the arcs they cut off, chords that cross."""

from __future__ import annotations

import random
from fractions import Fraction

from geo_sokoban_pipeline.envs.geo3k.problems.exact import exact
from geo_sokoban_pipeline.envs.geo3k.problems.figure import (
    Figure,
    Label,
    Mark,
    Point,
    Stroke,
    angle,
    arc_label,
    arc_of,
    circle_of,
    name,
    polar,
)
from geo_sokoban_pipeline.envs.geo3k.problems.problem import Numbers, Sketch
from geo_sokoban_pipeline.envs.geo3k.problems.unknowns import (
    Linear,
    ask_x,
    linear_for,
    point_names,
    related_measures,
)
from geo_sokoban_pipeline.options.problems import Difficulty


def inscribed_angle(generator: random.Random, difficulty: Difficulty) -> Sketch:
    """An inscribed angle is half of the arc it cuts off; the arc is given."""
    pair = related_measures(generator, difficulty, (Fraction(1, 2), 0), (56, 150))
    text_of = dict(zip(("arc", "angle"), pair.texts, strict=True))
    return _inscribed(generator, pair.first, text_of, pair.numbers, pair.asks, pair.answer.decimal())


def intercepted_arc(generator: random.Random, difficulty: Difficulty) -> Sketch:
    """The arc that an inscribed angle cuts off is twice the angle; the angle is given."""
    pair = related_measures(generator, difficulty, (2, 0), (28, 76))
    text_of = dict(zip(("angle", "arc"), pair.texts, strict=True))
    return _inscribed(
        generator, int(pair.second), text_of, pair.numbers, pair.asks, pair.answer.decimal(), arc_first=False
    )


def central_angle(generator: random.Random, difficulty: Difficulty) -> Sketch:
    """Central angles add up to 360° and equal their arcs: three angles, angles and an arc, or expressions."""
    while True:
        first, second = generator.randint(62, 165), generator.randint(62, 165)
        third = 360 - first - second
        if 62 <= third <= 165:
            break
    texts = [f"{first}°", f"{second}°", "x°"]
    numbers: Numbers = (("a", min(first, second)), ("b", max(first, second)))
    value = exact(third)
    if difficulty == "hard":
        x = generator.randint(8, 30)
        found = [linear_for(generator, measure, x) for measure in (second, third)]
        if found[0] is None or found[1] is None:
            return central_angle(generator, difficulty)
        texts = [f"{first}°", found[0].degrees, found[1].degrees]
        pairs = sorted((each.factor, each.constant) for each in found if each is not None)
        numbers = (("a", first), ("p", pairs[0][0]), ("q", pairs[0][1]), ("r", pairs[1][0]), ("s", pairs[1][1]))
        value = exact(x)
    ends = (0, first, first + second)
    points = [polar(1.0, direction) for direction in ends]
    arcs = [arc_of(0j, 1.0, ends[0], ends[1]), arc_of(0j, 1.0, ends[1], ends[2]), arc_of(0j, 1.0, ends[2], 360)]
    measures = (first, second, third)
    labels: list[Label] = []
    for index in range(3):
        if difficulty == "medium" and index == 2:
            labels.append(arc_label(texts[index], measures[index], arcs[index]))
        else:
            labels.append(angle(texts[index], measures[index], 0j, points[index], points[(index + 1) % 3]))
    letters = point_names(generator, 3)
    labels += [name(letter, point, 0j) for letter, point in zip(letters, points, strict=True)]
    question = ask_x(generator)
    if difficulty == "medium" and generator.random() < 0.6:
        question = f"Find $m \\widehat {{{letters[2]}{letters[0]}}}$."
    figure = Figure(
        tuple(Stroke((0j, point)) for point in points), (circle_of(0j, 1.0),), (Mark("dot", (0j,)),), tuple(labels)
    )
    return Sketch(question, numbers, value, value.label, figure, upright=False)


def chord_angles(generator: random.Random, difficulty: Difficulty) -> Sketch:
    """Chords that cross inside a circle make an angle that is half the sum of the arcs it and its opposite cut off."""
    one, two = generator.randint(40, 120), generator.randint(40, 120)
    between = generator.randint(60, 360 - one - two - 60)
    if (one + two) % 2:
        return chord_angles(generator, difficulty)
    measure = (one + two) // 2
    texts: tuple[str, str, str] = (f"{one}°", f"{two}°", "x°")
    value = exact(measure)
    numbers: Numbers = (("a", min(one, two)), ("b", max(one, two)))
    if difficulty == "medium":
        texts, value, numbers = (f"{one}°", "x°", f"{measure}°"), exact(two), (("arc", one), ("angle", measure))
    elif difficulty == "hard":
        x = generator.randint(5, 30)
        arc, crossing = linear_for(generator, two, x), linear_for(generator, measure, x)
        if arc is None or crossing is None or arc.factor == 2 * crossing.factor:
            return chord_angles(generator, difficulty)
        texts, value = (f"{one}°", arc.degrees, crossing.degrees), exact(x)
        numbers = (("arc", one), *_coefficients(arc, crossing))
    ends = [0, one, one + between, one + between + two]
    points = [polar(1.0, direction) for direction in ends]
    crossing_point = _crossing(points[0], points[2], points[1], points[3])
    labels = [
        arc_label(texts[0], one, arc_of(0j, 1.0, ends[0], ends[1])),
        arc_label(texts[1], two, arc_of(0j, 1.0, ends[2], ends[3])),
        angle(texts[2], measure, crossing_point, points[0], points[1]),
    ]
    if generator.random() < 0.5:
        letters = point_names(generator, 4)
        labels += [name(letter, point, 0j) for letter, point in zip(letters, points, strict=True)]
    chords = (Stroke((points[0], points[2])), Stroke((points[1], points[3])))
    figure = Figure(chords, (circle_of(0j, 1.0),), (), tuple(labels))
    return Sketch(ask_x(generator), numbers, value, value.label, figure, upright=False)


def _inscribed(
    generator: random.Random,
    degrees: int,
    text_of: dict[str, str],
    numbers: Numbers,
    asks: str,
    label: str,
    *,
    arc_first: bool = True,
) -> Sketch:
    """Circle with an inscribed angle over an arc of so many degrees."""
    half = degrees / 2
    vertex = polar(1.0, 180 + generator.uniform(-0.35, 0.35) * (360 - degrees) / 2)
    arc = arc_of(0j, 1.0, -half, half)
    value = exact(Fraction(label))
    letters = point_names(generator, 3)
    labels: list[Label] = [
        arc_label(text_of["arc"], degrees, arc),
        angle(text_of["angle"], half, vertex, arc.start, arc.end),
        name(letters[1], vertex, arc.start, arc.end),
        name(letters[0], arc.start, vertex, 0j),
        name(letters[2], arc.end, vertex, 0j),
    ]
    question = ask_x(generator)
    if asks == "first":
        question = f"Find $m \\widehat {{{letters[0]}{letters[2]}}}$." if arc_first else f"Find $m \\angle {letters}$."
    figure = Figure((Stroke((arc.start, vertex, arc.end)),), (circle_of(0j, 1.0),), (), tuple(labels))
    return Sketch(question, numbers, value, label, figure, upright=False)


def _coefficients(one: Linear, other: Linear) -> Numbers:
    return (("p", one.factor), ("q", one.constant), ("r", other.factor), ("s", other.constant))


def _crossing(a: Point, b: Point, c: Point, d: Point) -> Point:
    """Where the lines through a, b and through c, d meet."""
    one, other, gap = b - a, d - c, c - a
    cross = one.real * other.imag - one.imag * other.real
    return a + one * ((gap.real * other.imag - gap.imag * other.real) / cross)
