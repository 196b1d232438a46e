"""Circumference and area of circles, and areas and arc lengths of sectors, as multiples of π."""

from __future__ import annotations

import random
from fractions import Fraction

from geo_sokoban_pipeline.envs.geo3k.problems.exact import ExactValue, exact
from geo_sokoban_pipeline.envs.geo3k.problems.figure import (
    Figure,
    Label,
    Mark,
    Stroke,
    angle,
    arc_of,
    circle_of,
    length,
    name,
    polar,
)
from geo_sokoban_pipeline.envs.geo3k.problems.problem import Numbers, Sketch
from geo_sokoban_pipeline.options.problems import Difficulty

_ROUND = " Round to the nearest tenth."


def circle_circumference(generator: random.Random, difficulty: Difficulty) -> Sketch:
    """π times the diameter; medium ones are rounded decimals, hard ones give a right triangle or square inside."""
    letter = generator.choice("CDKNOPQ")
    if difficulty == "hard":
        figure, diameter, numbers = _inscribed_shape(generator, letter)
        value = diameter * exact(1, pi=True)
        question = f"Find the exact circumference of $\\odot {letter}$."
        return Sketch(question, numbers, value, value.label, figure, upright=False)
    figure, radius, numbers = _plain_circle(generator, letter, difficulty)
    value = exact(2 * radius, pi=True)
    if difficulty == "medium":
        question = f"Find the circumference of $\\odot {letter}$.{_ROUND}"
        return Sketch(question, numbers, value, value.decimal(1), figure, upright=False)
    question = f"Find the exact circumference of $\\odot {letter}$."
    return Sketch(question, numbers, value, value.label, figure, upright=False)


def circle_area(generator: random.Random, difficulty: Difficulty) -> Sketch:
    """π times the squared radius; medium ones are rounded decimals, hard ones give a shape inside."""
    letter = generator.choice("CDKNOPQ")
    if difficulty == "hard":
        figure, diameter, numbers = _inscribed_shape(generator, letter)
        value = diameter * diameter * exact(Fraction(1, 4), pi=True)
        question = f"Find the exact area of $\\odot {letter}$."
        return Sketch(question, numbers, value, value.label, figure, upright=False)
    figure, radius, numbers = _plain_circle(generator, letter, difficulty)
    value = exact(radius * radius, pi=True)
    if difficulty == "medium":
        question = f"Find the area of the circle.{_ROUND}"
        return Sketch(question, numbers, value, value.decimal(1), figure, upright=False)
    question = "Find the area of the circle in terms of $\\pi$."
    return Sketch(question, numbers, value, value.label, figure, upright=False)


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
    shaded = arc_of(0j, float(radius), 90 - degrees / 2, 90 + degrees / 2)
    chain = (arc.start, 0j, arc.end)
    labels: list[Label] = [
        angle(f"{degrees}°", degrees, 0j, arc.start, arc.end),
        length(str(radius), radius, 0j, arc.start, arc.middle),
        name("A", arc.start, 0j),
        name("B", arc.end, 0j),
    ]
    whole = circle_of(0j, float(radius))
    filled = type(shaded)(shaded.centre, shaded.start, shaded.middle, shaded.end, True)
    figure = Figure((Stroke(chain),), (filled, whole), (Mark("dot", (0j,)),), tuple(labels))
    return Sketch(question, (("degrees", degrees), ("radius", radius)), value, value.label, figure, upright=False)


def _plain_circle(generator: random.Random, letter: str, difficulty: Difficulty) -> tuple[Figure, Fraction, Numbers]:
    """Circle with a radius or a diameter drawn, its radius, and what is given."""
    scale = 10 if difficulty == "medium" else 1
    number = generator.randint(2 * scale, 60 * scale)
    whole_line = generator.random() < 0.5
    radius = Fraction(number, 2 * scale) if whole_line else Fraction(number, scale)
    size, text = float(radius), exact(Fraction(number, scale)).decimal()
    end = polar(size, generator.choice((0, 25, 40, 60, 90, 140)))
    ends = (-end, end) if whole_line else (0j, end)
    labels = (length(text, number / scale, *ends), name(letter, 0j, *ends))
    figure = Figure((Stroke(ends),), (circle_of(0j, size),), (Mark("dot", (0j,)),), labels)
    return figure, radius, (("diameter" if whole_line else "radius", number), ("scale", scale))


def _inscribed_shape(generator: random.Random, letter: str) -> tuple[Figure, ExactValue, Numbers]:
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
        chain = tuple(point - middle for point in (corner, right, top, corner))
        strokes = (Stroke(chain),)
    figure = Figure(strokes, (circle_of(0j, float(diameter) / 2),), marks, tuple(labels))
    return figure, diameter, numbers
