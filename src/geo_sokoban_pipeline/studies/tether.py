"""Starts a command that ends with the process that started it: `python tether.py <pid of the parent> <command> …`.

On Linux the kernel asks the command to terminate when its parent is gone, however it went; elsewhere the command is
started as it is. It takes the place of this process, so its number is the child's. Nothing but the standard library is
imported, because this runs before every member of a study, outside the package.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    """Become the command."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it was gone before the kernel was asked
            sys.exit(128 + signal.SIGTERM)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
