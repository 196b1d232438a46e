"""Signs with a size in pixels: arcs in angles, right-angle squares, ticks, heads on parallel lines, arrows, dots.

A sign is a list of point chains in the picture's pixels, open ones to be drawn as lines and closed ones to be filled.
The layout keeps labels clear of the very shapes that are drawn.
"""

from __future__ import annotations

import cmath
import math

from geo_sokoban_pipeline.envs.geo3k.problems.figure import Mark, Stroke

Chain = tuple[complex, ...]
Shape = list[tuple[Chain, bool]]

# In line widths.
_ANGLE_RADIUS, _ANGLE_GAP = 10.0, 2.6
_SQUARE = 6.0
_TICK, _TICK_GAP = 4.0, 2.6
_HEAD_LENGTH, _HEAD_HALF, _HEAD_GAP = 6.0, 2.6, 5.0
_DOT = 1.9


def mark_shape(mark: Mark, width: float) -> Shape:
    """Chains of a mark; the flag says whether one is filled.

    Args:
        mark: its points in pixels.
        width: of the drawing's lines, pixels.
    """
    if mark.kind == "angle":
        return [(angle_arc(mark, width, index), False) for index in range(mark.count)]
    if mark.kind == "right":
        return [(_square(mark.points, _SQUARE * width), False)]
    if mark.kind == "tick":
        return [(tick, False) for tick in _ticks(mark, width)]
    if mark.kind == "parallel":
        return [(head, True) for head in _heads(mark, width)]
    return [(_disc(mark.points[0], _DOT * width), True)]


def angle_arc(mark: Mark, width: float, index: int = 0) -> Chain:
    """The arc number `index` of an angle's mark; narrow angles have wider arcs, so that they can be seen."""
    vertex, one, other = mark.points
    turn = cmath.phase((other - vertex) / (one - vertex))
    radius = (_ANGLE_RADIUS * (1.0 + max(0.0, 0.7 - abs(turn))) + index * _ANGLE_GAP) * width
    start = (one - vertex) / abs(one - vertex) * radius
    steps = max(4, math.ceil(abs(turn) * radius / 2))
    return tuple(vertex + start * cmath.exp(1j * turn * step / steps) for step in range(steps + 1))


def arrow_heads(stroke: Stroke, width: float) -> list[Chain]:
    """Triangles at the ends of a stroke that goes on."""
    ends = [stroke.points[-2:], (stroke.points[1], stroke.points[0])]
    return [_arrow_head(behind, tip, width) for behind, tip in ends[: stroke.arrows]]


def _arrow_head(behind: complex, tip: complex, width: float) -> Chain:
    # The tip lies a little beyond the end of the line, whose round end would blunt it.
    along = (tip - behind) / abs(tip - behind) * width
    base = tip - along * (_HEAD_LENGTH - 3.0)
    return (tip + along * 3.0, base + along * 1j * _HEAD_HALF, base - along * 1j * _HEAD_HALF)


def _square(points: Chain, side: float) -> Chain:
    vertex, one, other = points
    first = (one - vertex) / abs(one - vertex) * side
    second = (other - vertex) / abs(other - vertex) * side
    return (vertex + first, vertex + first + second, vertex + second)


def _ticks(mark: Mark, width: float) -> list[Chain]:
    start, end = mark.points
    along = (end - start) / abs(end - start) * width
    ticks: list[Chain] = []
    for index in range(mark.count):
        middle = (start + end) / 2 + along * _TICK_GAP * (index - (mark.count - 1) / 2)
        ticks.append((middle - along * 1j * _TICK, middle + along * 1j * _TICK))
    return ticks


def _heads(mark: Mark, width: float) -> list[Chain]:
    start, end = mark.points
    along = (end - start) / abs(end - start) * width
    heads: list[Chain] = []
    for index in range(mark.count):
        tip = (start + end) / 2 + along * (_HEAD_GAP * (index - (mark.count - 1) / 2) + _HEAD_LENGTH / 2)
        base = tip - along * _HEAD_LENGTH
        heads.append((tip, base + along * 1j * _HEAD_HALF, base - along * 1j * _HEAD_HALF))
    return heads


def _disc(centre: complex, radius: float) -> Chain:
    return tuple(centre + cmath.rect(radius, math.tau * step / 24) for step in range(24))
