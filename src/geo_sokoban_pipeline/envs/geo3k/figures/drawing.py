"""Drawings: a figure in pixels, with labels where they touch nothing.

The same figure gives the same pixels on every machine: text is drawn with Pillow's own font, lines are smoothed by
drawing them four times as large.
"""

from __future__ import annotations

import cmath
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from geo_sokoban_pipeline.envs.geo3k.figures.figure import Arc, Figure, Label, Mark, Stroke, arc_sweep, polar
from geo_sokoban_pipeline.envs.images import encode_png

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
    return "letter" if character.isalpha() else character if character in "√−°" else "upright"


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


# A drawing in pixels: the figure's coordinates, and the box of every label.


Box = tuple[int, int, int, int]

# At scale 1, pixels: images come out at about 380×270, the median of Geometry3K.
_FONT_SIZE, _LINE_WIDTH, _MARGIN = 17, 1.7, 10
_WIDTHS, _HEIGHTS = (240.0, 350.0), (180.0, 250.0)
_ORIENTATIONS = 6
_TURNED_SHARE = 0.4


@dataclass(frozen=True, slots=True)
class FigureLayout:
    """A figure on an image.

    Attributes:
        width, height: of the image, pixels.
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


def lay_out_fixed(figure: Figure, width: int, height: int, font_size: int, line_width: float) -> FigureLayout:
    """Layout of a figure that is in pixels already and whose labels all have a place.

    Raises:
        ValueError: a label has none.
    """
    pens = []
    for label in figure.labels:
        if label.at is None:
            raise ValueError(f"label {label.text!r} has no place; set `at`")
        pens.append(pen_at(label, label.at, font_size))
    return FigureLayout(width, height, figure, tuple(pens), font_size, line_width)


def lay_out_free(figure: Figure, generator: random.Random, scale: float, *, upright: bool) -> FigureLayout | None:
    """Layout of a figure of any size: turned, mirrored and stretched, its labels placed, the image cut to fit.

    Args:
        figure: `y` grows upwards, any unit.
        generator: draws the orientation and the size.
        scale: of the image; 1 gives at most 400×300 px.
        upright: whether level lines stay level (it may still be mirrored).

    Returns:
        None if labels find no room in several orientations.
    """
    tries = (_try_orientation(figure, generator, scale, upright) for _ in range(_ORIENTATIONS))
    return next((placed for placed in tries if placed is not None), None)


def _try_orientation(figure: Figure, generator: random.Random, scale: float, upright: bool) -> FigureLayout | None:
    is_turned = not upright and generator.random() < _TURNED_SHARE
    turn = polar(1.0, generator.uniform(-180.0, 180.0)) if is_turned else 1 + 0j
    mirrored = generator.random() < 0.5
    font_size, line_width = max(8, round(_FONT_SIZE * scale)), _LINE_WIDTH * scale

    def turned(point: complex) -> complex:
        # Image rows grow downwards: the mirror image of the plane.
        return ((-point.conjugate() if mirrored else point) * turn).conjugate()

    left, top, right, bottom = _extent(line_pieces(figure.mapped(turned, 1.0), line_width, marks=False))
    wanted = (generator.uniform(*_WIDTHS) * scale, generator.uniform(*_HEIGHTS) * scale)
    factor = min(wanted[0] / max(right - left, 1e-9), wanted[1] / max(bottom - top, 1e-9))
    drawn = figure.mapped(lambda point: turned(point) * factor, factor)
    if (pens := place_labels(drawn, font_size, line_width)) is None:
        return None
    return _cut_to_fit(drawn, pens, font_size, line_width, round(_MARGIN * scale))


def _cut_to_fit(
    figure: Figure, pens: list[tuple[int, int]], font_size: int, line_width: float, margin: int
) -> FigureLayout:
    """Move everything so that the image ends a margin beyond the outermost line or text."""
    boxes = [text_box(label, pen, font_size) for label, pen in zip(figure.labels, pens, strict=True)]
    left, top, right, bottom = _extent(line_pieces(figure, line_width))
    left, top = min([left, *(box[0] for box in boxes)]), min([top, *(box[1] for box in boxes)])
    right, bottom = max([right, *(box[2] for box in boxes)]), max([bottom, *(box[3] for box in boxes)])
    x, y = margin - math.floor(left), margin - math.floor(top)
    moved = figure.mapped(lambda point: point + complex(x, y), 1.0)
    width, height = math.ceil(right) + x + margin, math.ceil(bottom) + y + margin
    return FigureLayout(width, height, moved, tuple((pen[0] + x, pen[1] + y) for pen in pens), font_size, line_width)


def _extent(pieces: np.ndarray) -> tuple[float, float, float, float]:
    x, y = pieces[:, 0::2], pieces[:, 1::2]
    return float(x.min()), float(y.min()), float(x.max()), float(y.max())


# Lines of a drawing as chains of points in pixels, shared by the renderer and by those who keep clear of them.


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


# Signs with a size in pixels: arcs in angles, right-angle squares, ticks, heads on parallel lines, arrows, dots.


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
    steps = (cmath.rect(_DOT * width, math.tau * step / 24) for step in range(24))
    return [(tuple(mark.points[0] + step for step in steps), True)]


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
    middles = [(start + end) / 2 + along * _TICK_GAP * (index - (mark.count - 1) / 2) for index in range(mark.count)]
    return [(middle - along * 1j * _TICK, middle + along * 1j * _TICK) for middle in middles]


def _heads(mark: Mark, width: float) -> list[Chain]:
    start, end = mark.points
    along = (end - start) / abs(end - start) * width
    places = [_HEAD_GAP * (index - (mark.count - 1) / 2) + _HEAD_LENGTH / 2 for index in range(mark.count)]
    pairs = [(tip, tip - along * _HEAD_LENGTH) for tip in ((start + end) / 2 + along * place for place in places)]
    return [(tip, base + along * 1j * _HEAD_HALF, base - along * 1j * _HEAD_HALF) for tip, base in pairs]


# Obstacles of labels: the lines of a drawing as straight pieces, and the boxes of labels already placed.


_MEETING = 3.0  # pixels


def line_pieces(figure: Figure, line_width: float, *, marks: bool = True) -> np.ndarray:
    """Straight pieces of all that is drawn but texts and filled areas.

    Args:
        figure: in pixels.
        line_width: pixels.
        marks: whether marks and arrow heads count.

    Returns:
        (n, 4) float64: x and y of both ends.
    """
    chains = [stroke.points for stroke in figure.strokes if stroke.style != "filled"]
    chains += [arc_chain(arc) for arc in figure.arcs]
    if marks:
        shapes = [shape for mark in figure.marks for shape in mark_shape(mark, line_width)]
        shapes += [(head, True) for stroke in figure.strokes for head in arrow_heads(stroke, line_width)]
        chains += [(*chain, chain[0]) if closed else chain for chain, closed in shapes]
    ends = [(a.real, a.imag, b.real, b.imag) for chain in chains for a, b in zip(chain, chain[1:], strict=False)]
    return np.array(ends, dtype=np.float64).reshape(-1, 4)


def touched(boxes: np.ndarray, pieces: np.ndarray) -> np.ndarray:
    """Whether each box meets any straight piece.

    Args:
        boxes: (c, 4) left, top, right, bottom.
        pieces: (n, 4) ends.

    Returns:
        (c,) bool.
    """
    if not len(pieces) or not len(boxes):
        return np.zeros(len(boxes), bool)
    near = np.zeros((len(boxes), len(pieces)))
    far = np.ones_like(near)
    for axis in (0, 1):
        start = pieces[None, :, axis]
        step = pieces[None, :, axis + 2] - start
        flat = np.abs(step) < 1e-9
        safe = np.where(flat, 1.0, step)
        one = (boxes[:, None, axis] - start) / safe
        other = (boxes[:, None, axis + 2] - start) / safe
        inside = (start >= boxes[:, None, axis]) & (start <= boxes[:, None, axis + 2])
        near = np.maximum(near, np.where(flat, np.where(inside, 0.0, 2.0), np.minimum(one, other)))
        far = np.minimum(far, np.where(flat, np.where(inside, 1.0, -2.0), np.maximum(one, other)))
    return np.asarray((near <= far).any(axis=1))


def overlapping(boxes: np.ndarray, placed: np.ndarray) -> np.ndarray:
    """Whether each of (c, 4) boxes overlaps any of (n, 4) placed ones; (c,) bool."""
    if not len(placed) or not len(boxes):
        return np.zeros(len(boxes), bool)
    apart = (
        (boxes[:, None, 0] >= placed[None, :, 2])
        | (boxes[:, None, 2] <= placed[None, :, 0])
        | (boxes[:, None, 1] >= placed[None, :, 3])
        | (boxes[:, None, 3] <= placed[None, :, 1])
    )
    return np.asarray((~apart).any(axis=1))


def reach(origin: complex, direction: complex, pieces: np.ndarray) -> float:
    """Distance along a ray to the first straight piece, infinite if it meets none.

    Args:
        origin: start of the ray; lines met within three pixels of it meet there.
        direction: of length 1.
        pieces: (n, 4) ends.
    """
    starts = pieces[:, 0] + 1j * pieces[:, 1] - origin
    steps = pieces[:, 2] + 1j * pieces[:, 3] - origin - starts
    cross = direction.real * steps.imag - direction.imag * steps.real
    parallel = np.abs(cross) < 1e-9
    safe = np.where(parallel, 1.0, cross)
    along = (starts.real * steps.imag - starts.imag * steps.real) / safe
    across = (starts.real * direction.imag - starts.imag * direction.real) / safe
    met = ~parallel & (along > _MEETING) & (across >= 0.0) & (across <= 1.0)
    return float(along[met].min()) if met.any() else float("inf")


# Places for labels: candidates for each kind, best first, of which the first that touches nothing is taken.


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
    left, top, right, bottom = _extent(bare)
    middle = complex((left + right) / 2, (top + bottom) / 2)
    pens: dict[int, tuple[int, int]] = {}
    placed: list[tuple[float, float, float, float]] = []
    for index in sorted(range(len(figure.labels)), key=lambda number: (_ORDER[figure.labels[number].kind], number)):
        label = figure.labels[index]
        ink = text_mask(label.text, font_size).ink
        size = (ink[2] - ink[0], ink[3] - ink[1])
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
        pens[index] = (int(box[0]) - ink[0], int(box[1]) - ink[1])
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
                yield centre + direction * (radius + side * (_support(direction, size, line_width) + 1 + further))


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


# Images of drawings: strokes are smoothed by drawing them four times as large, texts are laid over them.


PAPER, INK = (255, 255, 255), (0, 0, 0)
LINE, MARK, FILL = (0, 104, 178), (214, 0, 108), (205, 228, 243)


def render_layout_png(layout: FigureLayout) -> bytes:
    """PNG file of a layout, in RGB; equal layouts give equal bytes."""
    canvas = Image.new("RGB", (layout.width * OVERSAMPLE, layout.height * OVERSAMPLE), PAPER)
    pencil = _Pencil(ImageDraw.Draw(canvas), layout.line_width)
    for arc in layout.figure.arcs:
        if arc.filled:
            pencil.fill((arc.centre, *arc_chain(arc)), FILL)
    for style in ("filled", "line", "dashed"):
        for stroke in layout.figure.strokes:
            if stroke.style == style:
                pencil.draw_chain(stroke.points, style)
                for head in arrow_heads(stroke, layout.line_width):
                    pencil.fill(head, LINE)
    for arc in layout.figure.arcs:
        pencil.line(arc_chain(arc), LINE, pencil.width)
    for mark in layout.figure.marks:
        pencil.draw_mark(mark)
    pixels = np.asarray(canvas.reduce(OVERSAMPLE)).copy()
    for label, (x, y) in zip(layout.figure.labels, layout.pens, strict=True):
        _write(pixels, label.text, x, y, layout.font_size)
    return encode_png(pixels)


def _write(pixels: np.ndarray, text: str, x: int, y: int, size: int) -> None:
    """Lay a text over the image, its baseline starting at (x, y), and cut it at the edges."""
    mask = text_mask(text, size)
    left, top = x - mask.origin[0], y - mask.origin[1]
    height, width = mask.pixels.shape
    rows = slice(max(0, top), min(pixels.shape[0], top + height))
    columns = slice(max(0, left), min(pixels.shape[1], left + width))
    ink = mask.pixels[rows.start - top : rows.stop - top, columns.start - left : columns.stop - left].astype(np.uint16)
    area = pixels[rows, columns]
    # All inks are black, so laying ink over paper is a product.
    pixels[rows, columns] = (area * (255 - ink)[..., None] // 255).astype(np.uint8)


@dataclass
class _Pencil:
    """Draws on an enlarged canvas in the image's pixels."""

    draw: ImageDraw.ImageDraw
    width: float

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

    def draw_mark(self, mark: Mark) -> None:
        for chain, closed in mark_shape(mark, self.width):
            if closed:
                self.fill(chain, LINE if mark.kind == "dot" else MARK)
            else:
                self.line(chain, MARK, 0.75 * self.width)
