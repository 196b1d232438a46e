"""M-RoPE positions of a growing conversation: text counts on, a picture spans a block of (time, height, width).

Positions of a sequence do not depend on what follows, so a conversation's later turns extend its earlier positions; the
result equals `Qwen3VLModel.get_rope_index` (tested).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np


def extend_positions(
    token_ids: np.ndarray, grids: Sequence[tuple[int, int, int]], image_pad_id: int, merge_size: int, start: int = 0
) -> tuple[np.ndarray, int]:
    """Positions of the next tokens of a conversation.

    Args:
        token_ids: (L,) ids with image pads expanded; each picture's pads are consecutive and complete.
        grids: (t, h, w) in patches of the pictures among these tokens, in order.
        start: position of the first token, 0 at the beginning of a conversation.

    Returns:
        (3, L) int64 positions (time, height, width) and the position of the token after them.

    Raises:
        ValueError: the pads do not match the grids.
    """
    positions = np.empty((3, len(token_ids)), np.int64)
    pads = np.flatnonzero(np.asarray(token_ids) == image_pad_id)
    expected = sum(t * h * w // merge_size**2 for t, h, w in grids)
    if len(pads) != expected:
        raise ValueError(f"{len(pads)} image-pad tokens, but the grids {list(grids)} need {expected}.")
    done, taken, current = 0, 0, start
    for time, height, width in grids:
        first = int(pads[taken])
        block = _block(time, height // merge_size, width // merge_size)
        count = block.shape[1]
        positions[:, done:first] = np.arange(current, current + first - done)
        current += first - done
        positions[:, first : first + count] = block + current
        current += max(height, width) // merge_size
        done, taken = first + count, taken + count
    positions[:, done:] = np.arange(current, current + len(token_ids) - done)
    return positions, current + len(token_ids) - done


@lru_cache(maxsize=256)
def _block(time: int, rows: int, columns: int) -> np.ndarray:
    """(3, time · rows · columns) int64 positions of a picture relative to its first token."""
    return np.indices((time, rows, columns)).reshape(3, -1)
