"""The interpreter of a Ray node's workers in the tests: a fork of one process a node that has the imports already.

Ray starts it in place of Python (`py_executable` of its runtime environments): `forked_workers.py <socket> <words>`
hands words, environment, folder and output to the process that runs `serve` for the node, whose fork becomes
`python <words>`, and ends as that does. So the seconds of the imports are not paid by each rank. Either end takes the
other along. On a node that is given no socket, `run` becomes `python <words>` itself.

What a library reads from the environment while it is imported is that of `serve`, options of the interpreter are left
out, and handlers of `atexit` do not run.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

# What a rank imports until its first step. Not Ray, which reads the job from the environment as it is imported.
HEAVY = "geo_sokoban_pipeline.training.worker"
_NUMBER = struct.Struct("!I")


@dataclass(frozen=True)
class Fork:
    """A process, and who waits for it.

    Attributes:
        waiting: the connection of its `run`.
        end: descriptor that is readable when it has ended.
    """

    pid: int
    waiting: socket.socket
    end: int

    def close(self) -> None:
        """Close what this process holds of it."""
        self.waiting.close()
        os.close(self.end)


def serve(place: str, life: int) -> None:
    """Fork for every request, until this process is killed or a descriptor is readable.

    Args:
        place: name of the socket.
        life: the descriptor.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place)
    listener.listen(64)
    importlib.import_module(HEAVY)
    gc.freeze()  # forks share what nobody visits
    poll = select.poll()
    for descriptor in (listener.fileno(), life):
        poll.register(descriptor, select.POLLIN)
    forks: dict[int, Fork] = {}  # by each of their two descriptors
    while True:
        ready, _ = poll.poll()[0]  # one at a time: a closed descriptor may be a new one's number
        if ready == life:
            return
        if ready == listener.fileno():
            waiting, _ = listener.accept()
            request, output = _read(waiting)
            pid = os.fork()
            if pid == 0:
                listener.close()
                waiting.close()
                for other in set(forks.values()):
                    other.close()
                _become(*request, output)
            for descriptor in output:
                os.close(descriptor)
            fork = Fork(pid, waiting, os.pidfd_open(pid))
            for descriptor in (waiting.fileno(), fork.end):
                forks[descriptor] = fork
                poll.register(descriptor, select.POLLIN)
        elif ready in forks:
            fork = forks[ready]
            if ready == fork.waiting.fileno():  # nobody waits any more
                os.kill(fork.pid, signal.SIGKILL)
            _, status = os.waitpid(fork.pid, 0)
            with suppress(OSError):
                fork.waiting.sendall(_NUMBER.pack(os.waitstatus_to_exitcode(status) & 0xFF))
            for descriptor in (fork.waiting.fileno(), fork.end):
                poll.unregister(descriptor)
                del forks[descriptor]
            fork.close()


def _read(waiting: socket.socket) -> tuple[list[Any], list[int]]:
    """A request, and the descriptors of its standard output and error."""
    first, output, _, _ = socket.recv_fds(waiting, _NUMBER.size, 2)
    with waiting.makefile("rb") as file:
        return json.loads(file.read(*_NUMBER.unpack(first))), list(output)


def _become(words: list[str], environment: dict[str, str], folder: str, output: list[int]) -> None:
    """The fork's whole life."""
    for number, descriptor in enumerate(output, start=1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    script = next(place for place, word in enumerate(words) if not word.startswith("-"))  # after the interpreter's own
    sys.argv = words[script:]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def run(place: str, words: list[str]) -> int:
    """Have a fork become `python <words>`; returns its exit code, the last eight bits of it, when it has ended."""
    if not place:
        os.execv(sys.executable, [sys.executable, *words])
    waiting = socket.socket(socket.AF_UNIX)
    waiting.connect(place)
    request = json.dumps([words, dict(os.environ), os.getcwd()]).encode()
    socket.send_fds(waiting, [_NUMBER.pack(len(request))], [1, 2])
    waiting.sendall(request)
    answer = waiting.recv(_NUMBER.size)
    return _NUMBER.unpack(answer)[0] if len(answer) == _NUMBER.size else 1


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
