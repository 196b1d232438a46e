"""Stopwatch: wall and CPU seconds of the work itself, with what only watches it left out.

CPU seconds count all threads of the process, its crew's too where the crew's clock is given, and nothing of its
neighbours, so they compare stages of runs that share a machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopwatch:
    """Adds up the time spent inside `running()`.

    Args:
        cpu_clock: CPU seconds so far of all that works.

    Attributes:
        seconds: of the wall clock.
        cpu_seconds: of the processor.
    """

    def __init__(self, cpu_clock: Callable[[], float] = time.process_time) -> None:
        self._cpu_clock = cpu_clock
        self.seconds = 0.0
        self.cpu_seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of the `with` block, also where it ends with an error."""
        wall, cpu = time.perf_counter(), self._cpu_clock()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - wall
            self.cpu_seconds += self._cpu_clock() - cpu

    def read(self) -> dict[str, float]:
        """`seconds` and `cpu_seconds` so far."""
        return {"seconds": self.seconds, "cpu_seconds": self.cpu_seconds}
