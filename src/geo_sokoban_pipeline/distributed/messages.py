"""What processes of a run and their owner say to each other: jobs, results, failures, and the messages of links.

Nothing here imports torch, which takes a process seconds and 300 MB: an actor of a Ray cluster is placed before it
does, and the host of a server never does.
"""

from __future__ import annotations

import itertools
import queue
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

Job = Callable[[Any], Any]  # of a rank's state; picklable, with all its inputs
Conversation = Callable[["Line"], None]  # the life of a process with a link; picklable


class RankError(RuntimeError):
    """A rank failed or its process has ended; the message says which and why."""


class DeadRankError(RankError):
    """A rank's process or its node has ended; another group of ranks can take its place."""


class LostRankError(RankError):
    """A rank failed because another one did."""


@dataclass(frozen=True)
class Call:
    """The job that calls a method of the state by its name."""

    method: str
    arguments: tuple[Any, ...] = ()

    def __call__(self, state: Any) -> Any:
        """Run in a rank."""
        return getattr(state, self.method)(*self.arguments)


@dataclass(frozen=True)
class Done:
    """A job's result, and the CPU-seconds of all jobs of this rank so far."""

    result: Any
    cpu_seconds: float


@dataclass(frozen=True)
class Failed:
    """The traceback of a failed job, as text.

    Attributes:
        lost: whether it failed because another rank did.
        error: what it raised; None where that was not sent.
    """

    text: str
    lost: bool = False
    error: Exception | None = None


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


@dataclass(frozen=True)
class LostServer:
    """Question: a server does not answer; the reply is a `ServerPlace`, once it does.

    Attributes:
        server: its number.
        life: of it, as the driver counts them.
        reason: what was seen.
    """

    server: int
    life: int
    reason: str


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
