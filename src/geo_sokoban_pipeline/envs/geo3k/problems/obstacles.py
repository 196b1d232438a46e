"""What labels must keep clear of: the lines of a drawing as straight pieces, and the boxes of labels already placed."""

from __future__ import annotations

import numpy as np

from geo_sokoban_pipeline.envs.geo3k.problems.figure import Figure
from geo_sokoban_pipeline.envs.geo3k.problems.marks import arrow_heads, mark_shape
from geo_sokoban_pipeline.envs.geo3k.problems.strokes import arc_chain

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
        for mark in figure.marks:
            for chain, closed in mark_shape(mark, line_width):
                chains.append((*chain, chain[0]) if closed else chain)
        for stroke in figure.strokes:
            chains += [(*head, head[0]) for head in arrow_heads(stroke, line_width)]
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
        origin: start of the ray; what is met within three pixels of it meets there.
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
