"""One launched program (a server or the router): its supervisor, its log, its end.

However this process ends, the program ends with it: the supervisor sees the pipe between them close.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from geo_sokoban_pipeline.rollout.engines.sglang import supervisor

_TAIL_LINES = 15
_TAIL_BYTES = 16_384
_MARGIN = 15.0  # seconds beyond the grace that the supervisor itself is given


class ServerProcess:
    """A program under supervision.

    Args:
        command: words of the program.
        environment: its whole environment.
        log: file that its output is appended to.
        grace: seconds it has to end before it is killed.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, grace: float) -> None:
        self.command = list(command)
        self.log = log
        self.grace = grace
        self.pid = 0
        log.parent.mkdir(parents=True, exist_ok=True)
        self._began_at = log.stat().st_size if log.exists() else 0
        words = [sys.executable, "-S", "-E", supervisor.__file__, str(grace), *self.command]
        with log.open("ab") as output:
            self._supervisor = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=dict(environment),
                start_new_session=True,
            )
        assert self._supervisor.stdout is not None
        first = self._supervisor.stdout.readline().split()
        self.pid = int(first[1]) if len(first) == 2 else 0

    @property
    def alive(self) -> bool:
        """Whether the program runs."""
        return self._supervisor.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Its exit code, 128 + n after signal n; None while it runs."""
        return self._supervisor.poll()

    def said(self, text: str) -> bool:
        """Whether a text is anywhere in its output, in whatever case."""
        with self.log.open("rb") as file:
            file.seek(self._began_at)
            return any(text.lower() in line.decode("utf-8", "replace").lower() for line in file)

    def tail(self) -> str:
        """Last lines of its output."""
        with self.log.open("rb") as file:
            size = self.log.stat().st_size
            file.seek(max(self._began_at, size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
        return "\n".join(line[:300] for line in lines[-_TAIL_LINES:])

    def end(self) -> None:
        """End the program with all it has started, and wait until that is so."""
        if self._supervisor.stdin is not None and not self._supervisor.stdin.closed:
            self._supervisor.stdin.close()
        try:
            self._supervisor.wait(self.grace + _MARGIN)
        except subprocess.TimeoutExpired:
            self._kill()
        if self._supervisor.stdout is not None:
            self._supervisor.stdout.close()

    def _kill(self) -> None:
        for group in (self.pid, self._supervisor.pid):
            if group == 0:  # never had one; to the system, 0 is this process's own group
                continue
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._supervisor.wait()
