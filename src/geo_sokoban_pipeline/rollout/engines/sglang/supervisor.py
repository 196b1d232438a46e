"""Runs one server and ends it, with every process it has started, when the process that asked for it is gone.

`python supervisor.py <seconds of grace> <command> …`, standard input the read end of a pipe that the asker holds open.
The kernel closes that pipe however the asker ends, kill -9 included. The server is the leader of a session, so all it
starts is in its process group; what leaves the group is caught because the supervisor adopts orphans (Linux). Nothing
but the standard library is imported: this runs outside the package.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_SECONDS = 0.2


def main(grace: float, command: list[str]) -> int:
    """Run the command to its end or to the end of the pipe; returns its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # only the pipe decides, so that nothing is left behind
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # Standard output is for the one line below; what the server says goes to the log.
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        start_new_session=True,
        preexec_fn=_follow,  # noqa: PLW1509 - there is one thread here
    )
    sys.stdout.write(f"server {server.pid}\n")
    sys.stdout.flush()
    while server.poll() is None:
        if select.select([sys.stdin], [], [], _POLL_SECONDS)[0] and not os.read(sys.stdin.fileno(), 1):
            break
    _end(server, grace)
    return server.returncode if server.returncode >= 0 else 128 - server.returncode


def _follow() -> None:
    """In the server, before it becomes the command: end with the supervisor."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end(server: subprocess.Popen[bytes], grace: float) -> None:
    """End the server's group: politely first, unless it has gone already."""
    if server.poll() is None:
        _signal_group(server.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while server.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS / 4)
    _signal_group(server.pid, signal.SIGKILL)
    server.wait()
    _reap_adopted()


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # nobody is left
        os.killpg(group, number)


def _reap_adopted() -> None:
    """Kill and collect what the server has left, inside its group or not."""
    if sys.platform != "linux":
        return
    while True:
        for child in _children():
            os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    path = f"/proc/self/task/{os.getpid()}/children"
    try:
        with open(path, encoding="ascii") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
