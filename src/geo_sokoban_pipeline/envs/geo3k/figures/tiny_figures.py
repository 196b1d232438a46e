"""Small images for a small policy: one rule per family, big digits in the same place of every image.

The grid of the policy's patches has 16 px at scale 1. A number's two digits lie on either side of an upright line of
that grid, each in a column of its own, and its place depends on the family alone; the lines are to scale and move with
the angle. The question always asks for `x`, so only the figure tells which rule holds. Each image also has a length,
which no rule uses: it multiplies the images. Splits differ by family and angle, whatever the length.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from geo_sokoban_pipeline.envs.geo3k.config import ProblemOptions
from geo_sokoban_pipeline.envs.geo3k.figures.exact import exact
from geo_sokoban_pipeline.envs.geo3k.figures.figure import Arc, Figure, Label, Mark, Stroke, circle_of, polar
from geo_sokoban_pipeline.envs.geo3k.figures.problem import Candidate, Sketch
from geo_sokoban_pipeline.seeding import derive_seed

QUESTION = "Find $x$."
FONT_SIZE, LINE_WIDTH = 19, 2.0

# Middle of a number above and below a level line at y = 64.
_ABOVE, _BELOW = 54j, 75j

# Answers that somebody who can read the image might give, as (factor, constant): factor · a + constant.
_RULES: dict[str, tuple[Fraction, int]] = {
    "a": (Fraction(1), 0),
    "180 - a": (Fraction(-1), 180),
    "90 - a": (Fraction(-1), 90),
    "a / 2": (Fraction(1, 2), 0),
    "2 a": (Fraction(2), 0),
}


@dataclass(frozen=True, slots=True)
class TinyFamily:
    """One kind of tiny figure.

    Attributes:
        rule: key of the rules above that holds in it.
        angles: least and greatest given angle for which the labels have room, degrees.
        draw: figure of the given angle, the unknown and a length, in pixels at scale 1.
    """

    rule: str
    angles: tuple[int, int]
    draw: Callable[[int, float, int], Figure]


def family_angles(family: str, step: int) -> tuple[int, ...]:
    """Multiples of `step` degrees for which the labels of a family of `TINY_FAMILIES` fit, ascending."""
    low, high = TINY_FAMILIES[family].angles
    return tuple(range(step * math.ceil(low / step), high + 1, step))


def assign_angles(
    families: Sequence[str], splits: Iterable[str], seed: int, options: ProblemOptions
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Angles of families by split: those of `held_out_angles` have their own, the others share the rest.

    A number held out of one family stays, as far as that is possible, with another family in the rest: then a policy
    can know the number, and only its meeting with the figure is new.

    Args:
        families: of `TINY_FAMILIES`.
        splits: names of the splits wanted; the assignment does not depend on them.
        seed: root seed.
        options: step and shares.

    Returns:
        By family and split angles in degrees, rising, at least one.

    Raises:
        ValueError: a family has fewer angles than splits that want their own.
    """
    angles = {family: family_angles(family, options.angle_step) for family in families}
    homes = Counter(angle for own in angles.values() for angle in own)
    assigned = {}
    for family in families:
        generator = random.Random(derive_seed(seed, "geo3k", "angles", family))
        own = _assign(family, angles[family], homes, generator, options)
        assigned[family] = {split: own.get(split, own[""]) for split in splits}
    return assigned


def _assign(
    family: str, angles: Sequence[int], homes: Counter[int], generator: random.Random, options: ProblemOptions
) -> dict[str, tuple[int, ...]]:
    """Angles of one family by held-out split, the rest under ""; `homes` counts the families that keep an angle."""
    rest, wanting = list(angles), len(options.held_out_angles)
    if len(rest) <= wanting:
        raise ValueError(
            f"angle_step={options.angle_step}: {family} has {len(rest)} angles {rest}, but held_out_angles="
            f"{options.held_out_angles} needs {wanting + 1}. Lower angle_step, or hold angles out of fewer splits."
        )
    generator.shuffle(rest)
    assigned: dict[str, tuple[int, ...]] = {}
    for split, share in sorted(options.held_out_angles.items()):
        size = min(max(1, round(share * len(angles))), len(rest) - wanting)
        wanting -= 1
        rest.sort(key=lambda angle: homes[angle] < 2)
        own, rest = rest[:size], rest[size:]
        homes.subtract(own)
        assigned[split] = tuple(sorted(own))
    return {**assigned, "": tuple(sorted(rest))}


