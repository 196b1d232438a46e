"""Angles where lines meet: linear pairs, vertical and complementary angles, parallel lines with a transversal."""

from __future__ import annotations

import random

from geo_sokoban_pipeline.envs.geo3k.config import Difficulty
from geo_sokoban_pipeline.envs.geo3k.figures.exact import exact
from geo_sokoban_pipeline.envs.geo3k.figures.figure import Figure, Label, Mark, Stroke, angle, name, polar
from geo_sokoban_pipeline.envs.geo3k.figures.problem import (
    Numbers,
    Related,
    Sketch,
    ask_x,
    linear_for,
    point_names,
    related_measures,
)


def linear_pair(generator: random.Random, difficulty: Difficulty) -> Sketch:
    """Two angles on one side of a line add up to 180°."""
    pair = related_measures(generator, difficulty, (-1, 180), (35, 145))
    tip, left, right = polar(0.9, pair.first), -1 + 0j, 1 + 0j
    letters = point_names(generator, 4)
    figure = Figure(
        (Stroke((left, right), arrows=2), Stroke((0j, tip), arrows=1)),
        marks=_dots(pair, 0j, right * 0.8, left * 0.8, tip * 0.8),
        labels=(
            angle(pair.texts[0], pair.first, 0j, right, tip),
            angle(pair.texts[1], float(pair.second), 0j, tip, left),
            *_names(pair, letters, (right * 0.8, 1j), (0j, right, left, tip), (left * 0.8, 1j), (tip * 0.8, 0j)),
        ),
    )
    return _sketch(generator, pair, (letters[3], letters[1], letters[0]), figure)


def vertical_angles(generator: random.Random, difficulty: Difficulty) -> Sketch:
    """Two lines that cross make equal angles on opposite sides."""
    pair = related_measures(generator, difficulty, (1, 0), (35, 145))
    right, tip = 1 + 0j, polar(0.9, pair.first)
    letters = point_names(generator, 5)
    figure = Figure(
        (Stroke((-right, right), arrows=2), Stroke((-tip, tip), arrows=2)),
        marks=_dots(pair, 0j, right * 0.8, tip * 0.8, -right * 0.8, -tip * 0.8),
        labels=(
            angle(pair.texts[0], pair.first, 0j, right, tip),
            angle(pair.texts[1], float(pair.second), 0j, -right, -tip),
            *_names(
                pair,
                letters,
                (right * 0.8, 1j),
                (0j, right, tip),
                (tip * 0.8, 0j),
                (-right * 0.8, 1j),
                (-tip * 0.8, 0j),
            ),
        ),
    )
    return _sketch(generator, pair, (letters[2], letters[1], letters[0]), figure)


def complementary_angles(generator: random.Random, difficulty: Difficulty) -> Sketch:
    """Two angles that fill a right angle add up to 90°."""
    pair = related_measures(generator, difficulty, (-1, 90), (28, 62))
    right, top, tip = 1 + 0j, 1j, polar(1.0, pair.first)
    letters = point_names(generator, 4)
    figure = Figure(
        (Stroke((right, 0j, top)), Stroke((0j, tip))),
        marks=(Mark("right", (0j, right, top)),),
        labels=(
            angle(pair.texts[0], pair.first, 0j, right, tip),
            angle(pair.texts[1], float(pair.second), 0j, tip, top),
            *_names(pair, letters, (right, 0j), (0j, right, top), (top, 0j), (tip, 0j)),
        ),
    )
    return _sketch(generator, pair, (letters[3], letters[1], letters[0]), figure)


