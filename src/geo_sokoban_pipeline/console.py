"""Console: messages, tables and progress, rich on a terminal and plain lines everywhere else.

`conf/logging.yml` sets up the plain handler; this module replaces it only where a person is looking, so that logs in
files, pipes and notebooks hold no control characters. Kedro accepts no logging classes but its own in that file, which
is why the swap is made here.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NoReturn

import click

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

_WIDTH = 160
logger = logging.getLogger(__name__)
# Seconds of work before a plain line of progress, and between two of them; a terminal has a bar instead.
FIRST_LINE_SECONDS, LINE_SECONDS = 5.0, 10.0


def refuse(error: Exception) -> NoReturn:
    """Stop: on the command line with the message alone and exit code 1, elsewhere with the error itself."""
    if click.get_current_context(silent=True) is None:
        raise error
    raise click.ClickException(str(error)) from error


@contextmanager
def refusing(*errors: type[Exception]) -> Iterator[None]:
    """Errors of these kinds in the `with` block stop the command, as `refuse` says."""
    try:
        yield
    except errors as error:
        refuse(error)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], colours: Mapping[str, str]) -> None:
    """Print a table on standard output: as wide as the terminal, or 160 characters where there is none.

    Args:
        colours: style of the cells with these texts, on a terminal.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, title=Text(title), title_justify="left")
    for row in rows:
        table.add_row(*(Text(cell, style=colours.get(cell, "")) for cell in row))
    Console(width=None if on_terminal() else _WIDTH).print(table)


def on_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


def enrich_logging() -> None:
    """On a terminal, replace the root logger's plain stream handlers by Kedro's rich one; elsewhere do nothing."""
    if not on_terminal():
        return
    from kedro.logging import RichHandler

    plain = [handler for handler in logging.root.handlers if type(handler) is logging.StreamHandler]
    for handler in plain:
        logging.root.removeHandler(handler)
    if plain:
        # Without the column of source files, which takes a third of a narrow terminal, and without markup: a list in
        # brackets is text here.
        logging.root.addHandler(
            RichHandler(rich_tracebacks=True, show_path=False, log_time_format="%H:%M:%S", markup=False)
        )


def _shorten(record: logging.LogRecord) -> bool:
    """Whether a log line of a library is shown: those that need no action are not, and long ones are shortened."""
    text = str(record.msg)
    if text.startswith(("Running node:", "Node %s failed")) and record.args:
        # Name, function, inputs and outputs: the name says all. The error itself is what the command ends with.
        node = str(next(iter(record.args))).partition(":")[0]
        record.msg, record.args = text.partition("%s")[0] + node, ()
        if text.startswith("Node"):
            record.msg += " failed"
            # An error of this package, whose message the command ends with, needs no line of its own; of several nodes
            # that fail in threads it ends with one alone.
            is_own = type(sys.exc_info()[1]).__module__.startswith("geo_sokoban_pipeline.")
            return not is_own or threading.current_thread() is not threading.main_thread()
    return not text.startswith(_UNSAID.get(record.name, ()))


_RUNNER = (
    "Using synchronous mode",  # the other mode is refused
    "Completed node:",  # the line after it counts
    "No nodes ran.",  # the same command continues the run; the options that Kedro proposes do less
    "There are ",  # … nodes that have not run
)
_UNSAID = {
    "kedro.pipeline.node": (),
    "kedro.runner.sequential_runner": _RUNNER,
    "kedro.io.core": ("'%s' attribute removed",),  # Kedro itself reads `validator` there
    "huggingface_hub.utils._http": ("Retrying in",),  # the line before it says what failed
}


def quieten_libraries() -> None:
    """Shorten what Kedro and the hub's client log; a second call changes nothing."""
    for name in _UNSAID:
        logging.getLogger(name).addFilter(_shorten)


class Progress:
    """Counts the units of work done of a known total; `advance` may carry a short note such as a loss.

    Away from a terminal, where rich draws a bar, it logs a line now and then: readable in files, and every handler of
    the log gets it, unlike a bar of tqdm.
    """

    def __init__(self, description: str, total: int, done: int = 0) -> None:
        self.description, self.total, self.done = description, total, done
        self._began = self._line = time.monotonic()
        # The pace is measured from the end of the first unit on, which includes loading and warming up.
        self._first: tuple[float, int] | None = None

    def advance(self, count: int = 1, note: str = "", left: float | None = None) -> None:
        """Count further units as done.

        Args:
            left: seconds, where the caller knows more than the pace says.
        """
        self.done += count
        now = time.monotonic()
        self._first = self._first or (now, self.done)
        began, first = self._first
        if left is None and self.done > first:
            left = (now - began) / (self.done - first) * max(self.total - self.done, 0)
        self._show(now, "" if left is None else f"{_clock(left)} left", note)

    def _show(self, now: float, left: str, note: str) -> None:
        first = self._line == self._began and now - self._began >= FIRST_LINE_SECONDS
        if first or now - self._line >= LINE_SECONDS or (self.done >= self.total and now - self._began >= LINE_SECONDS):
            self._line = now
            parts = [f"{self.description} {self.done}/{self.total}", left, note]
            logger.info("%s", ", ".join(part for part in parts if part))


class _Bar(Progress):
    """A line of a display, below those of the work that it is a part of."""

    def __init__(self, description: str, total: int, done: int, display: RichProgress) -> None:
        super().__init__(description, total, done)
        self.display = display
        self.line = display.add_task(description, total=total, completed=done, left="", note="")

    def _show(self, now: float, left: str, note: str) -> None:
        self.display.update(self.line, completed=self.done, left=left, note=note)


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
    if (outer := _display.get()) is not None:
        bar = _Bar(description, total, done, outer)
        try:
            yield bar
        finally:
            outer.remove_task(bar.line)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as RichProgress

    display = RichProgress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),  # rich's own column forgets what is older than 30 seconds
        TextColumn("{task.fields[note]}"),
        transient=not keep,
    )
    token = _display.set(display)
    try:
        with display:
            yield _Bar(description, total, done, display)
    finally:
        _display.reset(token)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
