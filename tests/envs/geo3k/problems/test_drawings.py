"""Drawings are to scale, prove their answers, and can be read: no text touches a line, another text or the border."""

from __future__ import annotations

import io
import math
import random
import re
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from geo_sokoban_pipeline.envs.geo3k.config import ProblemOptions
from geo_sokoban_pipeline.envs.geo3k.figures.drawing import (
    FigureLayout,
    line_pieces,
    overlapping,
    render_layout_png,
    touched,
)
from geo_sokoban_pipeline.envs.geo3k.figures.figure import Figure, Label, Stroke, arc_sweep
from geo_sokoban_pipeline.envs.geo3k.figures.generation import DIFFICULTIES, FAMILIES, draw_sketch, lay_out
from geo_sokoban_pipeline.envs.geo3k.figures.problem import Sketch
from geo_sokoban_pipeline.envs.geo3k.figures.tiny_figures import TINY_FAMILIES, family_angles

KINDS = [("tiny", name) for name in TINY_FAMILIES] + [(level, name) for level in DIFFICULTIES for name in FAMILIES]
kinds = st.sampled_from(KINDS)
seeds = st.integers(0, 2**32)


# Proofs of a drawing by itself: its coordinates are measured and its labels read, without the generator.

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


def drawn(kind: tuple[str, str], seed: int, scale: float = 1.0) -> tuple[Sketch, FigureLayout]:
    """The first problem of a kind from a seed whose labels find room."""
    difficulty, family = kind
    generator, options = random.Random(seed), ProblemOptions(difficulty=difficulty, picture_scale=scale)
    angles = family_angles(family, options.angle_step) if difficulty == "tiny" else ()
    for _ in range(40):
        sketch = draw_sketch(family, difficulty, generator, options, angles)
        layout = lay_out(sketch, difficulty, generator, options)
        if layout is not None:
            return sketch, layout
    raise AssertionError(f"{kind}: no room for the labels in 40 problems")


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_a_kind_is_to_scale_and_proves_its_answer(kind):
    for seed in range(8):
        check_scale(kind, *drawn(kind, seed))


def check_scale(kind: tuple[str, str], sketch: Sketch, layout: FigureLayout) -> None:
    answer = float(sketch.value)
    assert answer > 0
    for figure in (sketch.figure, layout.figure):
        assert drawn_answer(kind[1], sketch.question, figure) == pytest.approx(answer, rel=1e-6)
        x = answer if "x" in {label.text.strip("°") for label in figure.labels} else None
        for label in measuring(figure):
            assert figure.measure(label) == pytest.approx(label.value, rel=1e-6)
            if "x" not in label.text or x is not None:
                assert read_label(label.text, x or 0.0) == pytest.approx(figure.measure(label), rel=1e-6)


@settings(max_examples=100, deadline=None)
@given(kinds, seeds, st.sampled_from([1.0, 1.0, 2.0]))
def test_texts_touch_nothing(kind, seed, scale):
    layout = drawn(kind, seed, scale)[1]
    boxes = np.array(layout.boxes)
    pieces = line_pieces(layout.figure, layout.line_width)
    half = layout.line_width / 2
    # Half of a line's width, and half a pixel to be seen between.
    grown = boxes + np.array([-half - 0.5, -half - 0.5, half + 0.5, half + 0.5])
    meeting = [label.text for label, bad in zip(layout.figure.labels, touched(grown, pieces), strict=True) if bad]
    assert not meeting
    for index in range(len(boxes)):
        others = np.delete(boxes, index, axis=0)
        assert not overlapping(boxes[index : index + 1] + np.array([-2, -2, 2, 2]), others).any()
    assert boxes.min() >= 1
    assert (boxes[:, 2] < layout.width).all() and (boxes[:, 3] < layout.height).all()
    extent = pieces.reshape(-1, 2)
    assert extent.min() >= half and (extent.max(axis=0) <= (layout.width - half, layout.height - half)).all()


@settings(max_examples=30, deadline=None)
@given(kinds, seeds)
def test_boxes_hold_all_ink_and_nothing_else_is_black(kind, seed):
    layout = drawn(kind, seed)[1]
    pixels = np.asarray(Image.open(io.BytesIO(render_layout_png(layout)))).astype(int)
    assert pixels.shape == (layout.height, layout.width, 3)
    dark = pixels.max(axis=2) < 60  # lines are blue or magenta: one of their channels stays bright
    outside = dark.copy()
    for left, top, right, bottom in layout.boxes:
        assert dark[top:bottom, left:right].any()
        outside[top:bottom, left:right] = False
    assert not outside.any()
    assert (pixels[[0, -1]] == 255).all() or kind[0] == "tiny"


def test_measures_tell_a_wrong_drawing():
    """The checks above can fail: a label that says another angle or length is seen."""
    corner = (0j, 1 + 0j, 1j)
    figure = Figure((Stroke((1 + 0j, 0j, 1j)),), labels=(Label("angle", "80°", corner, 80),), unit=5.0)
    assert figure.measure(figure.labels[0]) == pytest.approx(90)
    assert figure.measure(Label("length", "4", (0j, 1 + 0j), 4)) == pytest.approx(5)
    assert read_label("(3x − 9)°", 20) == 51 and read_label("8√3", 0) == pytest.approx(13.8564, abs=1e-4)
    box = np.array([[0.4, 0.4, 0.6, 0.6], [2.0, 2.0, 3.0, 3.0]])
    assert touched(box, np.array([[0.0, 0.0, 1.0, 1.0]])).tolist() == [True, False]
    assert touched(box, np.array([[0.5, -9.0, 0.5, 9.0]])).tolist() == [True, False]
