"""Launching one server: its folder, its port, its process.

The folder holds links to the policy's files, so it stays what it was while checkpoints come and go.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from geo_sokoban_pipeline.options.server import ServerOptions
from geo_sokoban_pipeline.policies.policy import Policy, save_policy
from geo_sokoban_pipeline.policies.preparing import link_policy_files
from geo_sokoban_pipeline.rollout.engines.sglang.command import router_command, server_command, server_environment
from geo_sokoban_pipeline.rollout.engines.sglang.faults import ServerLost
from geo_sokoban_pipeline.rollout.engines.sglang.ports import find_ports, is_free
from geo_sokoban_pipeline.rollout.engines.sglang.process import ServerProcess
from geo_sokoban_pipeline.rollout.engines.sglang.wire import ban
from geo_sokoban_pipeline.seeding import content_hash

_PORT_TAKEN = "address already in use"


class LaunchedServer:
    """A server that this process starts, and starts again.

    Args:
        number: of the server, from 0.
    """

    def __init__(self, options: ServerOptions, policy: Policy, number: int) -> None:
        self.options = options
        self.number = number
        self._dtype = str(policy.model.dtype).removeprefix("torch.")
        self._longest = int(policy.model.config.text_config.max_position_embeddings)
        self._bias = ban(policy.banned_ids.tolist())
        self._scratch = tempfile.TemporaryDirectory(prefix="geo_sokoban_server_")
        self._folder = Path(self._scratch.name) / "policy"
        lend_policy(policy, self._folder)
        self._process: ServerProcess | None = None
        # Starting and ending take their time and may be asked for by two threads; the end has the last word.
        self._lock = threading.Lock()
        self._ended = False
        self.port = options.ports[number] if options.ports is not None else find_ports(options.host, 1)[0]

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"http://{self.options.reachable_host}:{self.port}"

    @property
    def pid(self) -> int:
        """Of the server itself, which leads its process group."""
        return self._process.pid if self._process is not None else 0

    @property
    def log(self) -> Path:
        """File of its output."""
        folder = Path(self.options.log_folder) if self.options.log_folder is not None else Path(self._scratch.name)
        return folder / f"server_{self.number}.log"

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.alive

    def start(self, *, same_port: bool = True) -> None:
        """Start it, or start it again; returns before it is ready.

        Args:
            same_port: keep the port of before; False takes a free one where the options leave the choice.

        Raises:
            ServerLost: there is no environment for it, or its port is taken.
        """
        with self._lock:
            if not self._ended:
                self._start(same_port=same_port)

    def _start(self, *, same_port: bool) -> None:
        self._end_process()
        if not same_port and self.options.ports is None:
            self.port = find_ports(self.options.host, 1)[0]
        _check_start(self.options, self.port)
        command = server_command(
            self.options, self._folder, self._dtype, self._longest, self.port, self.number, self._bias
        )
        environment = server_environment(self.options, os.environ)
        self._process = ServerProcess(command, environment, self.log, self.options.faults.grace)

    def lost(self) -> str | None:
        """Why the process is gone: exit code and last lines; None while it runs."""
        if self._process is None or self._process.alive:
            return None
        return f"exit code {self._process.exit_code}; last lines of {self.log}:\n{self._process.tail()}"

    def found_port_taken(self) -> bool:
        """Whether it ended because somebody else has its port."""
        return self._process is not None and not self._process.alive and self._process.said(_PORT_TAKEN)

    def end(self) -> None:
        """End it for good."""
        with self._lock:
            self._ended = True
            self._end_process()
            self._scratch.cleanup()

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


class LaunchedRouter:
    """SGLang's router in front of servers."""

    def __init__(self, options: ServerOptions, workers: Sequence[str]) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="geo_sokoban_router_")
        folder = Path(options.log_folder) if options.log_folder is not None else Path(self._scratch.name)
        port, metrics_port = find_ports(options.host, 2)
        _check_start(options, port)
        self.url = f"http://{options.reachable_host}:{port}"
        self._process = ServerProcess(
            router_command(options, workers, port, metrics_port),
            server_environment(options, os.environ),
            folder / "router.log",
            options.faults.grace,
        )

    def lost(self) -> str | None:
        """Why the process is gone; None while it runs."""
        return None if self._process.alive else f"exit code {self._process.exit_code}:\n{self._process.tail()}"

    def end(self) -> None:
        """End it."""
        self._process.end()
        self._scratch.cleanup()


def kind_of(options: ServerOptions, policy: Policy) -> str:
    """What servers have in common that can stand in for each other: all but their weights."""
    # Not the configuration as a whole: saving a policy writes into it.
    shape = json.dumps([(name, list(value.shape)) for name, value in policy.model.named_parameters()])
    left_out = {"count", "update", "bucket_bytes", "update_folder", "faults", "router", "environment"}
    settings = options.model_dump_json(exclude=left_out)
    variables = json.dumps(options.hashed_environment, sort_keys=True)
    return content_hash(shape, settings, variables, *policy.codec.hashes().values())


def lend_policy(policy: Policy, folder: Path) -> None:
    """Fill a folder with a policy's files, linked where it was loaded from some."""
    folder.mkdir(parents=True)
    if policy.folder is not None and policy.folder.is_dir():
        link_policy_files(policy.folder, folder)
    else:
        save_policy(policy, folder)


def _check_start(options: ServerOptions, port: int) -> None:
    python = Path(options.python).expanduser()
    if not python.is_file():
        raise ServerLost(
            f"rollout.server.python={options.python}: no such interpreter. `make sglang-env` makes the servers' "
            "environment, `make sglang-env SGLANG=gpu` that for NVIDIA GPUs; or name the interpreter of another, or "
            "attach to running servers."
        )
    if not is_free(options.host, port):
        raise ServerLost(
            f"rollout.server.ports: port {port} of {options.host} is taken. End who listens there, give another port, "
            "or null for free ones."
        )
