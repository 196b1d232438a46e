"""A drawing in pixels: the figure's coordinates, and the box of every label.

`y` grows downwards. A box is what is visible of a text, in whole pixels, right and bottom excluded.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np

from geo_sokoban_pipeline.envs.geo3k.problems.figure import Figure, Label, polar
from geo_sokoban_pipeline.envs.geo3k.problems.glyphs import CAP_HEIGHT, text_mask
from geo_sokoban_pipeline.envs.geo3k.problems.obstacles import line_pieces
from geo_sokoban_pipeline.envs.geo3k.problems.placing import place_labels

Box = tuple[int, int, int, int]

# At scale 1, pixels: pictures come out at about 380×270, the median of Geometry3K.
_FONT_SIZE, _LINE_WIDTH, _MARGIN = 17, 1.7, 10
_WIDTHS, _HEIGHTS = (240.0, 350.0), (180.0, 250.0)
_ORIENTATIONS = 6
_TURNED_SHARE = 0.4


@dataclass(frozen=True, slots=True)
class Layout:
    """A figure on a picture.

    Attributes:
        width, height: of the picture, pixels.
        figure: in pixels.
        pens: start of each label's baseline, in the order of the figure's labels.
        font_size: pixels.
        line_width: pixels.
    """

    width: int
    height: int
    figure: Figure
    pens: tuple[tuple[int, int], ...]
    font_size: int
    line_width: float

    @property
    def boxes(self) -> list[Box]:
        """Visible part of each label: left, top, right, bottom."""
        return [text_box(label, pen, self.font_size) for label, pen in zip(self.figure.labels, self.pens, strict=True)]


def text_box(label: Label, pen: tuple[int, int], font_size: int) -> Box:
    """Visible part of a label whose baseline starts at `pen`."""
    left, top, right, bottom = text_mask(label.text, font_size).ink
    return pen[0] + left, pen[1] + top, pen[0] + right, pen[1] + bottom


def pen_at(label: Label, centre: complex, font_size: int) -> tuple[int, int]:
    """Start of the baseline that puts the middle of a text, a degree sign at its end not counted, at a point."""
    width = text_mask(label.text, font_size).width
    return round(centre.real - width / 2), round(centre.imag + CAP_HEIGHT * font_size / 2)


def lay_out_fixed(figure: Figure, width: int, height: int, font_size: int, line_width: float) -> Layout:
    """Layout of a figure that is in pixels already and whose labels all have a place.

    Raises:
        ValueError: a label has none.
    """
    pens = []
    for label in figure.labels:
        if label.at is None:
            raise ValueError(f"label {label.text!r} has no place; set `at`")
        pens.append(pen_at(label, label.at, font_size))
    return Layout(width, height, figure, tuple(pens), font_size, line_width)


def lay_out_free(figure: Figure, generator: random.Random, scale: float, *, upright: bool) -> Layout | None:
    """Layout of a figure of any size: turned, mirrored and stretched, its labels placed, the picture cut to fit.

    Args:
        figure: `y` grows upwards, any unit.
        generator: draws the orientation and the size.
        scale: of the picture; 1 gives at most 400×300 px.
        upright: whether level lines stay level (it may still be mirrored).

    Returns:
        None if labels find no room in several orientations.
    """
    for _ in range(_ORIENTATIONS):
        placed = _try_orientation(figure, generator, scale, upright)
        if placed is not None:
            return placed
    return None


def _try_orientation(figure: Figure, generator: random.Random, scale: float, upright: bool) -> Layout | None:
    turn = 1 + 0j
    if not upright and generator.random() < _TURNED_SHARE:
        turn = polar(1.0, generator.uniform(-180.0, 180.0))
    mirrored = generator.random() < 0.5
    font_size, line_width = max(8, round(_FONT_SIZE * scale)), _LINE_WIDTH * scale

    def turned(point: complex) -> complex:
        # Picture rows grow downwards: the mirror image of the plane.
        return ((-point.conjugate() if mirrored else point) * turn).conjugate()

    pieces = line_pieces(figure.mapped(turned, 1.0), line_width, marks=False)
    left, top, right, bottom = _extent(pieces)
    wanted = (generator.uniform(*_WIDTHS) * scale, generator.uniform(*_HEIGHTS) * scale)
    factor = min(wanted[0] / max(right - left, 1e-9), wanted[1] / max(bottom - top, 1e-9))
    drawn = figure.mapped(lambda point: turned(point) * factor, factor)
    pens = place_labels(drawn, font_size, line_width)
    if pens is None:
        return None
    return _cut_to_fit(drawn, pens, font_size, line_width, round(_MARGIN * scale))


def _cut_to_fit(figure: Figure, pens: list[tuple[int, int]], font_size: int, line_width: float, margin: int) -> Layout:
    """Move everything so that the picture ends a margin beyond the outermost line or text."""
    boxes = [text_box(label, pen, font_size) for label, pen in zip(figure.labels, pens, strict=True)]
    left, top, right, bottom = _extent(line_pieces(figure, line_width))
    left, top = min([left, *(box[0] for box in boxes)]), min([top, *(box[1] for box in boxes)])
    right, bottom = max([right, *(box[2] for box in boxes)]), max([bottom, *(box[3] for box in boxes)])
    x, y = margin - math.floor(left), margin - math.floor(top)
    moved = figure.mapped(lambda point: point + complex(x, y), 1.0)
    width, height = math.ceil(right) + x + margin, math.ceil(bottom) + y + margin
    return Layout(width, height, moved, tuple((pen[0] + x, pen[1] + y) for pen in pens), font_size, line_width)


def _extent(pieces: np.ndarray) -> tuple[float, float, float, float]:
    x, y = pieces[:, 0::2], pieces[:, 1::2]
    return float(x.min()), float(y.min()), float(x.max()), float(y.max())
