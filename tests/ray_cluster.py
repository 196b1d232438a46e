"""A Ray cluster of several nodes on one machine for the tests, as `ray start` makes it, and what tests ask of it."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from unittest import mock

import psutil
import pytest

from forked import fork_server
from geo_sokoban_pipeline.config.ray import RayOptions
from geo_sokoban_pipeline.distributed.ray_cluster import connected
from geo_sokoban_pipeline.processes import supervised
from mounts import hide_here

ROOT = Path(__file__).parents[1]
TOKEN = secrets.token_hex(32)  # Ray keeps the first one that a process has used
_FORKS = ROOT / "tests" / "forked_workers.py"
# In a shell, which knows the node's socket.
_FORKED = f'"{sys.executable}" -IS "{_FORKS}" "$FORKED_WORKERS"'
_RAY = Path(sys.executable).with_name("ray")
_START = 600.0  # seconds in which a node has to start, in several tries
_PORTS = range(20_000, 32_000)  # neither those of outgoing connections nor those that Ray gives its workers
_GRACE = 5.0
# How Ray names the processes of actors.
RANKS = (*("ray::process ", "ray::rollout worker ", "ray::server ", "ray::Actor"),)
# Other tests keep both cores busy and fill the memory: a node that answers late is no dead one, and no process has to
# make room. A node that is killed refuses connections, which is found at once.
_PATIENT = {
    "RAY_worker_register_timeout_seconds": "120",  # the first worker of a node imports before it registers
    "RAY_raylet_start_wait_time_s": "100",
    "RAY_agent_register_timeout_ms": "120000",  # a node waits for its agent; on a busy machine 30 s are too few
    "RAY_health_check_timeout_ms": "120000",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_prestart_worker_first_driver": "0",  # it would be no fork, and of no use
}


@dataclass
class RayCluster:
    """Nodes that end with this process, or by `close`; no other Ray of the machine is touched.

    The first node has no resources, so that no rank is placed beside the driver of a submitted job.

    Attributes:
        folder: working folder of all nodes, empty at first; logs lie beside it.
        hidden: folder that the processes of all nodes but the first see empty, if `is_hiding`.
    """

    folder: Path
    hidden: Path
    is_hiding: bool = True
    port: int = 0
    dashboard: int = 0
    token: str = TOKEN
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _with_gpus: subprocess.Popen[bytes] | None = None
    _started: int = 0
    _forks: dict[int, ForkServerProcess] = field(default_factory=dict)  # by the node's process id

    def __post_init__(self) -> None:
        self.port, self.dashboard, client = free_ports(3)
        self._start(
            "--head",
            f"--port={self.port}",
            "--dashboard-host=127.0.0.1",
            f"--dashboard-port={self.dashboard}",
            f"--ray-client-server-port={client}",
            "--num-cpus=0",
            "--num-gpus=0",
        )

    @property
    def unseen(self) -> Path:
        """`hidden`, for what travels because it is; skips where this system hides nothing."""
        if not self.is_hiding:
            pytest.skip("no folder can be hidden from a process here")
        return self.hidden

    @property
    def address(self) -> str:
        return f"{own_address()}:{self.port}"

    @property
    def access(self) -> dict[str, str]:
        """Variables of a process that reaches it."""
        return {"RAY_ADDRESS": self.address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a driver, whose workers are forks."""
        chosen = {"runtime_env": {"py_executable": _FORKED}}
        return {**self.access, "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(chosen)}

    def fill(self) -> None:
        """Start nodes until there are two for ranks, one of them with four GPUs, which Ray only counts."""
        while len(self.nodes) < 3:
            if self._with_gpus in self.nodes:
                self.add_node()
            else:
                self._with_gpus = self.add_node(gpus=4)

    def add_node(self, gpus: int = 0) -> subprocess.Popen[bytes]:
        """Start a further node for a rank."""
        words = (f"--address={self.address}", "--num-cpus=1", f"--num-gpus={gpus}")
        return self._start(*words, is_for_ranks=True)

    def remove_node(self, node: subprocess.Popen[bytes]) -> None:
        """End a node as a power cut would: all its processes at once."""
        for process in self.processes_of(node):
            process.kill()
        node.wait()
        self._forks.pop(node.pid).join()
        self.nodes.remove(node)

    def ranks(self) -> list[psutil.Process]:
        """Processes of ranks on all nodes."""
        return [process for node in self.nodes for process in self.ranks_of(node)]

    def ranks_left(self, seconds: float = 20.0) -> list[psutil.Process]:
        """Those that have not ended after so many seconds; Ray waits for none that it kills."""
        deadline = time.monotonic() + seconds
        while (left := self.ranks()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def ranks_of(self, node: subprocess.Popen[bytes]) -> list[psutil.Process]:
        """Processes of the ranks on a node."""
        return [process for process in self.processes_of(node) if is_rank(process)]

    def processes_of(self, node: subprocess.Popen[bytes]) -> list[psutil.Process]:
        """All processes of a node, its supervisor first."""
        tops = [psutil.Process(node.pid)]
        if node.pid in self._forks:
            tops.append(psutil.Process(self._forks[node.pid].pid))
        return [process for top in tops for process in (top, *top.children(recursive=True))]

    def close(self) -> None:
        """End all nodes, the last one first."""
        for node in reversed(self.nodes):
            assert node.stdin is not None
            node.stdin.close()
        for node in self.nodes:
            node.wait()
        for forks in self._forks.values():
            forks.kill()
            forks.join()
        self.nodes.clear()
        self._forks.clear()

    def _start(self, *words: str, is_for_ranks: bool = False) -> subprocess.Popen[bytes]:
        """Start a node; again with other ports where it does not come up, because another program has taken one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + _START
        while True:
            name = f"{self.folder.name}-{self._started}"
            log, place = self.folder.with_name(f"{name}.log"), str(self.folder.with_name(f"{name}.socket"))
            self._started += 1
            hidden = self.hidden if self.is_hiding else None
            forks = None
            if is_for_ranks:
                forks = fork_server().Process(target=fork_workers, args=(place, hidden), daemon=True)
                forks.start()
            node = self._launch(log, words, place if is_for_ranks else "")
            # Two nodes that start at the same time would take the same names.
            while "Ray runtime started" not in (text := log.read_text(encoding="utf-8", errors="replace")):
                if node.poll() is not None or time.monotonic() > deadline:
                    break
                time.sleep(0.2)
            else:
                if forks:
                    wait_until(Path(place).exists, f"{place} is not served")
                    self._forks[node.pid] = forks
                self.nodes.append(node)
                return node
            assert node.stdin is not None
            node.stdin.close()
            node.wait()
            if forks:
                forks.kill()
            assert time.monotonic() < deadline, text

    def _launch(self, log: Path, words: Sequence[str], forks: str) -> subprocess.Popen[bytes]:
        # Given, not chosen: a busy machine's agents take longer to tell theirs than the 15 s that a raylet waits.
        kinds = ("dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent", "metrics-export")
        ports = dict(zip(kinds, free_ports(len(kinds)), strict=True))
        command = [
            str(_RAY),
            "start",
            "--block",
            "--disable-usage-stats",
            f"--object-store-memory={200 << 20}",
            *(f"--{name}-port={port}" for name, port in ports.items()),
            *words,
        ]
        if forks and self.is_hiding:
            # In a mount namespace of its own, where an empty folder lies over it.
            hide = 'mount -t tmpfs none "$0" && exec "$@"'
            command = ["unshare", "--mount", "sh", "-c", hide, str(self.hidden), *command]
        with log.open("wb") as output:
            return subprocess.Popen(
                supervised(command, _GRACE),
                cwd=self.folder,
                env={
                    **plain_environment(),
                    **self.access,
                    **_PATIENT,
                    "PYTHONPATH": f"{ROOT}/src:{ROOT}/tests",
                    "FORKED_WORKERS": forks,
                },
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


@contextmanager
def joined(cluster: RayCluster, placing: RayOptions, count: int = 1) -> Iterator[None]:
    """This process as a driver of so many actors, for the `with` block."""
    with mock.patch.dict(os.environ, cluster.environment), connected(placing, count):
        yield


def wait_until(holds: Callable[[], bool], what: str, seconds: float = 300) -> None:
    """Wait for a condition, longer than a busy machine takes."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def plain_environment() -> dict[str, str]:
    """This process's variables without those of Ray and of the project."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "GEO_SOKOBAN_"))}


def fork_workers(place: str, hidden: Path | None) -> None:
    """Life of the process whose forks are the workers of a node; it ends with the one that started it.

    Args:
        place: name of its socket.
        hidden: a folder that they see empty.
    """
    import forked_workers

    # As in a new interpreter: Kedro has configured logging as it was imported.
    for logger in (logging.root, *map(logging.getLogger, ("kedro", "geo_sokoban_pipeline"))):
        logger.handlers.clear()
        logger.setLevel(logging.WARNING if logger is logging.root else logging.NOTSET)
    if hidden:
        hide_here(hidden)
    own = (sys.prefix, sys.base_prefix)
    sys.path[:] = [f"{ROOT}/src", f"{ROOT}/tests", *(path for path in sys.path if path.startswith(own))]
    owner = multiprocessing.parent_process()
    assert owner is not None
    forked_workers.serve(place, owner.sentinel)


def is_rank(process: psutil.Process) -> bool:
    """Whether a process is that of a rank or a rollout worker."""
    try:
        return process.cmdline()[:1] != [] and process.cmdline()[0].startswith(RANKS)
    except psutil.NoSuchProcess:
        return False


def is_server(process: psutil.Process) -> bool:
    """Whether a process belongs to an SGLang server or supervises one."""
    try:
        words = process.cmdline()
    except psutil.NoSuchProcess:
        return False
    return any("sglang" in word for word in words) and process.status() != psutil.STATUS_ZOMBIE


def free_ports(count: int) -> Sequence[int]:
    """Ports that nobody listens on now."""
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().choice(_PORTS)
        with suppress(OSError), socket.create_server(("", port)):
            found = [*found, port] if port not in found else found
    return found


def own_address() -> str:
    """Address of this machine by which Ray knows it."""
    import ray

    address: str = ray.util.get_node_ip_address()
    return address


def submit(cluster: RayCluster, entry: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """`ray job submit` of a command, which runs on the first node; its workers are forks, its output is captured."""
    variables = json.dumps({"env_vars": dict(environment), "py_executable": _FORKED})
    words = [str(_RAY), "job", "submit", f"--address=http://127.0.0.1:{cluster.dashboard}"]
    return subprocess.Popen(
        [*words, "--runtime-env-json", variables, "--", *entry],
        env={**plain_environment(), **cluster.access, "RAY_ADDRESS": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
