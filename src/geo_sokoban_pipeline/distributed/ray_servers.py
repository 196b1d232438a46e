"""SGLang servers as actors of a Ray cluster: Ray assigns each its GPUs, and the actor launches it there.

A server starts from the policy's configuration and tokenizer alone, with arbitrary weights: its engine sends the
present ones before the first request, as after every restart. It ends with its actor, and the actor with the run.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.config.ray import RayOptions
from geo_sokoban_pipeline.config.server import ServerOptions
from geo_sokoban_pipeline.distributed.group import LOOPBACK
from geo_sokoban_pipeline.distributed.messages import DeadRankError
from geo_sokoban_pipeline.distributed.ray_actors import POLICY, ActorPlace, ServerHost, Started
from geo_sokoban_pipeline.distributed.ray_placement import (
    NoPlaceError,
    first_line,
    placings,
    reserve,
    start_actor,
    start_beside,
)
from geo_sokoban_pipeline.policies.policy import Policy, save_encoding
from geo_sokoban_pipeline.rollout.engines.sglang.client import ServerLost
from geo_sokoban_pipeline.rollout.engines.sglang.launcher import ServedModel
from geo_sokoban_pipeline.rollout.engines.sglang.servers import IdleServers, Launcher

_ANSWER = 5.0  # seconds in which a living actor says how its server is; a late one is asked again
_MARGIN = 30.0  # seconds in which it answers on a busy machine; on top of a server's grace, in which it ends it


class RayServer:
    """A server that an actor launches; see `OwnServer`. Where the actor has ended, a restart places another one.

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
        self._model, self._files = ServedModel.of(policy), _plain_files(policy)
        self._actor: Any = None
        self._bundles: Any = None
        self._place: ActorPlace | None = None
        self._started = Started()
        self._cluster = _connection()
        self._lock = threading.Lock()  # two threads may start and end it at once
        self._ended = threading.Event()

    @property
    def url(self) -> str:
        """See `OwnServer`."""
        return self._started.url

    @property
    def pid(self) -> int:
        """See `OwnServer`."""
        return self._started.pid

    @property
    def log(self) -> Path:
        """See `OwnServer`."""
        return self._started.log

    @property
    def alive(self) -> bool:
        """See `OwnServer`."""
        return self._actor is not None and self.lost() is None

    def start(self, *, same_port: bool = True) -> None:
        """See `OwnServer`; once `end` was called, it starts none.

        Raises:
            ServerLost: its interpreter is missing on the node, its port is taken, or the actor has ended meanwhile.
            RankError: the cluster has not the resources.
            DeadRankError: the ranks beside it are gone.
        """
        import ray

        with self._lock:
            if not self._ended.is_set() and not self._has_actor():
                self._drop(patient=False)
                try:
                    self._find_place()
                except NoPlaceError:
                    if not self._ended.is_set():
                        raise
            if self._ended.is_set():
                return
            gpus = None if self._beside is None else [gpu for place in self._beside for gpu in place.gpus]
            try:
                started = ray.get(
                    self._actor.start.remote(self._here(), self._model, self.number, gpus or None, same_port=same_port),
                    timeout=self.options.faults.grace + _MARGIN,
                )
            except ray.exceptions.GetTimeoutError as failure:
                self._drop(patient=False)
                raise ServerLost(f"{self._title} hangs: its actor did not start it.") from failure
            except ray.exceptions.RayTaskError:
                raise
            except ray.exceptions.RayError as failure:
                raise ServerLost(f"{self._title} has ended: {first_line(failure)}") from failure
            if started.refusal is not None:
                raise ServerLost(f"{self._title} on {self._place and self._place.address}: {started.refusal}")
            self._started = started
            self.released.clear()

    def lost(self) -> str | None:
        """See `OwnServer`; None too while nobody knows whether its node has ended."""
        found: str | None = self._ask("lost")
        return found

    def found_port_taken(self) -> bool:
        """See `OwnServer`."""
        return self._ask("found_port_taken") is True

    def end(self) -> None:
        """See `OwnServer`; a start that waits for resources ends too."""
        self._ended.set()
        with self._lock:
            self._drop(patient=True)

    def _ask(self, question: str) -> Any:
        """What the actor says; the cause if it has ended, None if it is late or was never there."""
        import ray

        actor = self._actor  # another thread may drop it
        if actor is None:
            return None
        if not self._is_connected():
            return f"{self._title}: the connection to its cluster is closed."
        try:
            return ray.get(getattr(actor, question).remote(), timeout=_ANSWER)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnavailableError):
            return None
        except ray.exceptions.RayError as failure:
            return f"{self._title} has ended: {first_line(failure)}"

    def _has_actor(self) -> bool:
        """Whether there is an actor that answers."""
        import ray

        if self._actor is None or not self._is_connected():
            return False
        try:
            ray.get(self._actor.place.remote(), timeout=_MARGIN)
        except ray.exceptions.RayError:  # a timeout is one too
            return False
        return True

    def _is_connected(self) -> bool:
        return self._cluster is not None and self._cluster == _connection()

    def _find_place(self) -> None:
        """Start an actor."""
        import ray

        for is_last in placings(self._placing):
            if self._beside is None:
                gpus = self.options.gpus
                self._bundles = reserve(1, f"{self._title} with", self._placing, gpus, self._ended.is_set)
                given = (self._title, self._bundles, 0, self._placing, gpus, self._files, ())
                self._actor = start_actor(ServerHost, *given, calls=4)
            else:
                node = self._beside[0].node
                self._actor = start_beside(ServerHost, self._title, node, self._files, (), calls=4)
            try:
                self._place = ray.get(self._actor.place.remote())
                return
            except ray.exceptions.RayTaskError:
                raise
            except ray.exceptions.RayError as failure:
                self._drop(patient=False)
                if self._ended.is_set():
                    return
                # Beside ranks whose node has ended there is no place any more: they are lost as well.
                if self._beside is not None or is_last():
                    raise DeadRankError(f"{self._title} has ended: {first_line(failure)}") from failure

    def _here(self) -> ServerOptions:
        """Options of the server on its node: there it listens where the others of this cluster reach it."""
        import ray

        assert self._place is not None
        is_alone = sum(node["Alive"] for node in ray.nodes()) == 1
        python = self.options.python
        if not python.startswith("~"):
            python = str(Path(python).absolute())
        # It gets the present weights before the first request.
        arguments = (*self.options.extra_arguments, "--load-format", "dummy")
        host = LOOPBACK if is_alone else self._place.address
        return self.options.model_copy(update={"host": host, "python": python, "extra_arguments": arguments})

    def _drop(self, *, patient: bool) -> None:
        """End the actor and with it the server; free what it took."""
        import ray
        from ray.util.placement_group import remove_placement_group

        actor, self._actor = self._actor, None
        bundles, self._bundles = self._bundles, None
        if actor is None or not self._is_connected():
            return
        if patient:
            with suppress(ray.exceptions.RayError):  # of an actor that is gone
                ray.get(actor.end.remote(), timeout=self.options.faults.grace + _MARGIN)
        ray.kill(actor)
        if bundles is not None:
            remove_placement_group(bundles)


class RayServers:
    """Starts servers in the cluster to which this process is connected, and ends them before the connection does.

    Args:
        placing: of Ray.
        ranks: places of the ranks with which the servers take turns, in order; server n shares the GPUs of the ranks
            from n · `tensor_parallel` on. None: servers have GPUs of their own.
    """

    def __init__(self, placing: RayOptions, ranks: Sequence[ActorPlace] | None = None) -> None:
        self._placing, self._ranks = placing, ranks
        self._idle = IdleServers()
        self.launcher = Launcher(self._server, self._idle)

    def close(self) -> None:
        """End the servers that no engine uses."""
        self._idle.end()

    def _server(self, options: ServerOptions, policy: Policy, number: int) -> RayServer:
        beside = None if self._ranks is None else shared_ranks(self._ranks, options, number)
        return RayServer(options, policy, number, self._placing, beside)


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


def _connection() -> str | None:
    """What distinguishes this process's connection to a cluster from earlier ones; None: there is none."""
    import ray

    return str(ray.get_runtime_context().get_job_id()) if ray.is_initialized() else None
