"""Worker: a process of its own that answers one question at a time, within limits that the kernel enforces.

It reads questions as JSON lines from standard input and writes answers as JSON lines; it ends when its input does. An
alarm ends a question that takes too long; what no Python handler can interrupt is killed by the parent, and should the
parent be gone, by the limit on processor time. Started by `worker_process`, never imported elsewhere.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import signal
import sys
import time
import traceback
from typing import IO, Any

_PR_SET_PDEATHSIG = 1
_MOST_MEMORY = 2 << 30  # bytes of address space
_RETIRE_AT = 400 << 10  # KiB of peak memory after which a worker is replaced
_SPARE_SECONDS = 2  # of processor time beyond a question's limit, before the kernel ends the process


class OverdueError(BaseException):
    """The time of a question is over. No Exception, so that no library takes it for one of its own."""


def main(parent: int) -> None:
    """Serve until the input ends.

    Args:
        parent: process id of who started this.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # what a library prints must not get among the answers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with(parent)
    try:
        _prepare()
    except BaseException:
        _send(replies, {"failed": traceback.format_exc()})
        raise
    _send(replies, {"ready": True})
    for line in sys.stdin:
        reply = _answer(json.loads(line))
        last = reply == {"answer": "failed"} or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > _RETIRE_AT
        _send(replies, {**reply, "last": last})
        if last:
            return


def _end_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)


def _prepare() -> None:
    """Import what questions need and warm it up, so that no question pays for it."""
    logging.disable(logging.CRITICAL)
    from geo_sokoban_pipeline.rewards.math_answer.equivalence import are_equivalent
    from geo_sokoban_pipeline.rewards.math_answer.slime_algebra import difference_vanishes

    are_equivalent("x^2 + 1", "1 + x^{2}")
    are_equivalent("x > 1", "1 < x")
    difference_vanishes("(2*sqrt(3))-(sqrt(12))", None)
    signal.signal(signal.SIGALRM, _raise_overdue)
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))


def _answer(question: dict[str, Any]) -> dict[str, str]:
    """`answer`: yes, no, timeout or failed."""
    used = int(time.process_time())
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (used + int(question["seconds"]) + _SPARE_SECONDS, hard))
    try:
        # It goes off again and again, for there are libraries that catch everything.
        signal.setitimer(signal.ITIMER_REAL, question["seconds"], 0.1)
        try:
            correct = _decide(question)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except OverdueError:
        signal.setitimer(signal.ITIMER_REAL, 0)
        return {"answer": "timeout"}
    except MemoryError:
        return {"answer": "failed"}
    except Exception:  # whatever a library stumbles over, the answer is not shown to be the label
        return {"answer": "no"}
    return {"answer": "yes" if correct else "no"}


def _decide(question: dict[str, Any]) -> bool:
    from geo_sokoban_pipeline.rewards.math_answer.equivalence import are_equivalent
    from geo_sokoban_pipeline.rewards.math_answer.slime_algebra import difference_vanishes

    if "texts" in question:
        return all(difference_vanishes(text, question["tolerance"]) for text in question["texts"])
    return are_equivalent(question["answer"], question["label"])


def _raise_overdue(*_: object) -> None:
    raise OverdueError


def _send(replies: IO[str], reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
