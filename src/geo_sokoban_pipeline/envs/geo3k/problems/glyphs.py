"""Texts of drawings as masks, made from Pillow's own font, which every machine with Pillow has.

Glyphs are set one by one with their own widths, without kerning or shaping, so a text looks the same whichever
layout library Pillow was built with. Letters are slanted, as variables and names of points are in textbooks. The font
has no minus and no root sign: these two are drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import numpy as np
from PIL import Image, ImageDraw, ImageFont

OVERSAMPLE = 4
CAP_HEIGHT = 0.68  # of the font's size, as are all of these
_SLANT = 0.2
_BAR = 0.075
_MINUS = 0.583
_ROOT = 0.52
_VISIBLE = 24  # darkness from which a pixel counts as ink


@dataclass(frozen=True, slots=True, eq=False)
class TextMask:
    """A text's darkness and where its pen starts.

    Attributes:
        pixels: (h, w) uint8, 255 is full ink.
        origin: (x, y) of the pen at the start of the baseline, whole pixels within `pixels`.
        width: of the text without a degree sign at its end, pixels; what a fixed place is the middle of.
        ink: (left, top, right, bottom) of what is visible, relative to the origin.
    """

    pixels: np.ndarray
    origin: tuple[int, int]
    width: float
    ink: tuple[int, int, int, int]


@lru_cache(maxsize=4096)
def text_mask(text: str, size: int) -> TextMask:
    """Mask of a text.

    Args:
        text: digits, letters, `+`, `−`, `(`, `)`, `.`, `°`, spaces, and `√` in front of the number it covers.
        size: of the font, in pixels.
    """
    big = size * OVERSAMPLE
    pad = math.ceil(size * 0.5)
    runs = ["".join(run) for _, run in groupby(text, _class_of)]
    width = pad * 2 + math.ceil(len(text) * size * 0.9) + size
    canvas = Image.new("L", (width * OVERSAMPLE, (size + 2 * pad) * OVERSAMPLE), 0)
    pen = float(pad * OVERSAMPLE)
    baseline = (pad + size) * OVERSAMPLE
    core = pen
    root_start: float | None = None
    for run in runs:
        if run.startswith("√"):
            root_start = pen
            pen += _ROOT * big
            continue
        pen = _draw_run(canvas, run, pen, baseline, big)
        if root_start is not None:
            _draw_root(canvas, root_start, pen, baseline, big)
            root_start = None
        if run != "°":
            core = pen
    pixels = np.asarray(canvas.reduce(OVERSAMPLE)).copy()
    pixels.setflags(write=False)
    origin = (pad, pad + size)
    rows, columns = np.nonzero(pixels >= _VISIBLE)
    ink = (
        int(columns.min()) - origin[0],
        int(rows.min()) - origin[1],
        int(columns.max()) + 1 - origin[0],
        int(rows.max()) + 1 - origin[1],
    )
    return TextMask(pixels, origin, core / OVERSAMPLE - pad, ink)


def _class_of(character: str) -> str:
    if character.isalpha():
        return "letter"
    return character if character in "√−°" else "upright"


@lru_cache(maxsize=16)
def _font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise RuntimeError("Pillow was built without FreeType, so drawings have no font; install Pillow's own wheel.")
    return font


def _draw_run(canvas: Image.Image, run: str, pen: float, baseline: int, big: int) -> float:
    """Draw glyphs of one class, return where the next one starts."""
    if run.startswith("−"):
        bar, middle = _BAR * big, baseline - 0.3 * big
        ends = (
            round(pen + 0.06 * big),
            round(middle - bar / 2),
            round(pen + (_MINUS - 0.06) * big),
            round(middle + bar / 2),
        )
        ImageDraw.Draw(canvas).rectangle(ends, fill=255)
        return pen + _MINUS * big
    font = _font(big)
    layer = Image.new("L", canvas.size, 0) if _class_of(run[0]) == "letter" else canvas
    draw = ImageDraw.Draw(layer)
    for character in run:
        draw.text((round(pen), baseline), character, fill=255, font=font, anchor="ls")
        pen += font.getlength(character)
    if layer is not canvas:
        slanted = layer.transform(layer.size, Image.Transform.AFFINE, (1, _SLANT, -_SLANT * baseline, 0, 1, 0))
        canvas.paste(255, (0, 0), slanted)
    return pen


def _draw_root(canvas: Image.Image, start: float, end: float, baseline: int, big: int) -> None:
    """Root sign from `start`, its bar to `end`."""
    top, thick = baseline - 0.86 * big, round(_BAR * big)
    corners = [(0.04, 0.30), (0.13, 0.36), (0.27, 0.02)]
    line = [(start + x * big, baseline - y * big) for x, y in corners]
    line += [(start + 0.46 * big, top), (end + 0.04 * big, top)]
    ImageDraw.Draw(canvas).line(line, fill=255, width=thick, joint="curve")
