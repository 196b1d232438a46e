"""What can go wrong with a server, as exceptions, and how long to wait before a further try.

The class decides what follows: a `ServerLost` is brought back, a `BadReply` is asked for again, a `RequestRefused` or a
`WrongServer` stops the run at once, because a second try would end alike.
"""

from __future__ import annotations

from geo_sokoban_pipeline.options.server import FaultOptions


class ServerFault(RuntimeError):
    """Anything that a server did wrong."""


class ServerLost(ServerFault):
    """The server does not answer: it has ended, hangs, or cannot be reached."""


class BadReply(ServerFault):
    """The server answered, but with an error of its own or with something that is no reply."""


class RequestRefused(ServerFault):
    """The server refuses what was asked; asking again does not help."""


class WrongServer(ServerFault):
    """The server serves another model, vocabulary or software than this policy needs."""


class EngineStopped(ServerFault):
    """Tries or restarts are used up; the message says what failed and what to do."""


def pause_before(attempt: int, options: FaultOptions) -> float:
    """Seconds to wait before a try.

    Args:
        attempt: number of the try, from 0; nothing is waited before the first.
    """
    if attempt == 0:
        return 0.0
    return float(min(options.longest_pause, options.first_pause * 2 ** (attempt - 1)))
