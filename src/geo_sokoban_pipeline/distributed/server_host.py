"""The host of a server in a Ray cluster: a process that starts, asks and ends the server, a process below it.

Nothing here imports torch, which the host of a server never needs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from geo_sokoban_pipeline.config.server import ServerOptions
from geo_sokoban_pipeline.rollout.engines.sglang.launcher import ServedModel, ServerProgram

POLICY = "policy"  # folder of a server's policy, among the files of its process


@dataclass(frozen=True)
class Started:
    """A server that was started.

    Attributes:
        url: at which the driver and the rollout workers reach it.
    """

    url: str = ""
    pid: int = 0
    log: Path = Path()


@dataclass(frozen=True)
class ServerHostSpec:
    """Builds the object of a process whose server is another process below it, on its node.

    Attributes:
        gpus: ids of those that it computes on. None: those that Ray has assigned to the process.
    """

    model: ServedModel
    number: int
    gpus: Sequence[str] | None

    def __call__(self) -> ServerHost:
        """Build it, in its process."""
        return ServerHost(self)


class ServerHost:
    """Starts, asks and ends a server."""

    def __init__(self, spec: ServerHostSpec) -> None:
        self._spec = spec
        self._program: ServerProgram | None = None

    def start(self, options: ServerOptions, same_port: bool) -> Started:
        """Start or restart the server; returns before it is ready.

        Raises:
            ServerLost: its interpreter is missing, or its port is taken.
        """
        if self._program is None:
            # A server is no process of Ray, so it must not inherit Ray's token.
            variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
            if self._spec.gpus is not None:
                variables["CUDA_VISIBLE_DEVICES"] = ",".join(self._spec.gpus)
            given = (options, self._spec.model, Path.cwd() / POLICY, self._spec.number, _own_logs(), 0, variables)
            self._program = ServerProgram(*given)
        self._program.start(same_port=same_port)
        return Started(self._program.url, self._program.pid, self._program.log)

    def lost(self) -> str | None:
        """See `OwnServer`."""
        return None if self._program is None else self._program.lost()

    def found_port_taken(self) -> bool:
        """See `OwnServer`."""
        return self._program is not None and self._program.found_port_taken()

    def end(self) -> None:
        """End the server."""
        if self._program is not None:
            self._program.end()


def _own_logs() -> Path:
    """Folder of this process's servers, among the logs of Ray, which outlive the process."""
    import ray

    return Path(ray._private.worker._global_node.get_logs_dir_path()) / f"servers-{os.getpid()}"
