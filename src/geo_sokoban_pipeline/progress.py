"""When the work of a thread last got on: so a driver tells a process that hangs from one that is slow.

Work notes each piece that is done: a micro-batch, a decoded token, a step of an environment, a tensor. Work that waits
for something with a limit of its own says so; that time does not count. Threads without a clock note nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_own = threading.local()


class CancelledWork(BaseException):
    """Its result is no longer wanted; no handler of errors may take it."""


class Clock:
    """Of a thread, which others may read.

    Attributes:
        is_cancelled: whether the work ends at its next piece.
    """

    def __init__(self) -> None:
        self.is_cancelled = False
        self._moved, self._is_waiting = time.monotonic(), True

    @property
    def standstill(self) -> float:
        """Seconds since the last piece of work; 0 while the thread waits, or has nothing to do."""
        return 0.0 if self._is_waiting else time.monotonic() - self._moved

    @contextmanager
    def working(self) -> Iterator[None]:
        """This is the clock of the present thread, which works for the `with` block."""
        _own.clock = self
        with self._set(is_waiting=False):
            yield

    def note(self) -> None:
        """See `note_progress`."""
        self._moved = time.monotonic()
        if self.is_cancelled:
            raise CancelledWork

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """See `waiting`."""
        with self._set(is_waiting=True):
            yield

    @contextmanager
    def _set(self, *, is_waiting: bool) -> Iterator[None]:
        before = self._is_waiting
        self._moved, self._is_waiting = time.monotonic(), is_waiting
        try:
            yield
        finally:
            self._moved, self._is_waiting = time.monotonic(), before


def note_progress() -> None:
    """Note that a piece of work is done.

    Raises:
        CancelledWork: it is not wanted any more.
    """
    if (clock := getattr(_own, "clock", None)) is not None:
        clock.note()


@contextmanager
def waiting() -> Iterator[None]:
    """For the `with` block this thread waits for something that has a limit of its own."""
    with getattr(_own, "clock", Clock()).waiting():
        yield