def parallel_lines(generator: random.Random, difficulty: Difficulty) -> Sketch:
    """A transversal meets two parallel lines at equal angles, or at angles that add up to 180°."""
    same = generator.random() < 0.6
    pair = related_measures(generator, difficulty, (1, 0) if same else (-1, 180), (40, 140))
    if pair.first == 90:
        return parallel_lines(generator, difficulty)
    gap = 0.75
    along = polar(1.0, pair.first)
    upper, lower = along * (gap / 2 / along.imag), -along * (gap / 2 / along.imag)
    reach = along * (gap / 2 / along.imag + 0.42)
    lines = [(upper - 1.1, upper + 1.1), (lower - 1.1, lower + 1.1)]
    # The upper angle is the first one, between the line to the right and the transversal upwards, or the vertical one.
    above = generator.random() < 0.5 or not same
    first = (upper, upper + 1, upper + along) if above else (upper, upper - 1, upper - along)
    second = {
        True: [(lower, lower + 1, lower + along), (lower, lower - 1, lower - along)],
        False: [(lower, lower - 1, lower + along), (lower, lower + 1, lower - along)],
    }[same]
    letters = generator.choice(["pqt", "abt", "mnt", "lmt", "rst"])
    figure = Figure(
        (Stroke(lines[0], arrows=2), Stroke(lines[1], arrows=2), Stroke((-reach, reach), arrows=2)),
        marks=tuple(Mark("parallel", (line[0], line[0] + 0.7)) for line in lines),
        labels=(
            angle(pair.texts[0], pair.first, *first),
            angle(pair.texts[1], float(pair.second), *generator.choice(second)),
            *(name(letter, line[1], line[0]) for letter, line in zip(letters, lines, strict=False)),
            name(letters[2], reach, 0j),
        ),
    )
    start = generator.choice(["", f"In the figure, ${letters[0]} \\parallel {letters[1]}$. "])
    if pair.asks == "x":
        question = start + ask_x(generator)
    else:
        question = f"{start}Find the measure of the angle marked ${pair.texts[0].strip('()°').replace('−', '-')}$."
    return Sketch(question, pair.numbers, pair.answer, pair.answer.label, figure, upright=False)


def parallel_zigzag(generator: random.Random, difficulty: Difficulty) -> Sketch:
    """A bend between parallel lines is as large as the two angles at the lines together."""
    one, other = generator.randint(30, 65), generator.randint(30, 65)
    # From the bend, the arms go left to the upper and to the lower line.
    upper = polar(0.85, 180 - one)
    lower = polar(upper.imag / polar(1.0, other).imag, 180 + other)
    lower *= generator.uniform(0.8, 1.1)
    bend, total = 0j, one + other
    lines = [(upper, upper + 1.5), (lower, lower + 1.5)]
    if difficulty == "hard":
        x = generator.randint(4, 20)
        part, whole = linear_for(generator, other, x), linear_for(generator, total, x)
        if part is None or whole is None or part.factor == whole.factor:
            return parallel_zigzag(generator, difficulty)
        written, value = (f"{one}°", part.degrees, whole.degrees), exact(x)
        numbers: Numbers = (
            ("a", one),
            ("p", part.factor),
            ("q", part.constant),
            ("r", whole.factor),
            ("s", whole.constant),
        )
    elif difficulty == "medium":
        written, value, numbers = (f"{one}°", "x°", f"{total}°"), exact(other), (("a", one), ("sum", total))
    else:
        written, value = (f"{one}°", f"{other}°", "x°"), exact(total)
        numbers = (("a", min(one, other)), ("b", max(one, other)))
    figure = Figure(
        (Stroke((upper, upper + 1.5), arrows=1), Stroke((lower, lower + 1.5), arrows=1), Stroke((upper, bend, lower))),
        marks=tuple(Mark("parallel", (line[0] + 0.75, line[1])) for line in lines),
        labels=(
            angle(written[0], one, upper, upper + 1, bend),
            angle(written[1], other, lower, lower + 1, bend),
            angle(written[2], total, bend, upper, lower),
        ),
    )
    return Sketch(ask_x(generator), numbers, value, value.label, figure, upright=False)


def _dots(pair: Related, *points: complex) -> tuple[Mark, ...]:
    return tuple(Mark("dot", (point,)) for point in points) if pair.asks == "first" else ()


def _names(pair: Related, letters: str, *places: tuple[complex, ...]) -> tuple[Label, ...]:
    """Names of points, only where the question needs them; the second of a pair is on the line through the point."""
    if pair.asks != "first":
        return ()
    return tuple(name(letter, *points) for letter, points in zip(letters, places, strict=True))


def _sketch(generator: random.Random, pair: Related, corner: tuple[str, str, str], figure: Figure) -> Sketch:
    question = ask_x(generator) if pair.asks == "x" else f"Find $m \\angle {''.join(corner)}$."
    return Sketch(question, pair.numbers, pair.answer, pair.answer.label, figure, upright=False)
