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
        logging.root.addHandler(RichHandler(rich_tracebacks=True))
