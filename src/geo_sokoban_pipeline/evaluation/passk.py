"""pass@k: the chance that at least one of k replies is right, estimated without bias from n >= k replies.

Counts stay exact integers up to the one final division, so the estimate is right for any n.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate `1 - C(n - c, k) / C(n, k)` for one prompt (arXiv 2107.03374, eq. 1), in [0, 1].

    Args:
        n: replies sampled, 1 or more.
        c: right ones among them, in [0, n].
        k: replies that a user would draw, in [1, n].
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"n={n}, c={c}, k={k}: c must be in [0, n] and k in [1, n].")
    # Exact integers: the quotient of two large binomials loses nothing, unlike a product of n factors.
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def powers_of_two(n: int) -> list[int]:
    """1, 2, 4, … up to n."""
    return [1 << exponent for exponent in range(n.bit_length())] if n > 0 else []


def mean_pass_at_k(counts: Iterable[tuple[int, int]], ks: Sequence[int] | None = None) -> dict[str, float]:
    """pass@k averaged over prompts, keyed by k as text (JSON objects have no other keys).

    Args:
        counts: (n, c) of each prompt: replies and right ones.
        ks: values of k; None: the powers of two up to the smallest n.

    Returns:
        `{"1": …, "2": …}`; empty without prompts.

    Raises:
        ValueError: a k is larger than some prompt's n.
    """
    pairs = list(counts)
    if not pairs:
        return {}
    if ks is None:
        ks = powers_of_two(min(n for n, _ in pairs))
    return {str(k): math.fsum(pass_at_k(n, c, k) for n, c in pairs) / len(pairs) for k in ks}
