"""Links to processes that are no ranks, such as rollout workers: either side sends messages at any time.

The end or the silence of such a process concerns its own link alone, so that its owner can start another one. No
process outlives its owner: it ends when its pipe closes, however busy it is.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from geo_sokoban_pipeline.distributed.launch import leave_interrupts, start_process
from geo_sokoban_pipeline.distributed.messages import (
    Conversation,
    DeadRankError,
    Line,
    checked,
    converse_safely,
)

_GRACE = 2.0  # seconds in which a process that does nothing ends by itself


class Link(Protocol):
    """The owner's side of a process."""

    @property
    def title(self) -> str:
        """Its name in errors."""

    @property
    def pid(self) -> int:
        """Process id, on the process's machine."""

    def settle(self) -> None:
        """Wait until the process has its place; called once, before all else but `close`.

        Raises:
            RankError: it has none, or has ended.
        """

    def send(self, message: Any) -> None:
        """Send a message.

        Raises:
            DeadRankError: the process has ended.
        """

    def receive(self, timeout: float | None) -> Any:
        """The next message.

        Args:
            timeout: seconds of silence after which the process counts as lost, from its first message on. None:
                unlimited.

        Raises:
            DeadRankError: the process has ended, or is silent.
            RankError: it failed; the message has the traceback.
        """

    def place(self, folder: Path, pattern: str) -> Path:
        """Where the process finds a folder of its owner, whose files do not change, until `clear`.

        Args:
            pattern: of the names of files that it reads.

        Raises:
            DeadRankError: the process has ended.
        """

    def clear(self, folder: Path) -> None:
        """The process needs a folder of its owner no longer.

        Raises:
            DeadRankError: the process has ended.
        """

    def close(self, *, patient: bool = True) -> None:
        """End the process: one that does nothing by itself where `patient`, else at once.

        Any thread may call this, more than once; calls of others that wait for the process fail.
        """


class LocalLink:
    """A link to a process of this machine.

    Args:
        talk: its life, in its process.
    """

    def __init__(self, title: str, talk: Conversation) -> None:
        self._handle = start_process(title, converse, talk)
        self._is_silent = True
        self._lock = threading.Lock()  # several threads send
        self._waiting = threading.Lock()  # two threads must not wait for the end of one process
        self._is_closed = False

    @property
    def title(self) -> str:
        """See `Link`."""
        return self._handle.title

    @property
    def pid(self) -> int:
        """See `Link`."""
        return int(self._handle.process.pid)

    def settle(self) -> None:
        """See `Link`; it is here."""

    def send(self, message: Any) -> None:
        """See `Link`."""
        try:
            with self._lock:
                self._handle.pipe.send(message)
        except OSError as error:
            raise DeadRankError(f"{self.title} has ended.") from error

    def receive(self, timeout: float | None) -> Any:
        """See `Link`."""
        try:
            # It may import its libraries for long before its first message.
            if not self._is_silent and not self._handle.pipe.poll(timeout):
                raise DeadRankError(f"{self.title} hangs: it has been silent for {timeout:g} s.")
            message = self._handle.pipe.recv()
        except (EOFError, OSError) as error:
            with self._waiting:
                if self._is_closed:
                    raise DeadRankError("the link is closed.") from error
                raise DeadRankError(self._handle.ending()) from error
        self._is_silent = False
        return checked(self.title, message)

    def place(self, folder: Path, pattern: str) -> Path:
        """See `Link`."""
        return folder

    def clear(self, folder: Path) -> None:
        """See `Link`; the folder is the owner's."""

    def close(self, *, patient: bool = True) -> None:
        """See `Link`."""
        # A pipe that another thread reads does not close for the process: it is told, or killed.
        if patient:
            with suppress(DeadRankError):
                self.send(None)
        with self._waiting:
            if self._is_closed:
                return
            if not patient:
                self._handle.process.kill()
            self._handle.stop(patient=True)
            self._is_closed = True
        self._handle.pipe.close()


def converse(pipe: Connection, talk: Conversation) -> None:
    """Main function of a process: hold a conversation over a pipe, until None arrives on it or it closes."""
    leave_interrupts()
    lock = threading.Lock()

    def send(message: Any) -> None:
        with lock:
            pipe.send(message)

    line = Line(send)

    def listen() -> None:
        with suppress(EOFError, OSError):  # the owner has ended
            while (message := pipe.recv()) is not None:
                line.arrive(message)
        line.arrive(None)
        time.sleep(_GRACE)
        os._exit(1)

    threading.Thread(target=listen, name="link", daemon=True).start()
    with suppress(OSError):
        converse_safely(line, talk)
