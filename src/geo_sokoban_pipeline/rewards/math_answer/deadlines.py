"""Deadlines: whoever waits for a worker waits no longer than was said, however long workers take to start.

One thread sleeps until the next deadline and settles what is then still open; it starts with the first one.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from itertools import count


class Deadlines:
    """Calls a function at its time, unless closed before."""

    def __init__(self) -> None:
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()  # of equal times the earlier call is first
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, when: float, call: Callable[[], None]) -> None:
        """Have a function called, which must be quick and must not raise.

        Args:
            when: of `time.monotonic()`; a time that has passed means at once.
        """
        with self._changed:
            if self._closed:
                return
            heapq.heappush(self._calls, (when, next(self._numbers), call))
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="grading deadlines", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Call nothing any more. Closing twice does nothing."""
        with self._changed:
            self._closed = True
            self._calls.clear()
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        while (call := self._next()) is not None:
            call()

    def _next(self) -> Callable[[], None] | None:
        """The next call, once its time has come; None: closed."""
        with self._changed:
            while not self._closed:
                left = self._calls[0][0] - time.monotonic() if self._calls else None
                if left is not None and left <= 0:
                    return heapq.heappop(self._calls)[2]
                self._changed.wait(left)
            return None
