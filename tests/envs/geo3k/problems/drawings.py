"""What a drawing proves by itself: the tests measure coordinates and read labels, and know nothing of the generator."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from geo_sokoban_pipeline.envs.geo3k.figures.figure import Figure, Label, arc_sweep

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)?(?:√(\d+))?")
_LINEAR = re.compile(r"\(?(\d*)x(?: ([+−]) (\d+))?\)?")


def read_label(text: str, x: float) -> float:
    """Value of a measuring label's text at x: a number, a root, x, or a linear expression."""
    body = text.removesuffix("°")
    if found := _LINEAR.fullmatch(body):
        factor, sign, constant = found.groups()
        return float(factor or 1) * x + (int(constant) * (1 if sign == "+" else -1) if constant else 0)
    found = _NUMBER.fullmatch(body)
    assert found and body, text
    return float(found[1] or 1) * math.sqrt(int(found[2] or 1))


def measuring(figure: Figure) -> Iterator[Label]:
    """Labels that measure something."""
    return (label for label in figure.labels if label.kind != "name")


def solve_for_x(figure: Figure) -> float | None:
    """The x at which the labels say what the drawing measures, None where no label holds x.

    An expression `p x + q` gives x by itself, because the drawing knows its value.
    """
    for label in measuring(figure):
        if "x" in label.text:
            constant = read_label(label.text, 0.0)
            return (figure.measure(label) - constant) / (read_label(label.text, 1.0) - constant)
    return None


def filled_area(figure: Figure) -> float:
    """Area of what is filled in units of length squared: a polygon's by its corners, a sector's by its angle."""
    for stroke in figure.strokes:
        if stroke.style == "filled":
            pairs = zip(stroke.points, stroke.points[1:], strict=False)
            return abs(sum((a.conjugate() * b).imag for a, b in pairs)) / 2 * figure.unit**2
    (sector,) = (arc for arc in figure.arcs if arc.filled)
    radius = abs(sector.start - sector.centre) * figure.unit
    return math.radians(abs(arc_sweep(sector.centre, sector.start, sector.middle, sector.end))) / 2 * radius**2


def circle_radius(figure: Figure) -> float:
    """Radius of the whole circle, in units of length."""
    circle = next(arc for arc in figure.arcs if arc.start == arc.end)
    return abs(circle.start - circle.centre) * figure.unit


def drawn_answer(family: str, question: str, figure: Figure) -> float:
    """The answer as the drawing gives it."""
    if family in ("circle_circumference", "circle_area"):
        radius = circle_radius(figure)
        return 2 * math.pi * radius if "circumference" in question else math.pi * radius**2
    if family == "sector":
        area, radius = filled_area(figure), circle_radius(figure)
        return area if "area" in question else 2 * area / radius
    if family.endswith("_area"):
        return filled_area(figure)
    x = solve_for_x(figure)
    assert x is not None
    named = re.search(r"m \\(?:angle|widehat)|measure of the angle", question)
    plain = [label for label in measuring(figure) if label.text in ("x", "x°")]
    if plain or not named:
        return x
    marked = re.search(r"marked \$(.*)\$", question)
    if marked:
        text = marked[1].replace("-", "−")
        return next(figure.measure(label) for label in measuring(figure) if label.text.strip("()°") == text)
    return figure.measure(named_label(question, figure))


def named_label(question: str, figure: Figure) -> Label:
    """The label of the angle or arc that a question names by points."""
    place = {label.text: label.points[0] for label in figure.labels if label.kind == "name"}
    found = re.search(r"\\(angle|widehat) ?\{?([A-Z]+)\}?", question)
    assert found
    kind, points = found[1], [place[letter] for letter in found[2]]
    for label in measuring(figure):
        ends = label.points[1:3] if label.kind == "angle" else label.points[1::2]
        if kind == "widehat" and label.kind == "arc" and near(ends, points):
            return label
        if kind == "angle" and label.kind == "angle" and abs(label.points[0] - points[1]) < 1e-6:
            outer = [points[0], points[2]]
            if all(on_ray(points[1], end, outer) for end in ends):
                return label
    raise AssertionError(f"nothing in the drawing is called {found[2]}")


def near(some: Sequence[complex], others: Sequence[complex]) -> bool:
    """Whether each of some points is one of the others."""
    return all(min(abs(a - b) for b in others) < 1e-6 for a in some)


def on_ray(vertex: complex, end: complex, points: Sequence[complex]) -> bool:
    """Whether one of the points lies on the ray from the vertex through `end`."""
    ways = ((point - vertex) / (end - vertex) for point in points)
    return any(abs(way.imag) < 1e-6 and way.real > 0 for way in ways)
