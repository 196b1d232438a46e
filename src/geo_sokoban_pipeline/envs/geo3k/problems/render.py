"""Pictures of drawings: strokes are smoothed by drawing them four times as large, texts are laid over them.

A picture depends on its layout alone.
"""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw

from geo_sokoban_pipeline.envs.geo3k.problems.figure import Arc, Mark
from geo_sokoban_pipeline.envs.geo3k.problems.glyphs import OVERSAMPLE, text_mask
from geo_sokoban_pipeline.envs.geo3k.problems.layout import Layout
from geo_sokoban_pipeline.envs.geo3k.problems.marks import arrow_heads, mark_shape
from geo_sokoban_pipeline.envs.geo3k.problems.strokes import arc_chain, dashes
from geo_sokoban_pipeline.envs.png import encode_png

PAPER, INK = (255, 255, 255), (0, 0, 0)
LINE, MARK, FILL = (0, 104, 178), (214, 0, 108), (205, 228, 243)


def render_layout(layout: Layout) -> Image.Image:
    """RGB picture of a layout."""
    return Image.fromarray(_pixels(layout))


def render_layout_png(layout: Layout) -> bytes:
    """PNG file of `render_layout`; equal layouts give equal bytes."""
    return encode_png(_pixels(layout))


def _pixels(layout: Layout) -> np.ndarray:
    canvas = Image.new("RGB", (layout.width * OVERSAMPLE, layout.height * OVERSAMPLE), PAPER)
    pencil = _Pencil(ImageDraw.Draw(canvas), layout.line_width)
    for arc in layout.figure.arcs:
        pencil.draw_arc(arc, fill_only=True)
    for style in ("filled", "line", "dashed"):
        for stroke in layout.figure.strokes:
            if stroke.style == style:
                pencil.draw_chain(stroke.points, style)
                for head in arrow_heads(stroke, layout.line_width):
                    pencil.fill(head, LINE)
    for arc in layout.figure.arcs:
        pencil.draw_arc(arc)
    for mark in layout.figure.marks:
        pencil.draw_mark(mark)
    pixels = np.asarray(canvas.reduce(OVERSAMPLE)).copy()
    for label, (x, y) in zip(layout.figure.labels, layout.pens, strict=True):
        _write(pixels, label.text, x, y, layout.font_size)
    return pixels


def _write(pixels: np.ndarray, text: str, x: int, y: int, size: int) -> None:
    """Lay a text over the picture, its baseline starting at (x, y); what is outside is cut off."""
    mask = text_mask(text, size)
    left, top = x - mask.origin[0], y - mask.origin[1]
    height, width = mask.pixels.shape
    rows = slice(max(0, top), min(pixels.shape[0], top + height))
    columns = slice(max(0, left), min(pixels.shape[1], left + width))
    ink = mask.pixels[rows.start - top : rows.stop - top, columns.start - left : columns.stop - left].astype(np.uint16)
    area = pixels[rows, columns]
    # All inks are black, so laying ink over paper is a product.
    pixels[rows, columns] = (area * (255 - ink)[..., None] // 255).astype(np.uint8)


class _Pencil:
    """Draws on an enlarged canvas in the picture's pixels."""

    def __init__(self, draw: ImageDraw.ImageDraw, width: float) -> None:
        self.draw = draw
        self.width = width

    def at(self, point: complex) -> tuple[float, float]:
        # Pillow's coordinates are centres of pixels, ours are edges. Rounded, because the ends of a level line may
        # differ in their last bits, and would then be drawn on two rows.
        return round(point.real * OVERSAMPLE - 0.5, 3), round(point.imag * OVERSAMPLE - 0.5, 3)

    def line(self, points: tuple[complex, ...], colour: tuple[int, int, int], width: float) -> None:
        thick = max(1, round(width * OVERSAMPLE))
        chain = [self.at(point) for point in points]
        self.draw.line(chain, fill=colour, width=thick)
        for x, y in chain:  # round ends and corners
            self.draw.ellipse([x - thick / 2, y - thick / 2, x + thick / 2, y + thick / 2], fill=colour)

    def fill(self, points: tuple[complex, ...], colour: tuple[int, int, int]) -> None:
        self.draw.polygon([self.at(point) for point in points], fill=colour)

    def draw_chain(self, points: tuple[complex, ...], style: str) -> None:
        if style == "filled":
            self.fill(points, FILL)
        elif style == "line":
            self.line(points, LINE, self.width)
        else:
            for start, end in zip(points, points[1:], strict=False):
                for dash in dashes(start, end, self.width):
                    self.line(dash, LINE, self.width)

    def draw_arc(self, arc: Arc, *, fill_only: bool = False) -> None:
        if fill_only and not arc.filled:
            return
        chain = arc_chain(arc)
        if fill_only:
            self.fill((arc.centre, *chain), FILL)
        else:
            self.line(chain, LINE, self.width)

    def draw_mark(self, mark: Mark) -> None:
        for chain, closed in mark_shape(mark, self.width):
            if closed:
                self.fill(chain, LINE if mark.kind == "dot" else MARK)
            else:
                self.line(chain, MARK, 0.75 * self.width)
