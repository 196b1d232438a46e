"""SGLang servers in a Ray cluster: Ray assigns each its GPUs, and a process there launches it.

A server starts from the policy's configuration and tokenizer alone, with arbitrary weights: its engine sends the
present ones before the first request, as after every restart. It ends with its process, and that with the run.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.config.ray import RayOptions
from geo_sokoban_pipeline.config.server import ServerOptions
from geo_sokoban_pipeline.distributed.process import WorkerDied, WorkerError, WorkerFailed
from geo_sokoban_pipeline.distributed.ray_cluster import NoPlaceError
from geo_sokoban_pipeline.distributed.ray_process import ActorPlace, RayProcess, start_ray_processes
from geo_sokoban_pipeline.distributed.server_host import POLICY, HostedServer, Started
from geo_sokoban_pipeline.policies.policy import Policy, save_encoding
from geo_sokoban_pipeline.rollout.engines.sglang.client import ServerLost
from geo_sokoban_pipeline.rollout.engines.sglang.launcher import ServedModel
from geo_sokoban_pipeline.rollout.engines.sglang.servers import IdleServers, Launcher

_ANSWER = 5.0  # seconds in which a living process says how its server is; a late one is asked again
_MARGIN = 30.0  # seconds in which it answers on a busy machine; on top of a server's grace, in which it ends it
_LOOPBACK = "127.0.0.1"


class RayServer:
    """A server in the cluster; see `OwnServer`. Where its process has ended, a restart places another one.

    Args:
        placing: of Ray.
        beside: places of the ranks with which it shares GPUs, all on one node; None: it has GPUs of its own.
    """

    def __init__(
        self,
        options: ServerOptions,
        policy: Policy,
        number: int,
        placing: RayOptions,
        beside: Sequence[ActorPlace] | None = None,
    ) -> None:
        self.options, self.number = options, number
        self.released: set[str] = set()
        self._title = f"server {number + 1} of {options.count}"
        self._placing, self._beside = placing, beside
        gpus = None if beside is None else [gpu for place in beside for gpu in place.gpus]
        self._model, self._gpus, self._files = ServedModel.of(policy), gpus or None, _plain_files(policy)
        self._process: RayProcess | None = None
        self._started = Started()
        self._lock = threading.Lock()  # two threads may start and end it at once
        self._ended = threading.Event()

    @property
    def url(self) -> str:
        return self._started.url

    @property
    def pid(self) -> int:
        return self._started.pid

    @property
    def log(self) -> Path:
        return self._started.log

    @property
    def alive(self) -> bool:
        return self._process is not None and self.lost() is None

    def start(self, *, same_port: bool = True) -> None:
        """See `OwnServer`; once `end` was called, it starts none.

        Raises:
            ServerLost: its interpreter is missing on the node, its port is taken, or its process has ended meanwhile.
            WorkerError: the cluster has not the resources.
            WorkerDied: the ranks beside it are gone.
        """
        with self._lock:
            if not self._ended.is_set() and not self._answers():
                self._drop()
                try:
                    self._place()
                except (NoPlaceError, WorkerDied):
                    if not self._ended.is_set():
                        raise
            process = self._process
            if self._ended.is_set() or process is None:
                return
            starting = process.call("launch", same_port)
            if not wait([starting], self.options.faults.grace + _MARGIN).done:
                self._drop()
                raise ServerLost(f"{self._title} hangs: its process did not start it.")
            try:
                self._started = starting.result()
            except WorkerFailed as failure:
                if isinstance(failure.error, ServerLost):
                    raise ServerLost(f"{self._title} on {process.where.address}: {failure.error}") from failure
                raise
            except WorkerDied as failure:
                raise ServerLost(str(failure)) from failure
            self.released.clear()

    def lost(self) -> str | None:
        """See `OwnServer`; None too while it is not known whether its node has ended."""
        return self._ask("lost")

    def found_port_taken(self) -> bool:
        return self._ask("found_port_taken") is True

    def end(self) -> None:
        """See `OwnServer`; a start that waits for resources ends too."""
        self._ended.set()
        with self._lock:
            if self._process is not None:
                wait([self._process.send("end")], self.options.faults.grace + _MARGIN)
            self._drop()

    def _ask(self, question: str) -> Any:
        """The answer of the process; the cause if it has ended, None if it is late, out of reach or was never there."""
        process = self._process  # another thread may drop it
        if process is None:
            return None
        try:
            return process.send(question).result(_ANSWER)
        except TimeoutError:
            return None
        except WorkerError as failure:
            import ray

            return None if isinstance(failure.__cause__, ray.exceptions.ActorUnavailableError) else str(failure)

    def _answers(self) -> bool:
        """Whether there is a process that answers."""
        if self._process is None:
            return False
        asked: Future[Any] = self._process.send("standstill")
        return bool(wait([asked], _MARGIN).done) and asked.exception() is None

    def _place(self) -> None:
        node, gpus = (None, self.options.gpus) if self._beside is None else (self._beside[0].node, 0)
        given = ([self._title], f"{self._title} with", self._placing, gpus, self._files)
        self._process = process = start_ray_processes(*given, node=node, is_given_up=self._ended.is_set)[0]
        process.build(partial(HostedServer, self._here(process), self._model, self.number, self._gpus))

    def _here(self, process: RayProcess) -> ServerOptions:
        """Options of the server on its node: there it listens where the others of this cluster reach it."""
        import ray

        is_alone = sum(node["Alive"] for node in ray.nodes()) == 1
        python = self.options.python
        if not python.startswith("~"):
            python = str(Path(python).absolute())
        # It gets the present weights before the first request.
        arguments = (*self.options.extra_arguments, "--load-format", "dummy")
        host = _LOOPBACK if is_alone else process.where.address
        return self.options.model_copy(update={"host": host, "python": python, "extra_arguments": arguments})

    def _drop(self) -> None:
        """End the process and with it the server; free what it took."""
        process, self._process = self._process, None
        if process is not None:
            process.close()


@contextmanager
def ray_launcher(placing: RayOptions, ranks: Sequence[ActorPlace] | None = None) -> Iterator[Launcher]:
    """A launcher of servers in the cluster to which this process is connected, for the `with` block.

    Servers that no engine uses then end with it.

    Args:
        placing: of Ray.
        ranks: places of the ranks with which the servers take turns, in order; server n shares the GPUs of the ranks
            from n · `tensor_parallel` on. None: servers have GPUs of their own.
    """

    def server(options: ServerOptions, policy: Policy, number: int) -> RayServer:
        beside = None if ranks is None else shared_ranks(ranks, options, number)
        return RayServer(options, policy, number, placing, beside)

    launcher = Launcher(server, IdleServers())
    try:
        yield launcher
    finally:
        launcher.idle.end()


def shared_ranks(ranks: Sequence[ActorPlace], options: ServerOptions, number: int) -> Sequence[ActorPlace]:
    """The ranks whose GPUs server `number` shares.

    Raises:
        ServerLost: they are not on one node.
    """
    size = options.tensor_parallel
    chosen = ranks[number * size : (number + 1) * size]
    nodes = sorted({place.address for place in chosen})
    if len(nodes) != 1 or len({place.node for place in chosen}) != 1:
        raise ServerLost(
            f"rollout.server.tensor_parallel={size} with colocated=true: the {size} ranks whose GPUs server {number} "
            f"would share are on the nodes {', '.join(nodes)}. Take a tensor_parallel that divides the ranks of a "
            "node, or ray.strategy=PACK."
        )
    return chosen


def _plain_files(policy: Policy) -> dict[str, bytes]:
    """Files of a policy but its weights, as an actor gets them."""
    with tempfile.TemporaryDirectory(prefix="geo_sokoban_server_") as scratch:
        folder = Path(scratch)
        save_encoding(policy, folder)
        found = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        return {f"{POLICY}/{path.relative_to(folder)}": path.read_bytes() for path in found}
