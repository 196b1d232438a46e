"""Places for labels: candidates for each kind, best first, of which the first that touches nothing is taken.

Labels of angles lie on the bisector, behind the angle's arc; labels of lengths beside the middle of their segment,
outside the figure if they can; labels of arcs outside the circle; names away from the lines that meet there.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Iterator, Sequence

import numpy as np

from geo_sokoban_pipeline.envs.geo3k.problems.figure import Figure, Label, arc_sweep
from geo_sokoban_pipeline.envs.geo3k.problems.glyphs import text_mask
from geo_sokoban_pipeline.envs.geo3k.problems.obstacles import line_pieces, overlapping, reach, touched

# Pixels between a text and the edge of a line, and between two texts.
CLEARANCE, APART = 2.5, 4.0
_ORDER = {"angle": 0, "length": 1, "arc": 2, "name": 3}
_NAME_DIRECTIONS = 24
# A label is in its angle's corner: this near to the vertex in pixels, or in parts of the shorter side.
_NEAR, _LARGEST_PART = 40.0, 0.62
_CLEARLY = 1.25


def place_labels(figure: Figure, font_size: int, line_width: float) -> list[tuple[int, int]] | None:
    """Start of each label's baseline, None where one finds no free place.

    Args:
        figure: in pixels.
        font_size, line_width: pixels.
    """
    pieces = line_pieces(figure, line_width)
    bare = line_pieces(figure, line_width, marks=False)
    middle = complex(*_middle(bare))
    pens: dict[int, tuple[int, int]] = {}
    placed: list[tuple[float, float, float, float]] = []
    for index in sorted(range(len(figure.labels)), key=lambda number: (_ORDER[figure.labels[number].kind], number)):
        label = figure.labels[index]
        left, top, right, bottom = text_mask(label.text, font_size).ink
        size = (right - left, bottom - top)
        centres = np.array(list(_candidates(label, size, bare, middle, line_width)))
        if label.kind == "angle":
            centres = centres[_in_own_corner(centres, label, figure)]
        if not len(centres):
            return None
        corners = np.round(np.stack([centres.real - size[0] / 2, centres.imag - size[1] / 2], axis=1))
        boxes = np.concatenate([corners, corners + size], axis=1)
        margin = CLEARANCE + line_width / 2
        free = ~touched(_grown(boxes, margin), pieces) & ~overlapping(_grown(boxes, APART), np.array(placed))
        if not free.any():
            return None
        box = boxes[int(free.argmax())]
        placed.append((box[0], box[1], box[2], box[3]))
        pens[index] = (int(box[0]) - left, int(box[1]) - top)
    return [pens[index] for index in range(len(figure.labels))]


def _candidates(
    label: Label, size: tuple[int, int], bare: np.ndarray, middle: complex, line_width: float
) -> Iterator[complex]:
    if label.kind == "angle":
        return _in_angle(label.points, size, bare)
    if label.kind == "length":
        return _beside(label.points, size, middle, line_width)
    if label.kind == "arc":
        return _at_arc(label.points, size, line_width)
    return _around(label.points, size, line_width)


def _in_angle(points: Sequence[complex], size: tuple[int, int], bare: np.ndarray) -> Iterator[complex]:
    vertex, one, other = points
    half = cmath.phase((other - vertex) / (one - vertex)) / 2
    bisector = (one - vertex) / abs(one - vertex) * cmath.exp(1j * half)
    diagonal = math.hypot(*size) / 2
    farthest = max(_NEAR, _LARGEST_PART * min(abs(one - vertex), abs(other - vertex)))
    ways = [bisector * cmath.exp(1j * half * part) for part in (0.0, 0.25, -0.25, 0.45, -0.45)]
    limits = [reach(vertex, way, bare) for way in ways]
    for near in range(0, 80, 2):
        for way, limit in zip(ways, limits, strict=True):
            if diagonal + near < min(limit, farthest):
                yield vertex + way * (diagonal + near)


def _in_own_corner(centres: np.ndarray, label: Label, figure: Figure) -> np.ndarray:
    """Which places are clearly nearer to the angle's vertex than to any other labelled one."""
    vertex = label.points[0]
    others = [one.points[0] for one in figure.labels if one.kind == "angle" and abs(one.points[0] - vertex) > 1e-6]
    nearest = np.min([np.abs(centres - other) for other in others], axis=0) if others else np.inf
    return np.asarray(np.abs(centres - vertex) * _CLEARLY < nearest)


def _beside(points: Sequence[complex], size: tuple[int, int], middle: complex, line_width: float) -> Iterator[complex]:
    start, end = points[:2]
    normal = (end - start) / abs(end - start) * 1j
    outwards = (start + end) / 2 - (points[2] if len(points) > 2 else middle)
    if outwards.real * normal.real + outwards.imag * normal.imag < 0:
        normal = -normal
    distance = _support(normal, size, line_width)
    for further in (0.0, 3.0):
        for side in (normal, -normal):
            for part in (0.5, 0.44, 0.56, 0.38, 0.62, 0.3, 0.7):
                yield start + (end - start) * part + side * (distance + further)


def _at_arc(points: Sequence[complex], size: tuple[int, int], line_width: float) -> Iterator[complex]:
    centre, start, middle, end = points
    sweep = math.radians(arc_sweep(centre, start, middle, end))
    radius = abs(start - centre)
    for side in (1, -1):
        for part in (0.5, 0.42, 0.58, 0.34, 0.66, 0.26, 0.74):
            direction = (start - centre) / radius * cmath.exp(1j * sweep * part)
            for further in (0.0, 3.0):
                distance = _support(direction, size, line_width) + 1 + further
                yield centre + direction * (radius + side * distance)


def _around(points: Sequence[complex], size: tuple[int, int], line_width: float) -> Iterator[complex]:
    point = points[0]
    neighbours = [other for other in points[1:] if other != point]
    away = -sum(((other - point) / abs(other - point) for other in neighbours), 0j)
    if abs(away) < 1e-6:  # a point in the middle of a line: beside it, above where there is a choice
        away = (neighbours[0] - point) * 1j if neighbours else -1j
        away = away if away.imag <= 0 else -away
    away /= abs(away)
    for further in (0.0, 3.0, 6.0):
        for index in range(_NAME_DIRECTIONS):
            turn = math.tau / _NAME_DIRECTIONS * ((index + 1) // 2) * (-1) ** index
            direction = away * cmath.exp(1j * turn)
            yield point + direction * (_support(direction, size, line_width) + further)


def _support(direction: complex, size: tuple[int, int], line_width: float) -> float:
    """Distance at which a text, its clearance included, lies beyond a line across a direction."""
    margin = CLEARANCE + line_width / 2
    # One more pixel, because boxes are moved to whole ones.
    return (abs(direction.real) * (size[0] + 2 * margin) + abs(direction.imag) * (size[1] + 2 * margin)) / 2 + 1


def _grown(boxes: np.ndarray, margin: float) -> np.ndarray:
    return boxes + np.array([-margin, -margin, margin, margin])


def _middle(pieces: np.ndarray) -> tuple[float, float]:
    """Middle of the lines' bounding box."""
    x, y = pieces[:, 0::2], pieces[:, 1::2]
    return float(x.min() + x.max()) / 2, float(y.min() + y.max()) / 2
