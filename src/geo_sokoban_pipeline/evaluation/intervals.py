"""Confidence intervals of solve rates.

An interval always lies in [0, 1] and holds the observed share, also for no or all solved, where the usual normal
approximation has width 0.
"""

from __future__ import annotations

import math

# Two-sided 95 % quantile of the standard normal distribution.
Z_95 = 1.959964


def wilson_interval(successes: int, n: int, z: float = Z_95) -> tuple[float, float]:
    """Score interval of a share (Wilson, 1927); it assumes n independent trials.

    Args:
        successes: trials that succeeded, in [0, n].
        n: number of trials; 0 gives (0, 1), as nothing is known.
        z: quantile of the standard normal distribution, > 0; 1.959964 is two-sided 95 %.

    Returns:
        (low, high), 0 <= low <= successes / n <= high <= 1.

    Raises:
        ValueError: successes outside [0, n], or z not positive.
    """
    if n < 0 or not 0 <= successes <= n:
        raise ValueError(f"successes={successes}, n={n}: successes must be in [0, n].")
    if z <= 0.0:
        raise ValueError(f"z={z}: it must be greater than 0.")
    if n == 0:
        return 0.0, 1.0
    share = successes / n
    spread = z * z / n
    centre = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / n + spread / (4 * n))
    # At the ends the bounds are 0 and 1 in exact arithmetic; rounding must not push the share out of its interval.
    return min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half))
