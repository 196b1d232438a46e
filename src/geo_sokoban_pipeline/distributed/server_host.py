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


class HostedServer(ServerProgram):
    """The object of a process whose server is another process below it, on its node.

    Args:
        gpus: ids of those that it computes on. None: those that Ray has assigned to the process.
    """

    def __init__(self, options: ServerOptions, model: ServedModel, number: int, gpus: Sequence[str] | None) -> None:
        # A server is no process of Ray, so it must not inherit Ray's token.
        variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        if gpus is not None:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        super().__init__(options, model, Path.cwd() / POLICY, number, _own_logs(), 0, variables)

    def launch(self, same_port: bool) -> Started:
        """Start or restart the server, see `ServerProgram.start`; returns where it then is."""
        self.start(same_port=same_port)
        return Started(self.url, self.pid, self.log)


def _own_logs() -> Path:
    """Folder of this process's servers, among the logs of Ray, which outlive the process."""
    import ray

    return Path(ray._private.worker._global_node.get_logs_dir_path()) / f"servers-{os.getpid()}"
