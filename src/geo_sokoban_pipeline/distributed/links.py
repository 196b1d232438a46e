"""Links to processes that are no ranks, such as rollout workers: either side sends messages at any time.

The end or the silence of such a process concerns its own link alone, so that its owner can start another one. No
process outlives its owner: it ends when its pipe closes, however busy it is.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from geo_sokoban_pipeline.distributed.launch import DeadRankError, Failed, RankError, leave_interrupts, start_process

_GRACE = 2.0  # seconds in which a process that does nothing ends by itself

# The life of a process; picklable.
Conversation = Callable[["Line"], None]


@dataclass(frozen=True)
class Beat:
    """The process is alive."""


@dataclass(frozen=True)
class Hanging:
    """The process is alive, but has not got on with its work for so many seconds."""

    seconds: float


@dataclass(frozen=True)
class Question:
    """Something that the process asks its owner."""

    number: int
    content: Any


@dataclass(frozen=True)
class Reply:
    """The answer to a question."""

    number: int
    content: Any


class Line:
    """The process's side of a link.

    Args:
        send: sends the owner a message; several threads may call it.

    Attributes:
        inbox: messages from the owner but replies; None: the link is closed.
    """

    def __init__(self, send: Callable[[Any], None]) -> None:
        self.send = send
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._asked: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()

    def ask(self, content: Any) -> Future[Any]:
        """Ask the owner something."""
        number, future = next(self._numbers), Future[Any]()
        self._asked[number] = future
        self.send(Question(number, content))
        return future

    def arrive(self, message: Any) -> None:
        """Take a message from the owner."""
        if isinstance(message, Reply):
            self._asked.pop(message.number).set_result(message.content)
        else:
            self.inbox.put(message)


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


def checked(title: str, message: Any) -> Any:
    """A message that is no failure.

    Raises:
        RankError: it is one.
        DeadRankError: the process hangs.
    """
    if isinstance(message, Hanging):
        raise DeadRankError(f"{title} hangs: it has not got on with its work for {message.seconds:g} s.")
    if isinstance(message, Failed):
        raise RankError(f"{title} failed:\n{message.text}")
    return message


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


def converse_safely(line: Line, talk: Conversation) -> None:
    """Hold a conversation; what it raises is sent, but for the end of the link.

    Raises:
        OSError: the link is closed.
    """
    try:
        talk(line)
    except OSError:
        raise
    except Exception as error:
        line.send(Failed("".join(traceback.format_exception(error))))
