"""Console: rich output on a terminal, plain lines everywhere else.

`conf/logging.yml` sets up the plain handler; this module replaces it only where a person is looking, so that logs in
files, pipes and notebooks hold no control characters. Kedro accepts no logging classes but its own in that file, which
is why the swap is made here.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

import click

_WIDTH = 160


def refuse(error: Exception) -> NoReturn:
    """Stop: on the command line with the message alone and exit code 1, elsewhere with the error itself."""
    if click.get_current_context(silent=True) is None:
        raise error
    raise click.ClickException(str(error)) from error


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], colours: Mapping[str, str]) -> None:
    """Print a table on standard output: as wide as the terminal, or 160 characters where there is none.

    Args:
        colours: style of the cells with these texts, on a terminal.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, title=title, title_justify="left")
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


class _Brevity(logging.Filter):
    """Leaves out what a library says that nobody can act on, and shortens what it says at too great a length."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is shown; it may have been shortened."""
        text = str(record.msg)
        if text.startswith(("Running node:", "Node %s failed")) and record.args:
            # Name, function, inputs and outputs: the name says all. The error itself is what the command ends with.
            node = str(next(iter(record.args))).partition(":")[0]
            record.msg, record.args = text.partition("%s")[0] + node, ()
            if text.startswith("Node"):
                record.msg += " failed"
                return not _is_refused()
        return not text.startswith(_UNSAID.get(record.name, ()))


_RUNNER = (
    "Using synchronous mode",  # the other mode is refused
    "Completed node:",  # the line after it counts
    "No nodes ran.",  # the same command goes on, as the last line says; the words that Kedro proposes do less
    "There are ",  # … nodes that have not run
)
_UNSAID = {
    "kedro.pipeline.node": (),
    "kedro.runner.sequential_runner": _RUNNER,
    "kedro.io.core": ("'%s' attribute removed",),  # Kedro itself reads `validator` there
    "kedro_viz.models.flowchart.nodes": ("Cannot find parameter",),  # run_id and fresh belong to a command
    "huggingface_hub.utils._http": ("Retrying in",),  # the line before it says what failed
}


def quieten_libraries() -> None:
    """Shorten what Kedro and the hub's client log; a second call changes nothing."""
    for name in _UNSAID:
        logger = logging.getLogger(name)
        if not any(isinstance(known, _Brevity) for known in logger.filters):
            logger.addFilter(_Brevity())


def _is_refused() -> bool:
    return isinstance(sys.exc_info()[1], click.ClickException)
