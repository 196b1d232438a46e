"""Problems about circles: angles and arcs, circumference, area, sectors."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

from geo_sokoban_pipeline.envs.geo3k.config import Difficulty
from geo_sokoban_pipeline.envs.geo3k.figures.exact import exact
from geo_sokoban_pipeline.envs.geo3k.figures.figure import (
    Figure,
    Label,
    Mark,
    Point,
    Stroke,
    angle,
    arc_label,
    arc_of,
    circle_of,
    length,
    name,
    polar,
)
from geo_sokoban_pipeline.envs.geo3k.figures.problem import (
    Numbers,
    Sketch,
    ask_x,
    linear_for,
    point_names,
    related_measures,
)
from geo_sokoban_pipeline.rewards.math_answer.exact_numbers import Surd


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
    first = second = 0
    while not 62 <= (third := 360 - first - second) <= 165:
        first, second = generator.randint(62, 165), generator.randint(62, 165)
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
    labels: list[Label] = [
        arc_label(texts[i], measures[i], arcs[i])
        if difficulty == "medium" and i == 2
        else angle(texts[i], measures[i], 0j, points[i], points[(i + 1) % 3])
        for i in range(3)
    ]
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
        numbers = (
            ("arc", one),
            ("p", arc.factor),
            ("q", arc.constant),
            ("r", crossing.factor),
            ("s", crossing.constant),
        )
    ends = [0, one, one + between, one + between + two]
    points = [polar(1.0, direction) for direction in ends]
    crossing_point = _crossing(points[0], points[2], points[1], points[3])
    labels = [
        arc_label(texts[0], one, arc_of(0j, 1.0, ends[0], ends[1])),
        arc_label(texts[1], two, arc_of(0j, 1.0, ends[2], ends[3])),
        angle(texts[2], measure, crossing_point, points[0], points[1]),
    ]
    if generator.random() < 0.5:
        labels += [name(letter, point, 0j) for letter, point in zip(point_names(generator, 4), points, strict=True)]
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


def _crossing(a: Point, b: Point, c: Point, d: Point) -> Point:
    """Where the lines through a, b and through c, d meet."""
    one, other, gap = b - a, d - c, c - a
    cross = one.real * other.imag - one.imag * other.real
    return a + one * ((gap.real * other.imag - gap.imag * other.real) / cross)


# Circumference and area of circles, and areas and arc lengths of sectors, as multiples of π.


_ROUND = " Round to the nearest tenth."


def circle_circumference(generator: random.Random, difficulty: Difficulty) -> Sketch:
    """π times the diameter; medium ones are rounded decimals, hard ones give a right triangle or square inside."""
    exactly = "Find the exact circumference of $\\odot {letter}$."
    questions = {"easy": exactly, "medium": f"Find the circumference of $\\odot {{letter}}$.{_ROUND}", "hard": exactly}
    return _measured_circle(generator, difficulty, questions, lambda diameter: diameter * exact(1, pi=True))


def circle_area(generator: random.Random, difficulty: Difficulty) -> Sketch:
    """π times the squared radius; medium ones are rounded decimals, hard ones give a shape inside."""
    questions = {
        "easy": "Find the area of the circle in terms of $\\pi$.",
        "medium": f"Find the area of the circle.{_ROUND}",
        "hard": "Find the exact area of $\\odot {letter}$.",
    }
    quarter = exact(Fraction(1, 4), pi=True)
    return _measured_circle(generator, difficulty, questions, lambda diameter: diameter * diameter * quarter)


def _measured_circle(
    generator: random.Random,
    difficulty: Difficulty,
    questions: dict[str, str],
    measure: Callable[[Surd], Surd],
) -> Sketch:
    """A question about a circle, given its measure by its diameter."""
    letter = generator.choice("CDKNOPQ")
    if difficulty == "hard":
        figure, diameter, numbers = _inscribed_shape(generator, letter)
    else:
        figure, diameter, numbers = _plain_circle(generator, letter, scale=10 if difficulty == "medium" else 1)
    value = measure(diameter)
    label = value.decimal(1) if difficulty == "medium" else value.label
    return Sketch(questions[difficulty].replace("{letter}", letter), numbers, value, label, figure, upright=False)


def sector(generator: random.Random, difficulty: Difficulty) -> Sketch:
    """The part of the area, or (hard) of the circumference, that a central angle cuts off."""
    step = {"easy": 30, "medium": 10, "hard": 5}[difficulty]
    degrees = step * generator.randint(40 // step + 1, 170 // step)
    radius = generator.randint(2, 24)
    part = Fraction(degrees, 360)
    if difficulty == "hard":
        value = exact(part * 2 * radius, pi=True)
        question = "Find the exact length of $\\widehat {AB}$."
    else:
        value = exact(part * radius * radius, pi=True)
        question = "What is the area of the sector? Write it in terms of $\\pi$."
    arc = arc_of(0j, float(radius), 90 - degrees / 2, 90 + degrees / 2)
    labels: list[Label] = [
        angle(f"{degrees}°", degrees, 0j, arc.start, arc.end),
        length(str(radius), radius, 0j, arc.start, arc.middle),
        name("A", arc.start, 0j),
        name("B", arc.end, 0j),
    ]
    arcs = (replace(arc, filled=True), circle_of(0j, float(radius)))
    figure = Figure((Stroke((arc.start, 0j, arc.end)),), arcs, (Mark("dot", (0j,)),), tuple(labels))
    return Sketch(question, (("degrees", degrees), ("radius", radius)), value, value.label, figure, upright=False)


def _plain_circle(generator: random.Random, letter: str, *, scale: int) -> tuple[Figure, Surd, Numbers]:
    """Circle with a radius or a diameter drawn, its diameter, and what is given."""
    number = generator.randint(2 * scale, 60 * scale)
    whole_line = generator.random() < 0.5
    radius = Fraction(number, 2 * scale) if whole_line else Fraction(number, scale)
    size, text = float(radius), exact(Fraction(number, scale)).decimal()
    end = polar(size, generator.choice((0, 25, 40, 60, 90, 140)))
    ends = (-end, end) if whole_line else (0j, end)
    labels = (length(text, number / scale, *ends), name(letter, 0j, *ends))
    figure = Figure((Stroke(ends),), (circle_of(0j, size),), (Mark("dot", (0j,)),), labels)
    return figure, exact(2 * radius), (("diameter" if whole_line else "radius", number), ("scale", scale))


def _inscribed_shape(generator: random.Random, letter: str) -> tuple[Figure, Surd, Numbers]:
    """Circle around a square or a right triangle, its diameter, and what is given."""
    if generator.random() < 0.5:
        side = generator.randint(2, 40)
        diameter = exact(side, 2)
        size = float(diameter) / 2
        corners = tuple(polar(size, direction) for direction in (45, 135, 225, 315))
        labels: list[Label] = [length(str(side), side, corners[2], corners[3]), name(letter, 0j, corners[0])]
        marks: tuple[Mark, ...] = (Mark("dot", (0j,)), Mark("right", (corners[2], corners[3], corners[1])))
        marks += tuple(Mark("tick", (corners[i], corners[i - 1])) for i in range(4))
        numbers: Numbers = (("square", side),)
        strokes = (Stroke((*corners, corners[0])),)
    else:
        one = generator.randint(3, 30)
        other = generator.randint(round(0.5 * one) + 1, round(1.6 * one))
        diameter = exact(1, one * one + other * other)
        corner = complex(0, 0)
        right, top = complex(one), complex(0, other)
        middle = (right + top) / 2
        labels = [
            length(str(one), one, corner - middle, right - middle),
            length(str(other), other, corner - middle, top - middle),
            name(letter, 0j, right - middle, top - middle),
        ]
        marks = (Mark("dot", (0j,)), Mark("right", (corner - middle, right - middle, top - middle)))
        numbers = (("leg", min(one, other)), ("other", max(one, other)))
        strokes = (Stroke(tuple(point - middle for point in (corner, right, top, corner))),)
    return Figure(strokes, (circle_of(0j, float(diameter) / 2),), marks, tuple(labels)), diameter, numbers
