"""Processes that end with the process that started them, however it ended, `kill -9` included.

A child process calls `end_with_parent` first of all. `tether` replaces itself by a command that the kernel terminates
with its parent. `supervise` runs a command that starts further processes, and ends them all. The last two run this file
as a script (`python -I -S processes.py tether|supervise …`), so only the standard library is imported here. The
kernel's part works on Linux only.
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
from collections.abc import Iterator

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_SECONDS = 0.2
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_REQUESTS_TO_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def count_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread that started it ends; exit if it has ended already.

    Args:
        parent: id of the process that started this one.
        number: the signal.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it was gone before the kernel was asked
        sys.exit(128 + number)


@contextlib.contextmanager
def with_variable(name: str, value: str) -> Iterator[None]:
    """Have an environment variable for the `with` block, in place of one of that name."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def gloo_on(interface: str | None = None) -> contextlib.AbstractContextManager[None]:
    """Have process groups that are made here listen on one network interface alone, unless the environment names one.

    Args:
        interface: its name; None: loopback.
    """
    if _GLOO_INTERFACE in os.environ:
        return contextlib.nullcontext()
    return with_variable(_GLOO_INTERFACE, interface or ("lo" if sys.platform == "linux" else "lo0"))


def interface_of(address: str) -> str:
    """Name of the network interface of this machine that has an address.

    Raises:
        ValueError: there is none.
    """
    import psutil

    known = ((name, entry.address.partition("%")[0]) for name, own in psutil.net_if_addrs().items() for entry in own)
    if (found := next((name for name, each in known if each == address), None)) is None:
        raise ValueError(
            f"no network interface of this machine has the address {address}, by which Ray knows it. Start the node "
            "with --node-ip-address=<an address that the others reach>."
        )
    return found


def tethered(command: list[str]) -> list[str]:
    """Words that start a command as a child of this process, which the kernel terminates when this one ends.

    They replace `preexec_fn`, which is not safe beside other threads.
    """
    return [sys.executable, "-I", "-S", __file__, "tether", str(os.getpid()), *command]


def supervised(command: list[str], grace: float) -> list[str]:
    """Words that `supervise` a command; standard input must be a pipe that the caller holds open."""
    return [sys.executable, "-I", "-S", __file__, "supervise", str(grace), *command]


def tether(parent: int, command: list[str]) -> None:
    """Become a command that ends with the parent."""
    end_with_parent(parent, signal.SIGTERM)
    os.execvp(command[0], command)


def supervise(grace: float, command: list[str]) -> int:
    """Run a command until it ends or standard input is closed, then end all that it has started; returns its exit code.

    The kernel closes the pipe however the caller ends. The command leads a session, so its children are in its process
    group; the supervisor adopts those that leave the group.

    Args:
        grace: seconds that the command is given to end before it is killed.
    """
    for number in _REQUESTS_TO_END:
        signal.signal(number, lambda *_: None)  # only the pipe decides, so that nothing is left behind
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    supervisor = os.getpid()

    def follow() -> None:
        for number in _REQUESTS_TO_END:
            signal.signal(number, signal.SIG_DFL)
        end_with_parent(supervisor)

    # Standard output is for the one line below; the command's own goes to the log.
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        start_new_session=True,
        preexec_fn=follow,  # noqa: PLW1509 - there is one thread here
    )
    sys.stdout.write(f"server {server.pid}\n")
    sys.stdout.flush()
    while server.poll() is None:
        if select.select([sys.stdin], [], [], _POLL_SECONDS)[0] and not os.read(sys.stdin.fileno(), 1):
            break
    if server.poll() is None:
        kill_group(server.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while server.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS / 4)
    kill_group(server.pid)
    server.wait()
    _kill_adopted()
    return server.returncode if server.returncode >= 0 else 128 - server.returncode


def kill_group(group: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process group; nothing if the group is empty, or for 0, which is this process's own."""
    with contextlib.suppress(ProcessLookupError):
        if group:
            os.killpg(group, number)


def _kill_adopted() -> None:
    """Kill and collect processes that the command has left, inside its group or not."""
    while sys.platform == "linux":
        # psutil would name the children too, but a supervisor imports the standard library alone.
        try:
            with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
                children = [int(word) for word in file.read().split()]
        except OSError:
            children = []
        for child in children:
            os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


if __name__ == "__main__":
    _, role, value, *words = sys.argv
    if role == "tether":
        tether(int(value), words)
    else:
        sys.exit(supervise(float(value), words))
