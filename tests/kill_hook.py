"""A Kedro hook of the tests: kills its process, or another rank of the run, with SIGKILL at a named point.

Points are the package's log messages, those of level DEBUG included (`iteration 3: update`), and Kedro's own moments:
`before_node:<node>`, `before_save:<dataset>` and `after_save:<dataset>`. `GEO_SOKOBAN_KILL_AT` is a pattern of one,
such as `iteration *: update` (several as `this|that`), `GEO_SOKOBAN_KILL_NTH` says at which arrivals at any of them
(default 1; several as `2,3`), `GEO_SOKOBAN_KILL_WHOM` whom: `driver` (default) or `rank`, in a Ray cluster the last
one; or it is the path of a file, which the hook makes and waits for, until whoever kills has deleted it. A run takes
the hook from `GEO_SOKOBAN_EXTRA_HOOKS=kill_hook:KillHook`, with this folder on PYTHONPATH.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import signal
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from kedro.framework.hooks import hook_impl


def _first_rank() -> int:
    """Process id of the first rank that the driver has started."""
    return min(child.pid for child in multiprocessing.active_children() if child.pid is not None)


_PATIENCE = 300.0  # seconds until a run whose test has failed goes on
# What the driver logs of a rank that Ray has placed.
_PLACED = re.compile(r"process \d+ of \d+ \(pid (\d+) on ")


class KillHook(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._patterns = os.environ["GEO_SOKOBAN_KILL_AT"].split("|")
        self._due = {int(number) for number in os.environ.get("GEO_SOKOBAN_KILL_NTH", "1").split(",")}
        self._arrivals = 0
        self._whom = os.environ.get("GEO_SOKOBAN_KILL_WHOM", "driver")
        self._placed: list[int] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message.startswith("ranks: "):
            self._placed = [int(found) for found in _PLACED.findall(message)]
        self._arrive(message)

    def _arrive(self, name: str) -> None:
        if not any(fnmatchcase(name, pattern) for pattern in self._patterns):
            return
        self._arrivals += 1
        if self._arrivals not in self._due:
            return
        if os.path.isabs(self._whom):
            mark, deadline = Path(self._whom), time.monotonic() + _PATIENCE
            mark.touch()
            while mark.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
        else:
            rank = self._placed[-1] if self._placed else None
            os.kill(os.getpid() if self._whom == "driver" else rank or _first_rank(), signal.SIGKILL)

    @hook_impl
    def before_pipeline_run(self) -> None:
        logger = logging.getLogger("geo_sokoban_pipeline")
        logger.setLevel(logging.DEBUG)
        logger.addHandler(self)

    @hook_impl
    def before_node_run(self, node: Any) -> None:
        self._arrive(f"before_node:{node.name}")

    @hook_impl
    def before_dataset_saved(self, dataset_name: str) -> None:
        self._arrive(f"before_save:{dataset_name}")

    # Last, so that whatever else hangs on a save has happened.
    @hook_impl(trylast=True)
    def after_dataset_saved(self, dataset_name: str) -> None:
        self._arrive(f"after_save:{dataset_name}")
