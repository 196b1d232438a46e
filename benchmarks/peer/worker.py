"""A system in a process of its own: it does a step when it is told to, and sits idle while the other one works."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Literal

from benchmarks.peer.setting import Setting, StepReport

Rows = list[dict[str, Any]]
System = Literal["ours", "TRL"]


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
        """Have one step done.

        Raises:
            RuntimeError: the process ended; its error stands above.
        """
        self._connection.send(True)
        try:
            report: StepReport = self._connection.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"{self.system} stopped with exit code {self._process.exitcode}, see above.") from None
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
    import torch

    torch.set_num_threads(setting.threads)

    def wait() -> bool:
        try:
            return bool(connection.recv())
        except EOFError:
            return False

    if system == "ours":
        from benchmarks.peer.ours import run_ours as run

        from geo_sokoban_pipeline.training.process import limit_heap

        limit_heap()  # as every run of ours does
    else:
        from benchmarks.peer.theirs import run_theirs as run
    run(setting, rows, wait, connection.send)
