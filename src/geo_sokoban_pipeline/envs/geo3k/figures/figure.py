"""Elements of a drawing: strokes, marks and labels at points of the plane.

Points are complex numbers. A label that measures something holds the points it measures and its value, so whether a
figure is correct to scale can be measured on its coordinates, before and after it is laid out on an image. All values
are unsigned angles, lengths and arcs: mirroring, turning and scaling a figure changes none but lengths, and those by
one factor.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Point = complex
Map = Callable[[complex], complex]


@dataclass(frozen=True, slots=True)
class Stroke:
    """A chain of straight lines.

    Attributes:
        points: corners, in order.
        style: line, dashed (a height that is drawn in), or filled (the inside of a shape, under everything else).
        arrows: how many ends have an arrow head, because the line goes on: 0, 1 (the last point) or 2.
    """

    points: tuple[Point, ...]
    style: Literal["line", "dashed", "filled"] = "line"
    arrows: int = 0


@dataclass(frozen=True, slots=True)
class Arc:
    """The part of a circle from `start` through `middle` to `end`; `start == end` is the whole circle."""

    centre: Point
    start: Point
    middle: Point
    end: Point
    filled: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A sign with a size in pixels, not in the figure's units.

    Attributes:
        kind: `angle` (small arcs at points[0] from points[1] to points[2]), `right` (a square there), `tick` (across
            the middle of points[0] to points[1]), `parallel` (arrow heads there), `dot` (at points[0]).
        points: as the kind needs.
        count: how many arcs, ticks or heads; equal counts mean equal angles, equal lengths or parallel lines.
    """

    kind: Literal["angle", "right", "tick", "parallel", "dot"]
    points: tuple[Point, ...]
    count: int = 1


@dataclass(frozen=True, slots=True)
class Label:
    """A text in the drawing and what it measures.

    Attributes:
        kind: `angle` (at points[0] between points[1] and points[2]; value in degrees, below 180), `length` (from
            points[0] to points[1], not on the side of points[2] if there is one; value in units of length), `arc`
            (points: centre, start, middle, end; value in degrees), `name` (of points[0], written away from the other
            points; no value).
        text: what is written. Letters are slanted, `√` covers the number behind it.
        points: what is measured.
        value: true measure, the unknown's too; None for names.
        at: centre of the text where its place is fixed. None: the layout finds one.
    """

    kind: Literal["angle", "length", "arc", "name"]
    text: str
    points: tuple[Point, ...]
    value: float | None = None
    at: Point | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawing without a scale.

    Attributes:
        strokes, arcs, marks, labels: in the order in which they are drawn.
        unit: units of length per unit of the plane.
    """

    strokes: tuple[Stroke, ...] = ()
    arcs: tuple[Arc, ...] = ()
    marks: tuple[Mark, ...] = ()
    labels: tuple[Label, ...] = ()
    unit: float = field(default=1.0)

    def mapped(self, move: Map, factor: float) -> Figure:
        """The figure under a similarity.

        Args:
            move: a similarity of the plane, mirror images included.
            factor: by how much it stretches lengths.
        """

        def all_of(points: tuple[Point, ...]) -> tuple[Point, ...]:
            return tuple(move(point) for point in points)

        return Figure(
            tuple(replace(stroke, points=all_of(stroke.points)) for stroke in self.strokes),
            tuple(
                Arc(move(arc.centre), move(arc.start), move(arc.middle), move(arc.end), arc.filled) for arc in self.arcs
            ),
            tuple(replace(mark, points=all_of(mark.points)) for mark in self.marks),
            tuple(
                replace(label, points=all_of(label.points), at=None if label.at is None else move(label.at))
                for label in self.labels
            ),
            self.unit / factor,
        )

    def measure(self, label: Label) -> float:
        """Value of a label according to its coordinates, in its unit."""
        if label.kind == "angle":
            vertex, one, other = label.points
            return abs(math.degrees(cmath.phase((other - vertex) / (one - vertex))))
        if label.kind == "arc":
            return abs(arc_sweep(*label.points))
        return abs(label.points[1] - label.points[0]) * self.unit


def polar(radius: float, degrees: float) -> Point:
    """Point at a distance and direction from the origin."""
    return cmath.rect(radius, math.radians(degrees))


def arc_sweep(centre: Point, start: Point, middle: Point, end: Point) -> float:
    """Signed degrees from start to end on the side of `middle`, ±360 for the whole circle."""
    full = math.degrees(cmath.phase((end - centre) / (start - centre))) % 360.0 if start != end else 360.0
    half = math.degrees(cmath.phase((middle - centre) / (start - centre))) % 360.0
    return full if half <= full else full - 360.0


def arc_of(centre: Point, radius: float, start: float, end: float) -> Arc:
    """Arc from one direction (degrees) to another, through the middle of both."""
    middle = (start + end) / 2
    first = centre + polar(radius, start)
    last = first if abs(end - start) >= 360 else centre + polar(radius, end)
    return Arc(centre, first, centre + polar(radius, middle), last)


def angle(text: str, degrees: float, vertex: Point, one: Point, other: Point) -> Label:
    """Label of the angle at a vertex between two rays."""
    return Label("angle", text, (vertex, one, other), degrees)


def length(text: str, value: float, start: Point, end: Point, inside: Point | None = None) -> Label:
    """Label of a segment's length, on the other side of it than a point inside the shape, if one is given."""
    return Label("length", text, (start, end) if inside is None else (start, end, inside), value)


def arc_label(text: str, degrees: float, arc: Arc) -> Label:
    """Label of an arc."""
    return Label("arc", text, (arc.centre, arc.start, arc.middle, arc.end), degrees)


def name(text: str, point: Point, *neighbours: Point) -> Label:
    """Name of a point, to be written away from the points it is joined with."""
    return Label("name", text, (point, *neighbours))


def corner_names(names: str, points: Sequence[Point]) -> tuple[Label, ...]:
    """Names of a polygon's corners."""
    count = len(points)
    return tuple(
        name(text, point, points[index - 1], points[(index + 1) % count])
        for index, (text, point) in enumerate(zip(names, points, strict=True))
    )


def circle_of(centre: Point, radius: float) -> Arc:
    """Whole circle."""
    return Arc(centre, centre + radius, centre - radius, centre + radius)
