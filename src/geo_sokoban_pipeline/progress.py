"""Progress of long work: a bar with the time left on a terminal; elsewhere plain lines, after 5 s, then every 10 s."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from geo_sokoban_pipeline.console import on_terminal

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

logger = logging.getLogger(__name__)
LINE_SECONDS = 10.0
FIRST_LINE_SECONDS = 5.0


class Progress:
    """Counts what is done of a known total; `advance` may carry a short note such as a loss."""

    def __init__(self, description: str, total: int, done: int = 0) -> None:
        self.description = description
        self.total = total
        self.done = done
        self._began = self._line = time.monotonic()
        # The pace is measured from the end of the first unit on, which includes loading and warming up.
        self._first: tuple[float, int] | None = None

    def advance(self, count: int = 1, note: str = "") -> None:
        """Note that more is done."""
        self.done += count
        now = time.monotonic()
        if self._first is None:
            self._first = now, self.done
        first = self._line == self._began and now - self._began >= FIRST_LINE_SECONDS
        if first or now - self._line >= LINE_SECONDS or (self.done >= self.total and now - self._began >= LINE_SECONDS):
            self._line = now
            parts = [f"{self.description} {self.done}/{self.total}", self._left(now), note]
            logger.info("%s", ", ".join(part for part in parts if part))

    def _left(self, now: float) -> str:
        """The time left at the pace so far; empty while there is none to tell from."""
        assert self._first is not None
        began, first = self._first
        if self.done == first:
            return ""
        return f"{_clock((now - began) / (self.done - first) * max(self.total - self.done, 0))} left"


class _Bar(Progress):
    """A line of a display, below those of the work that it is a part of."""

    def __init__(self, description: str, total: int, done: int, display: RichProgress) -> None:
        super().__init__(description, total, done)
        self.display = display
        self.line = display.add_task(description, total=total, completed=done, note="")

    def advance(self, count: int = 1, note: str = "") -> None:
        self.done += count
        self.display.update(self.line, advance=count, note=note)


# The display of the outermost `track`: a terminal has room for one.
_display: ContextVar[RichProgress | None] = ContextVar("display", default=None)


@contextmanager
def track(description: str, total: int, done: int = 0, *, keep: bool = True) -> Iterator[Progress]:
    """Show the progress of the `with` block's work.

    Args:
        description: a few words in front of the bar or line.
        total: units of work in all.
        done: units that were done before.
        keep: leave the bar on the terminal once the work is done; one inside another bar's work is never left there.
    """
    if not on_terminal():
        yield Progress(description, total, done)
        return
    outer = _display.get()
    if outer is not None:
        bar = _Bar(description, total, done, outer)
        try:
            yield bar
        finally:
            outer.remove_task(bar.line)
        return
    display = _open_display(transient=not keep)
    token = _display.set(display)
    try:
        with display:
            yield _Bar(description, total, done, display)
    finally:
        _display.reset(token)


def _open_display(*, transient: bool) -> RichProgress:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        transient=transient,
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
