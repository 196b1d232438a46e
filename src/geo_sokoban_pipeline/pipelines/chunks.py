"""Chunks of a node that yields: what is saved is let go, so that a long run needs no more memory than a short one.

Kedro deals the outputs of a generator to one stream each with `itertools.tee`, which frees its items in blocks of 57:
by itself a run would hold the trajectories of up to 57 iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from functools import wraps
from typing import Any, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Chunk = TypeVar("Chunk", bound=tuple[dict[str, Any], ...])
Chunks = Generator[Chunk, None, None]


def frees_saved(node: Callable[Parameters, Chunks[Chunk]]) -> Callable[Parameters, Chunks[Chunk]]:
    """A generator of chunks (one dict of partitions per output) each of which is emptied once it is saved.

    It is saved when Kedro asks for the next one: all outputs of a chunk come before that. A hook that wants to keep
    what `after_dataset_saved` shows it copies the dict.
    """

    @wraps(node)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Chunks[Chunk]:
        with closing(node(*args, **kwargs)) as chunks:
            for chunk in chunks:
                yield chunk
                for parts in chunk:
                    parts.clear()

    return run
