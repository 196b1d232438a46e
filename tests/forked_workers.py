"""The interpreter of a Ray node's workers in the tests: a fork of one process a node that has the imports already.

Ray starts it in place of Python (`py_executable` of its runtime environments): `forked_workers.py run <socket> <words>`
hands words, environment, folder and output to the node's `forked_workers.py serve <socket>`, whose fork becomes
`python <words>`, and ends as that does. So the seconds of the imports are paid once a node, not once a rank. Either end
takes the other along. Whoever submits a job has workers of its own, which import for themselves.

It runs with the standard library alone until the first request.
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

# What a rank imports until its first step. Not Ray, which reads the job from the environment as it is imported.
HEAVY = ["geo_sokoban_pipeline.training.worker"]
_LENGTH = struct.Struct("!I")
_CHILD, _GONE = "child", "gone"


def serve(place: str) -> None:
    """Fork for every request, until this process is killed; it imports before the first one."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place)
    listener.listen(64)
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    # By descriptor: a connection, the process at its end, and the descriptor of that.
    open_ones: dict[int, tuple[socket.socket, int, int]] = {}
    while True:
        for ready, _ in poll.poll():
            if ready == listener.fileno():
                connection, _ = listener.accept()
                words, environment, folder, output = _read(connection)
                for name in HEAVY:
                    if name not in sys.modules:
                        importlib.import_module(name)
                        gc.freeze()  # forks share what nobody visits
                child = os.fork()
                if child == 0:
                    listener.close()
                    for other, _, descriptor in set(open_ones.values()):
                        other.close()
                        os.close(descriptor)
                    connection.close()
                    _become(words, environment, folder, output)
                for descriptor in output:
                    os.close(descriptor)
                descriptor = os.pidfd_open(child)
                open_ones[connection.fileno()] = open_ones[descriptor] = (connection, child, descriptor)
                poll.register(connection, select.POLLIN | select.POLLHUP)
                poll.register(descriptor, select.POLLIN)
            elif ready in open_ones:
                connection, child, descriptor = open_ones[ready]
                if ready == connection.fileno():  # nobody waits for it any more
                    os.kill(child, signal.SIGKILL)
                _, status = os.waitpid(child, 0)
                with suppress(OSError):
                    connection.sendall(_LENGTH.pack(os.waitstatus_to_exitcode(status) & 0xFF))
                for one in (connection.fileno(), descriptor):
                    poll.unregister(one)
                    del open_ones[one]
                connection.close()
                os.close(descriptor)


def _read(connection: socket.socket) -> tuple[list[str], dict[str, str], str, list[int]]:
    first, output, _, _ = socket.recv_fds(connection, _LENGTH.size, 2)
    (length,) = _LENGTH.unpack(first)
    data = b""
    while len(data) < length:
        data += connection.recv(length - len(data))
    words, environment, folder = json.loads(data)
    return words, environment, folder, list(output)


def _become(words: list[str], environment: dict[str, str], folder: str, output: list[int]) -> None:
    """The fork's whole life."""
    os.dup2(output[0], 1)
    os.dup2(output[1], 2)
    for descriptor in output:
        os.close(descriptor)
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if words[0].startswith("-"):  # of the interpreter
        words = words[1:]
    sys.argv = list(words)
    sys.path[0] = os.path.dirname(words[0])
    code = 0
    try:
        runpy.run_path(words[0], run_name="__main__")
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
    """Have a fork become `python <words>`; returns its exit code when it has ended."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(place)
    data = json.dumps([words, dict(os.environ), os.getcwd()]).encode()
    socket.send_fds(connection, [_LENGTH.pack(len(data))], [1, 2])
    connection.sendall(data)
    answer = connection.recv(_LENGTH.size)
    return _LENGTH.unpack(answer)[0] if len(answer) == _LENGTH.size else 1


if __name__ == "__main__":
    role, socket_name, *rest = sys.argv[1:]
    if role == "serve":
        serve(socket_name)
    else:
        sys.exit(run(socket_name, rest))
