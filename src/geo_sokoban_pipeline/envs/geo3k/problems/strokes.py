"""Lines of a drawing as chains of points in pixels, shared by the renderer and by those who keep clear of them."""

from __future__ import annotations

import math

import numpy as np

from geo_sokoban_pipeline.envs.geo3k.problems.figure import Arc, arc_sweep

_STEP = 3.0  # pixels between points of an arc; the chord then strays less than a twentieth of a pixel
_DASH = 3.2  # length of a dash and of a gap, in line widths


def arc_chain(arc: Arc) -> tuple[complex, ...]:
    """Points on an arc in pixels, ends included."""
    sweep = math.radians(arc_sweep(arc.centre, arc.start, arc.middle, arc.end))
    steps = max(8, math.ceil(abs(sweep) * abs(arc.start - arc.centre) / _STEP))
    turns = np.exp(1j * np.linspace(0.0, sweep, steps + 1))
    return tuple((arc.centre + (arc.start - arc.centre) * turns).tolist())


def dashes(start: complex, end: complex, width: float) -> list[tuple[complex, complex]]:
    """Dashes of a line, the first and the last at its ends."""
    count = max(1, round((abs(end - start) / (_DASH * width) + 1) / 2))
    return [
        (
            start + (end - start) * (2 * index) / (2 * count - 1),
            start + (end - start) * (2 * index + 1) / (2 * count - 1),
        )
        for index in range(count)
    ]
