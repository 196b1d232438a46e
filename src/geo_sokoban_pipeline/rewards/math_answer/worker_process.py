"""A worker as its parent sees it: a fresh interpreter at the other end of two pipes, which can be killed at any moment.

It is started as a program of its own, not by forking and not by `multiprocessing`, which would import the parent's main
module again. Whoever starts it stops it: a stopped worker has been waited for and leaves no zombie.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from geo_sokoban_pipeline.rewards.math_answer.verdict import Differences, Equivalence

Answer = Literal["yes", "no", "timeout", "failed"]
_PACKAGE_ROOT = Path(__file__).parents[3]
_STARTING_SECONDS = 120.0  # a busy machine needs many for the imports


class WorkerError(RuntimeError):
    """A worker cannot be started; the message says why."""


class WorkerProcess:
    """A worker that is started by its first question and replaced after its last one.

    Not for use from several threads at once. On Linux the kernel ends the worker with the thread that asked first.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""

    @property
    def pid(self) -> int | None:
        """Process id; None: it is not running."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the worker and wait until it can be asked; nothing if it runs.

        Raises:
            WorkerError: it ended or said nothing.
        """
        if self._process is not None:
            return
        path = os.pathsep.join([str(_PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            # -P: a file in the working directory must not pass for a library.
            [sys.executable, "-P", "-m", f"{__package__}.worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Equal verdicts in every process: SymPy orders by hashes.
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"},
            start_new_session=True,  # Ctrl-C is for the parent, which closes it
        )
        try:
            reply = self._read(_STARTING_SECONDS)
        except EOFError:
            reply = {"failed": "it ended"}
        if reply is None or "failed" in reply:
            self.stop()
            reason = f"not ready after {_STARTING_SECONDS} s" if reply is None else reply["failed"]
            raise WorkerError(f"no grading worker: {reason}. Is math-verify installed, and is there memory left?")

    def ask(self, question: Equivalence | Differences, seconds: float) -> Answer:
        """The answer to a question; a worker that exceeds the time or dies is stopped.

        Args:
            seconds: time to work on it, more than 0.

        Raises:
            WorkerError: no worker can be started.
        """
        self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({**asdict(question), "seconds": seconds}).encode("ascii") + b"\n")
            self._process.stdin.flush()
            reply = self._read(seconds)
        except (BrokenPipeError, EOFError):
            reply = {"answer": "failed", "last": True}
        if reply is None:
            reply = {"answer": "timeout", "last": True}
        if reply["last"]:
            self.stop()
        return reply["answer"]

    def stop(self) -> None:
        """Kill the worker and wait for its end; nothing if it does not run."""
        process, self._process, self._unread = self._process, None, b""
        if process is not None:
            process.kill()
            process.communicate()

    def interrupt(self) -> None:
        """Kill the worker from another thread; who waits for its answer gets `failed`."""
        if (process := self._process) is not None:
            process.kill()

    def _read(self, seconds: float) -> dict[str, Any] | None:
        """The next line of the worker; None: it did not come in time.

        Raises:
            EOFError: the worker has ended.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        poller = select.poll()
        poller.register(pipe, select.POLLIN)
        deadline = time.monotonic() + seconds
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not poller.poll(left * 1000):
                return None
            read = os.read(pipe, 1 << 16)
            if not read:
                raise EOFError
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)
