"""Signposts: long-running code says where it is, and anyone may listen.

`reached` costs nothing while nobody listens, never changes what the caller computes, and lets a listener's exception
through. Tests listen to interrupt a run at a named point; tools of your own may count, time or log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[str], None]
EPISODES_SAVED = "episodes saved"

_listeners: tuple[Listener, ...] = ()


def reached(name: str) -> None:
    """Tell every listener that the program has come to the point `name`, in the order in which they began to listen."""
    for listener in _listeners:
        listener(name)


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Call `listener` with each name that is reached inside the `with` block, from any thread of this process."""
    global _listeners  # noqa: PLW0603 - one process has one sequence of points, wherever they are reached
    _listeners = (*_listeners, listener)
    try:
        yield
    finally:
        remaining = list(_listeners)
        remaining.remove(listener)
        _listeners = tuple(remaining)
