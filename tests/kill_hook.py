"""A Kedro hook of the tests: kills its process, or a rank of the run, with SIGKILL at a named point.

Points are the events of a run with what they come with (`update:3`), and Kedro's own: `before_node:<node>`,
`before_save:<dataset>` and `after_save:<dataset>`. A command takes the hook from the variables that `kill_at` returns,
with this folder on PYTHONPATH.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from kedro.framework.hooks import hook_impl

from geo_sokoban_pipeline.events import EVENT, Event

_PATIENCE = 300.0  # seconds until a run whose test has failed goes on


def kill_at(points: str, *arrivals: int, whom: str | Path = "driver") -> dict[str, str]:
    """Variables of a command that is killed.

    Args:
        points: pattern, such as `f"{Event.UPDATE}:*"`; several as `this|that`.
        arrivals: at which arrivals at any of them; none given: at the first one.
        whom: `driver`, or `rank`: the last one; or the path of a file, which the hook makes and waits for, until
            whoever kills has deleted it.
    """
    return {
        "GEO_SOKOBAN_EXTRA_HOOKS": "kill_hook:KillHook",
        "GEO_SOKOBAN_KILL_AT": points,
        "GEO_SOKOBAN_KILL_NTH": ",".join(map(str, arrivals or (1,))),
        "GEO_SOKOBAN_KILL_WHOM": str(whom),
    }


class KillHook:
    def __init__(self) -> None:
        self._patterns = os.environ["GEO_SOKOBAN_KILL_AT"].split("|")
        self._due = {int(number) for number in os.environ["GEO_SOKOBAN_KILL_NTH"].split(",")}
        self._arrivals = 0
        self._whom = os.environ["GEO_SOKOBAN_KILL_WHOM"]
        self._ranks: list[int] = []
        self._lock = threading.Lock()
        sys.addaudithook(self._hear)

    def _hear(self, name: str, given: tuple[Any, ...]) -> None:
        if name == EVENT:
            if given[0] is Event.RANKS:
                self._ranks = given[1]
            self._arrive(f"{given[0]}:{given[1]}")

    def _arrive(self, name: str) -> None:
        if not any(fnmatchcase(name, pattern) for pattern in self._patterns):
            return
        with self._lock:
            self._arrivals += 1
            if self._arrivals not in self._due:
                return
            if os.path.isabs(self._whom):
                mark, deadline = Path(self._whom), time.monotonic() + _PATIENCE
                mark.touch()
                while mark.exists() and time.monotonic() < deadline:
                    time.sleep(0.05)
            else:
                os.kill(os.getpid() if self._whom == "driver" else self._ranks[-1], signal.SIGKILL)

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
