"""Seeds are derived, never shared: every random choice hashes the run's seed with the names of its use.

The hash is blake2b over JSON text, so the result is the same in every process and on every machine, whatever
`PYTHONHASHSEED` is, and no global generator is ever touched.
"""

from __future__ import annotations

import hashlib
import json
import random


def derive_seed(root: int, *names: str | int) -> int:
    """Seed of one use, derived from a root seed and the names that identify the use.

    Args:
        root: seed of a run or of a data source, any integer.
        names: what the seed is for, from general to special, such as `"levels", 17`.

    Returns:
        An integer in [0, 2**63), which fits an Arrow int64.
    """
    text = json.dumps([root, *names], separators=(",", ":"))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def python_generator(root: int, *names: str | int) -> random.Random:
    """Generator of the standard library of one use; its methods cost less than numpy's for single draws."""
    return random.Random(derive_seed(root, *names))


def content_hash(*parts: str | bytes) -> str:
    """Hexadecimal blake2b digest (128 bits) of parts, each preceded by its length so that no two lists collide."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        digest.update(len(raw).to_bytes(8, "big"))
        digest.update(raw)
    return digest.hexdigest()
