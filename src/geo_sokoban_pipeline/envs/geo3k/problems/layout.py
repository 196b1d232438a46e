"""A drawing in pixels: the figure's coordinates, and the box of every label.

`y` grows downwards. A box is what is visible of a text, in whole pixels, right and bottom excluded.
"""

from __future__ import annotations

from dataclasses import dataclass

from geo_sokoban_pipeline.envs.geo3k.problems.figure import Figure, Label
from geo_sokoban_pipeline.envs.geo3k.problems.glyphs import CAP_HEIGHT, text_mask

Box = tuple[int, int, int, int]


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
