"""Console: rich output on a terminal, plain lines everywhere else.

`conf/logging.yml` sets up the plain handler; this module replaces it only where a person is looking, so that logs in
files, pipes and notebooks hold no control characters. Kedro accepts no logging classes but its own in that file, which
is why the swap is made here.
"""

from __future__ import annotations

import logging
import sys


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
