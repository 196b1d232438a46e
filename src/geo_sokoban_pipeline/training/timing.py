"""Stopwatch: wall and CPU seconds of the work itself, with what only watches it left out.

CPU seconds count all threads of the process, its crew's too where the crew's clock is given, and nothing of its
neighbours, so they compare stages of runs that share a machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from geo_sokoban_pipeline.signposts import EPISODES_SAVED, listen


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


# What saving an iteration takes: tables of its episodes, and everything Kedro writes and its hooks do, after it.


class SaveClock:
    """Seconds that one iteration's saving took."""

    def __init__(self) -> None:
        self._whole, self._episodes = Stopwatch(), Stopwatch()

    @contextmanager
    def making_tables(self) -> Iterator[None]:
        """Count the `with` block as writing of episodes."""
        with self._whole.running(), self._episodes.running():
            yield

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Count the `with` block, and what comes before the episodes are written as writing of episodes."""
        with self._whole.running(), ExitStack() as episodes:
            episodes.enter_context(self._episodes.running())
            with listen(lambda name: episodes.close() if name == EPISODES_SAVED else None):
                yield

    def metrics(self) -> dict[str, float]:
        """`perf/save_time`, `perf/write_time` (of it: episodes) in seconds, and the CPU-seconds of both."""
        return {
            "perf/save_time": self._whole.seconds,
            "perf/save_cpu_time": self._whole.cpu_seconds,
            "perf/write_time": self._episodes.seconds,
            "perf/write_cpu_time": self._episodes.cpu_seconds,
        }
