"""Worker: a process of its own that answers one question at a time, within limits that the kernel enforces.

It reads questions as JSON lines from standard input and writes answers as JSON lines; it ends when its input does. Who
asks kills it when a question takes too long: nothing else stops every computation, and a library that was interrupted
may be left in a state in which later answers are wrong. Should the asker be gone by then, the kernel ends it by its
limit on processor time. Started by `worker_process`, never imported elsewhere.
"""

from __future__ import annotations

import ctypes
import json
import logging
import math
import os
import resource
import signal
import sys
import time
import traceback
from typing import IO, Any

_PR_SET_PDEATHSIG = 1
_MOST_MEMORY = 2 << 30  # bytes of address space
_RETIRE_AT = 400 << 20  # bytes in use after which a worker is replaced
_SPARE_SECONDS = 1  # of processor time beyond a question's limit, before the kernel ends the process


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
        last = reply == {"answer": "failed"} or _resident_bytes() > _RETIRE_AT
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
    from geo_sokoban_pipeline.rewards.math_answer.slime_exact import difference_vanishes

    for answer, label in (("x^2 + 1", "1 + x^{2}"), ("x > 1", "1 < x"), ("(1, 2)", "(1, 3)"), ("\\sin(x)", "\\cos{5}")):
        are_equivalent(answer, label)
    difference_vanishes("(1.5*x+pi)-(sqrt(2))", 0.05)
    _limit(resource.RLIMIT_AS, _MOST_MEMORY)


def _answer(question: dict[str, Any]) -> dict[str, str]:
    """`answer`: yes, no or failed."""
    _limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + question["seconds"]) + _SPARE_SECONDS)
    try:
        return {"answer": "yes" if _decide(question) else "no"}
    except MemoryError:
        return {"answer": "failed"}
    except Exception:  # whatever a library stumbles over, the answer is not shown to be the label
        return {"answer": "no"}


def _decide(question: dict[str, Any]) -> bool:
    from geo_sokoban_pipeline.rewards.math_answer.equivalence import are_equivalent
    from geo_sokoban_pipeline.rewards.math_answer.slime_exact import difference_vanishes

    if "texts" in question:
        return all(difference_vanishes(text, question["tolerance"]) for text in question["texts"])
    return are_equivalent(question["answer"], question["label"])


def _resident_bytes() -> int:
    """Memory in use, 0 where it cannot be read. (The peak that `getrusage` knows may be that of the parent.)"""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def _limit(what: int, most: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _send(replies: IO[str], reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
