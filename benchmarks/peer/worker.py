"""A system in a process of its own: it does one step per request, and is idle while the other one works."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from benchmarks.peer.setting import NAMES, Setting, StepReport, System

Rows = list[dict[str, Any]]


class Worker:
    """Process of one system; a context manager."""

    def __init__(self, system: System, setting: Setting, rows: Rows) -> None:
        self.system = system
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(system, setting, rows, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def step(self) -> StepReport:
        """Do one step.

        Raises:
            RuntimeError: the process ended; its error stands above.
        """
        self._connection.send(True)
        try:
            report: StepReport = self._connection.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(
                f"{NAMES[self.system]} stopped with exit code {self._process.exitcode}, see above."
            ) from None
        return report

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.terminate()


def _serve(system: System, setting: Setting, rows: Rows, connection: Connection) -> None:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from geo_sokoban_pipeline.training.runtime import prepare_process

    # Threads and heap as every run of this project sets them, for both systems.
    prepare_process(setting.threads)

    def wait() -> bool:
        try:
            return bool(connection.recv())
        except EOFError:
            return False

    if system == "TRL":
        from benchmarks.peer.theirs import run_theirs

        run_theirs(setting, rows, wait, connection.send)
    else:
        from benchmarks.peer.ours import run_ours

        run_ours(setting, rows, wait, connection.send, reuse_cache=system == "ours")
