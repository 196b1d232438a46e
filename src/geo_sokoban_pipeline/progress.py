"""Progress of long work: a bar with the time left on a terminal; elsewhere plain lines, after 5 s, then every 10 s."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from geo_sokoban_pipeline.console import on_terminal

logger = logging.getLogger(__name__)
LINE_SECONDS = 10.0
FIRST_LINE_SECONDS = 5.0


class Progress:
    """Counts what is done of a known total; `advance` may carry a short note such as a loss."""

    def __init__(self, description: str, total: int) -> None:
        self.description = description
        self.total = total
        self.done = 0
        self._began = self._line = time.monotonic()

    def advance(self, count: int = 1, note: str = "") -> None:
        """Note that more is done."""
        self.done += count
        now = time.monotonic()
        first = self._line == self._began and now - self._began >= FIRST_LINE_SECONDS
        if first or now - self._line >= LINE_SECONDS or (self.done >= self.total and now - self._began >= LINE_SECONDS):
            self._line = now
            left = (now - self._began) / max(self.done, 1) * (self.total - self.done)
            logger.info(
                "%s %d/%d, %s left%s", self.description, self.done, self.total, _clock(left), note and f", {note}"
            )


class _Bar(Progress):
    def __init__(self, description: str, total: int) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.progress import (
            Progress as RichProgress,
        )

        super().__init__(description, total)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.rich = RichProgress(*columns, TextColumn("{task.fields[note]}"))
        self._task = self.rich.add_task(description, total=total, note="")

    def advance(self, count: int = 1, note: str = "") -> None:
        self.done += count
        self.rich.update(self._task, advance=count, note=note)


@contextmanager
def track(description: str, total: int, done: int = 0) -> Iterator[Progress]:
    """Show the progress of the `with` block's work.

    Args:
        description: a few words in front of the bar or line.
        total: units of work in all.
        done: units that were done before.
    """
    if not on_terminal():
        progress = Progress(description, total - done)
        yield progress
        return
    bar = _Bar(description, total - done)
    with bar.rich:
        yield bar


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