def tiny_sketch(family: str, generator: random.Random, options: ProblemOptions, angles: Sequence[int]) -> Sketch:
    """Draw a tiny problem of a family of `TINY_FAMILIES`, its given angle one of `angles`, degrees."""
    kind = TINY_FAMILIES[family]
    given = generator.choice(angles)
    length = generator.randint(*options.lengths)
    factor, constant = _RULES[kind.rule]
    unknown = exact(factor * given + constant)
    scale = options.picture_scale
    figure = kind.draw(given, float(unknown), length).mapped(lambda point: point * scale, scale)
    candidates = tuple(Candidate(rule, exact(times * given + plus).decimal()) for rule, (times, plus) in _RULES.items())
    return Sketch(
        QUESTION, (("a", given), ("length", length)), unknown, unknown.decimal(), figure, candidates=candidates
    )


def _drawing(
    strokes: list[tuple[complex, ...]],
    given: Label,
    unknown: Label,
    length: Label,
    marks: tuple[Mark, ...] = (),
    arcs: tuple[Arc, ...] = (),
) -> Figure:
    unit = (length.value or 0.0) / abs(length.points[1] - length.points[0])
    ends = tuple(Mark("dot", (point,)) for point in length.points)
    return Figure(tuple(Stroke(chain) for chain in strokes), arcs, (*marks, *ends), (given, unknown, length), unit)


def _up(radius: float, degrees: float) -> complex:
    """Step in a direction counted from the right upwards, on an image whose y grows downwards."""
    return polar(radius, degrees).conjugate()


def _linear_pair(given: int, unknown: float, length: int) -> Figure:
    vertex, left, right = 36 + 64j, 4 + 64j, 122 + 64j
    tip = vertex + _up(58, given)
    return _drawing(
        [(left, right), (vertex, tip)],
        Label("angle", f"{given}°", (vertex, right, tip), given, 80 + _ABOVE),
        Label("angle", "x°", (vertex, tip, left), unknown, 17 + 52j),
        Label("length", str(length), (vertex, right), length, 80 + _BELOW),
    )


def _vertical_angles(given: int, unknown: float, length: int) -> Figure:
    vertex, left, right = 48 + 48j, 4 + 48j, 122 + 48j
    tip, foot = vertex + _up(46, given), vertex - _up(46, given)
    return _drawing(
        [(left, right), (foot, tip)],
        Label("angle", f"{given}°", (vertex, right, tip), given, 96 + _ABOVE - 16j),
        Label("angle", "x°", (vertex, left, foot), unknown, 9 + 60j),
        Label("length", str(length), (vertex, right), length, 96 + _BELOW - 16j),
    )


def _complementary_angles(given: int, unknown: float, length: int) -> Figure:
    vertex, top, right = 24 + 64j, 24 + 4j, 122 + 64j
    tip = vertex + _up(62, given)
    return _drawing(
        [(top, vertex, right), (vertex, tip)],
        Label("angle", f"{given}°", (vertex, right, tip), given, 80 + _ABOVE),
        Label("angle", "x°", (vertex, tip, top), unknown, 34 + 12j),
        Label("length", str(length), (vertex, right), length, 80 + _BELOW),
        (Mark("right", (vertex, right, top)),),
    )


def _circle_figure(inscribed: float, length: int, given: tuple[str, float], unknown: tuple[str, float]) -> Figure:
    """Circle, inscribed angle with one side level, the arc it cuts off; (place, value) of the two labels."""
    radius, vertex, end = 36.0, 10 + 64j, 78 + 64j
    centre = (vertex + end) / 2 - 1j * math.sqrt(radius**2 - (abs(end - vertex) / 2) ** 2)
    start = -math.degrees(math.asin((end - centre).imag / radius))
    other = centre + _up(radius, start + 2 * inscribed)
    arc = (centre, end, centre + _up(radius, start + inscribed), other)
    angle = (vertex, end, other)

    def label(place: str, value: float, text: str, at: complex) -> Label:
        return Label("angle", text, angle, value, at) if place == "angle" else Label("arc", text, arc, value, at)

    return _drawing(
        [(other, vertex, end)],
        label(*given, f"{round(given[1])}°", (48 if given[0] == "angle" else 96) + _ABOVE),
        label(*unknown, "x°", 57 + 55j if unknown[0] == "angle" else 95 + 46j),
        Label("length", str(length), (vertex, end), length, 48 + _BELOW),
        arcs=(circle_of(centre, radius),),
    )


TINY_FAMILIES: dict[str, TinyFamily] = {
    "vertical_angles": TinyFamily("a", (36, 88), _vertical_angles),
    "linear_pair": TinyFamily("180 - a", (34, 88), _linear_pair),
    "complementary_angles": TinyFamily("90 - a", (30, 62), _complementary_angles),
    "inscribed_angle": TinyFamily(
        "a / 2", (52, 88), lambda arc, angle, length: _circle_figure(angle, length, ("arc", arc), ("angle", angle))
    ),
    "intercepted_arc": TinyFamily(
        "2 a", (38, 70), lambda angle, arc, length: _circle_figure(angle, length, ("angle", angle), ("arc", arc))
    ),
}
