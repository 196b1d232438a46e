"""What saving an iteration takes: tables of its episodes, and everything Kedro writes and its hooks do, after it.

The episodes' part ends when their data set says that they are written; they are the first that Kedro saves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from geo_sokoban_pipeline.signposts import EPISODES_SAVED, listen
from geo_sokoban_pipeline.training.stopwatch import Stopwatch


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
