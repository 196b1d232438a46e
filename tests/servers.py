"""A real SGLang server for the tests, and what tests ask of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from geo_sokoban_pipeline.config.server import ServerOptions
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.engines.sglang import servers
from geo_sokoban_pipeline.rollout.engines.sglang.engine import SglangEngine

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
# The cache holds every conversation of the tests at once, so that what is cached is the client's doing.
ON_CPU = {
    "device": "cpu",
    "python": str(PYTHON),
    "attention_backend": "torch_native",
    "memory_fraction": 0.5,
    "max_total_tokens": 32_768,
    "context_tokens": 4096,
    "faults": {"start_timeout": 1200.0, "first_pause": 0.1, "health_interval": 600.0, "grace": 1.0},
}


def need_environment() -> None:
    """Skip without the servers' environment; fail in continuous integration, which has made it."""
    if not PYTHON.exists():
        message = f"no {PYTHON.relative_to(ROOT)}: run `make sglang-env`"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)


def launch_options(**changes: Any) -> ServerOptions:
    """Options of servers that a test launches itself; `faults` are merged into those of `ON_CPU`."""
    faults = {**ON_CPU["faults"], **changes.pop("faults", {})}
    return ServerOptions.model_validate({**ON_CPU, **changes, "faults": faults})


def attach_options(*urls: str, **changes: Any) -> ServerOptions:
    """Options of servers that are there."""
    return launch_options(mode="attach", urls=urls, **changes)


@contextmanager
def attached(policy: Policy, *urls: str, **changes: Any) -> Iterator[SglangEngine]:
    """An engine over servers that are there, for the `with` block."""
    engine = SglangEngine(policy, attach_options(*urls, **changes))
    try:
        yield engine
    finally:
        engine.close()


def descendants() -> list[psutil.Process]:
    """All processes below this one that have to do with servers."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        is_node = any(Path(word).name == "ray" for word in words)  # of the tests' cluster, which ends with the session
        if not is_node and ("processes.py" in " ".join(words) or "sglang" in " ".join(words)):
            found.append(process)
    return found


def processes_with(setting: str) -> list[psutil.Process]:
    """All processes of this machine, whoever their parent is now, with `NAME=value` in their environment."""
    name, _, value = setting.partition("=")
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(name) == value and runs(process):
                found.append(process)
    return found


def strays() -> list[psutil.Process]:
    """Processes of servers that are not in the idle pool."""
    idle = [server for server in servers.IDLE if server.alive]
    wanted = {process.pid for server in idle for process in tree(psutil.Process(server.pid).ppid())}
    return [process for process in descendants() if process.pid not in wanted]


def tree(pid: int) -> list[psutil.Process]:
    """A process and all below it."""
    top = psutil.Process(pid)
    return [top, *top.children(recursive=True)]


def all_gone(processes: list[psutil.Process], seconds: float = 20.0) -> bool:
    """Whether processes have ended within so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(runs(process) for process in processes):
            return True
        time.sleep(0.1)
    return False


def runs(process: psutil.Process) -> bool:
    """Whether a process runs, also when it ends while it is being asked."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def stop(pid: int) -> None:
    """Halt all of a server's processes, as a server that hangs."""
    for process in tree(pid):
        os.kill(process.pid, signal.SIGSTOP)
