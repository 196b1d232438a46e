"""DAPO's soft penalty of long episodes (arXiv 2503.14476, section 3.4)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from geo_sokoban_pipeline.config.estimators import OverlongOptions
from geo_sokoban_pipeline.grpo.groups import Floats


def overlong_penalty(lengths: ArrayLike, options: OverlongOptions) -> Floats:
    """(N,) float64 in [−1, 0], to be added to the rewards: 0 up to `length − buffer`, falling to −1 at `length`.

    Args:
        lengths: (N,) sampled tokens of each episode, over all its responses.
    """
    over = np.asarray(lengths, np.float64) - (options.length - options.buffer)
    penalty: Floats = -np.clip(over / options.buffer, 0.0, 1.0)
    return penalty
