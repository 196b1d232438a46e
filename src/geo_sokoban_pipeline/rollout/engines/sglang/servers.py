"""The servers of an engine: launched or attached, watched, restarted, and closed.

Every server has the current weights before it gets a request, also after a restart. The request that finds a server
lost restarts it, while the other requests wait. Launched servers outlive engines: a run makes several engines
(validations of the warm start, the loop, the evaluation), and a server takes a minute to start, so an engine's servers
become idle and the next engine of this process takes them over. They end with the process, those in a Ray cluster with
the connection to it. One that takes turns with a trainer has weights and cache in memory only between the update of an
engine and its `release_memory` or `close`: it gives them up as soon as it is ready, and an idle one holds none.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

from geo_sokoban_pipeline.config.server import FaultOptions, ServerOptions
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.policies.weights import WeightSource
from geo_sokoban_pipeline.rollout.engines.sglang.client import (
    BadResponse,
    EngineStopped,
    RequestRefused,
    ServerClient,
    ServerFacts,
    ServerFault,
    ServerLost,
    UpdateInterrupted,
    WrongServer,
    inspect_server,
)
from geo_sokoban_pipeline.rollout.engines.sglang.launcher import (
    LaunchedRouter,
    LaunchedServer,
    OwnServer,
    kind_of,
)
from geo_sokoban_pipeline.rollout.engines.sglang.weight_update import WeightUpdate, weights_of

logger = logging.getLogger(__name__)
_PORT_TRIES = 3
_PAUSE_SECONDS = 1.0
# The parts that a server gives up while others use its GPU, by SGLang's names.
_WEIGHTS, _CACHE = "weights", "kv_cache"


def pause_before(attempt: int, options: FaultOptions) -> float:
    """Seconds to wait before a try: none before the first, then doubling up to `longest_pause`.

    `tenacity` does not fit: a server is restarted between tries, and restarts are counted from one update of weights to
    the next, not within one call.

    Args:
        attempt: number of the try, from 0.
    """
    return float(min(options.longest_pause, options.first_pause * 2 ** (attempt - 1))) if attempt else 0.0


@dataclass(frozen=True)
class ServerPlace:
    """Where a server is.

    Attributes:
        life: how often it has become ready, as the process counts them that keeps it.
    """

    url: str
    life: int


class Server:
    """One server, launched by this run or attached.

    Args:
        launched: a server of this run; None: attached.
        url: of an attached server.
        key: API key of an attached server; None: it needs none.

    Attributes:
        life: how often it has become ready; a fault belongs to the life in which it occurred.
        restarts: since the last update of weights.
        in_flight: requests that it has, or may have behind a router.
        ready: whether it runs and no update of weights is unfinished, so that another engine may take it over.
        lock: held during restarts and updates of weights.
        hung: set if it makes no progress in this life.
        places: limits the concurrent requests.
        ranks: its processes that need the weights, once it has been inspected.
    """

    def __init__(
        self,
        faults: FaultOptions,
        connections: int,
        launched: OwnServer | None = None,
        url: str = "",
        key: str | None = None,
    ) -> None:
        self.launched = launched
        self.life = 0
        self.restarts = 0
        self.in_flight = 0
        self.ready = False
        self.lock = asyncio.Lock()
        self.hung = asyncio.Event()
        self.places = asyncio.Semaphore(connections)
        self.ranks = 1
        self._faults = faults
        self._url = url
        self._connections = connections
        self._key = key
        self.client = self._connect()

    @property
    def released(self) -> set[str]:
        """Memory that a launched server has given up."""
        return set() if self.launched is None else self.launched.released

    @property
    def url(self) -> str:
        """Address of the server."""
        return self._url if self.launched is None else self.launched.url

    async def begin(self) -> None:
        """Start or restart the server and wait until it is ready; begins a new life.

        Raises:
            ServerLost: it is not ready in time, or its process has exited.
        """
        self.ready = False
        launched = self.launched
        # One that ran for another engine has answered before, and may hang since.
        is_taken = self.life == 0 and launched is not None and launched.alive and await self.answers()
        for attempt in range(_PORT_TRIES):
            if launched is not None and not (is_taken and attempt == 0):
                # In a thread, because ending a hanging server takes long, and the other servers must continue.
                await asyncio.to_thread(launched.start, same_port=attempt == 0)
            await self._reconnect()
            try:
                await self.client.wait_until_ready(lost=None if launched is None else launched.lost)
                break
            except ServerLost:
                # Another program took the free port meanwhile: try another one, unless the options name the port.
                retry = launched is not None and launched.options.ports is None and launched.found_port_taken()
                if not retry or attempt == _PORT_TRIES - 1:
                    raise
        self._begin_life()

    async def move(self, url: str) -> None:
        """Begin a new life of an attached server, perhaps at another address."""
        self._url = url
        await self._reconnect()
        self._begin_life()

    async def answers(self) -> bool:
        """Whether the server accepts requests within `health_timeout`."""
        end = time.monotonic() + self._faults.health_timeout
        while not (answers := await self.client.is_ready()) and time.monotonic() < end:
            await asyncio.sleep(_PAUSE_SECONDS)
        return answers

    async def place(self) -> ServerPlace:
        """Where it is, once a restart in progress is over: only then it has its weights."""
        async with self.lock:
            return ServerPlace(self.url, self.life)

    async def watch(self) -> None:
        """Check at intervals whether a server with requests makes progress; sets `hung` if not."""
        while True:
            await asyncio.sleep(self._faults.health_interval)
            hung = self.hung  # of this life: a new one may begin during the check
            if self.in_flight and self.ready and not await self._computes():
                logger.warning("%s has not computed anything for %g s", self.url, self._faults.health_timeout)
                hung.set()

    async def _computes(self) -> bool:
        """Whether the server makes progress within `health_timeout`.

        The server's own health check fails after 20 s, which a busy machine may need for a few tokens; so it is
        repeated until the timeout.
        """
        life, end = self.life, time.monotonic() + self._faults.health_timeout
        while (left := end - time.monotonic()) > 0:
            if self.life != life or await self.client.is_ready("/health", left):
                return True
            await asyncio.sleep(_PAUSE_SECONDS)
        return False

    def _begin_life(self) -> None:
        self.life += 1
        self.ready = True
        self.hung = asyncio.Event()

    async def _reconnect(self) -> None:
        await self.client.close()
        self.client = self._connect()

    def _connect(self) -> ServerClient:
        return ServerClient(self.url, self._faults, self._connections, self._key)


class IdleServers:
    """Launched servers that no engine uses, by kind; they run until an engine takes them, or until `end`."""

    def __init__(self) -> None:
        self._servers: dict[str, list[OwnServer]] = {}

    def __iter__(self) -> Iterator[OwnServer]:
        return chain.from_iterable(list(self._servers.values()))

    def add(self, kind: str, server: OwnServer) -> None:
        """Keep a running server for the next engine of its kind."""
        self._servers.setdefault(kind, []).append(server)

    def take(self, kind: str, numbers: Iterable[int]) -> dict[int, OwnServer]:
        """Remove and return running servers of a kind by their numbers; those that have exited are ended."""
        wanted, found, others = set(numbers), dict[int, OwnServer](), []
        for server in self._servers.pop(kind, []):
            if not server.alive:
                server.end()
            elif server.number in wanted - found.keys():
                found[server.number] = server
            else:
                others.append(server)
        if others:
            self._servers[kind] = others
        return found

    def end(self) -> None:
        """End all of them."""
        for server in self:
            server.end()
        self._servers.clear()


# One per process: engines come and go within a run, and their servers must outlive them.
IDLE = IdleServers()
atexit.register(IDLE.end)


@dataclass(frozen=True)
class Launcher:
    """Starts servers, and keeps those that no engine uses.

    Attributes:
        server: a server by its number, which is not started yet.
    """

    server: Callable[[ServerOptions, Policy, int], OwnServer]
    idle: IdleServers


HERE = Launcher(LaunchedServer, IDLE)


class Fleet:
    """All servers of an engine; used inside one event loop.

    Args:
        policy: the policy that they serve.
        launcher: of servers that are launched.

    Attributes:
        restarts: how often a server was lost and brought back.
    """

    def __init__(self, options: ServerOptions, policy: Policy, launcher: Launcher = HERE) -> None:
        self.options = options
        self.restarts = 0
        self._launcher = launcher
        self.servers: list[Server] = []
        self._policy = policy
        self._weights: WeightSource | None = None
        self._tag = self._way = ""
        self._kind = kind_of(options, policy)
        self._router: LaunchedRouter | None = None
        self._router_client: ServerClient | None = None
        self._watches: list[asyncio.Task[None]] = []
        self._sending = asyncio.Lock()

    async def start(self) -> ServerFacts:
        """Launch or attach to the servers; returns once all are ready and checked.

        Returns:
            Facts that hold for all of them.

        Raises:
            ServerLost: one does not start.
            WrongServer: one does not fit the policy, or their versions or seeding differ.
        """
        faults, places = self.options.faults, self.options.concurrency
        if self.options.mode == "launch":
            idle = self._launcher.idle.take(self._kind, range(self.options.count))
            launched = [
                idle.get(number) or self._launcher.server(self.options, self._policy, number)
                for number in range(self.options.count)
            ]
            self.servers = [Server(faults, places, launched=one) for one in launched]
        else:
            key = self.options.api_key()
            self.servers = [Server(faults, places, url=url, key=key) for url in self.options.urls]
        await asyncio.gather(*(self._begin(server) for server in self.servers))
        facts = [await inspect_server(server.client, self._policy) for server in self.servers]
        for server, found in zip(self.servers, facts, strict=True):
            server.ranks = found.ranks
        if self.options.colocated:
            await self.release_memory()  # weights are on their way beside it before its cache is of use
        if self.options.router != "none":
            urls = [server.url for server in self.servers]
            self._router, self._router_client = await start_router(self.options, urls, places * len(urls))
        self._watches = [asyncio.create_task(server.watch()) for server in self.servers]
        return combine_facts(facts)

    async def update_weights(self, weights: WeightSource, tag: str, way: str, *, pause: bool) -> None:
        """Send new weights to all servers.

        Args:
            weights: in the servers' types; a server that is restarted gets them again.
            tag: their name at the servers.
            way: see `ServerOptions.way`.
            pause: pause the requests in flight meanwhile; they continue with the new weights.
        """
        self._weights, self._tag, self._way = weights, tag, way
        for server in self.servers:
            server.restarts = 0
        async with AsyncExitStack() as locks:  # excludes restarts, and requests to servers without these weights
            for server in self.servers:
                await locks.enter_async_context(server.lock)
                server.ready = False  # after a failure no other engine may take it over
            if pause:
                await self._command(self.servers, "/pause_generation", {"mode": "retract"})
            await self._take_back(_WEIGHTS, self.servers)
            waiting = list(self.servers)
            while waiting:
                faults = await self._send(waiting)
                lost = {server: fault for server, fault in faults.items() if not isinstance(fault, UpdateInterrupted)}
                await asyncio.gather(*(self._restart(server, fault) for server, fault in lost.items()))
                waiting = [server for server in faults if server not in lost]
            await self._take_back(_CACHE, self.servers)
            if pause:
                await self._command(self.servers, "/continue_generation", {})
            for server in self.servers:
                server.ready = True

    async def release_memory(self) -> None:
        """Have all servers give up the memory of weights and cache until the next `update_weights`.

        A server that is lost meanwhile is found by that update.

        Raises:
            RuntimeError: a request is in flight, which would end the server.
        """
        async with AsyncExitStack() as locks:  # excludes restarts
            for server in self.servers:
                await locks.enter_async_context(server.lock)
            busy = [f"{server.url} ({server.in_flight})" for server in self.servers if server.in_flight]
            if busy:
                raise RuntimeError(f"requests are in flight, so no server may give up its memory: {', '.join(busy)}")
            await self._give_up(self.servers, _CACHE, _WEIGHTS)

    async def _give_up(self, servers: Sequence[Server], *memories: str) -> dict[Server, ServerFault]:
        """Have those of the servers that have some memory give it up, and return those that were lost.

        No request is in flight.
        """
        lost: dict[Server, ServerFault] = {}
        for memory in memories:
            awake = [server for server in servers if memory not in server.released and server not in lost]
            for server in awake:
                server.released.add(memory)
            lost |= await self._command(awake, "/release_memory_occupation", {"tags": [memory]})
        return lost

    async def _take_back(self, memory: str, servers: Sequence[Server]) -> None:
        """Have those of the servers that gave up some memory take it back; one that fails is restarted.

        Their locks are held.
        """
        while asleep := [server for server in servers if memory in server.released]:  # a restarted one has no cache
            for server in asleep:
                server.released.discard(memory)
            lost = await self._command(asleep, "/resume_memory_occupation", {"tags": [memory]})
            for server, fault in lost.items():
                await self._restart(server, fault)

    def server_of(self, key: str) -> Server:
        """The server of a conversation."""
        return max(self.servers, key=lambda server: hashlib.blake2b(f"{key} {server.url}".encode()).digest())

    def client_of(self, server: Server) -> ServerClient:
        """Client for requests to a server: the router's, if there is one."""
        return self._router_client or server.client

    def possible_servers(self, server: Server) -> list[Server]:
        """Servers that may receive a request for this one: behind a router all of them."""
        return [server] if self._router is None else list(self.servers)

    async def settle(self, server: Server) -> int:
        """Wait for restarts of all servers that may receive a request for this one; returns the life of this one.

        A router would use a restarted server before it has its weights.
        """
        places = [(one, await one.place()) for one in self.possible_servers(server)]
        return next(place.life for one, place in places if one is server)

    async def abort(self, rid: str, server: Server) -> None:
        """Abort a request at every server that may have it."""
        aborts = [one.client.abort(rid) for one in self.possible_servers(server)]
        for failed in await asyncio.gather(*aborts, return_exceptions=True):
            if failed is not None and not isinstance(failed, ServerFault):  # a fault shows in the request itself
                raise failed

    async def recover(self, server: Server, life: int, fault: ServerFault) -> None:
        """Restart what a fault of a request has lost; afterwards the request can be resubmitted.

        Behind a router the fault may be of any server, so all are checked.

        Args:
            life: of the server in which the fault occurred.

        Raises:
            EngineStopped: a server was lost more often than `faults.restarts` allows, or the router has exited.
        """
        if self._router is None:
            if isinstance(fault, ServerLost):
                await self.bring_back(server, life, fault)
            return
        for other in self.servers:
            life = (await other.place()).life
            if other.hung.is_set() or not await other.client.is_ready():
                await self.bring_back(other, life, fault)
        if (reason := self._router.lost()) is not None:
            raise EngineStopped(f"the router has ended: {reason}") from fault

    async def close(self) -> None:
        """Close connections; running launched servers become idle for the next engine of this process."""
        for watch in self._watches:
            watch.cancel()
        idle = [server for server in self.servers if server.ready and not server.hung.is_set()]
        if self.options.colocated:  # the GPU is free for what follows the engine
            idle = [server for server in idle if not server.in_flight and await server.client.is_ready()]
            lost = await self._give_up(idle, _CACHE, _WEIGHTS)
            idle = [server for server in idle if server not in lost]  # the others still have the GPU, and are ended
        for server in self.servers:
            await server.client.close()
        if self._router_client is not None:
            await self._router_client.close()
        if self._router is not None:
            await asyncio.to_thread(self._router.end)
        servers, self.servers = self.servers, []
        for server in servers:
            if server.launched is None:
                continue
            if server in idle and server.launched.alive:
                self._launcher.idle.add(self._kind, server.launched)
            else:
                await asyncio.to_thread(server.launched.end)

    async def bring_back(self, server: Server, life: int, fault: ServerFault) -> None:
        """Restart a lost server with the current weights; does nothing if a later life has begun."""
        async with server.lock:
            if server.life == life:
                await self._restart(server, fault)
                await self._take_back(_CACHE, [server])

    async def _begin(self, server: Server) -> None:
        """Make a server ready at the start."""
        await server.begin()

    async def _restart(self, server: Server, fault: ServerFault) -> None:
        """Restart a server, whose lock is held, until it has the current weights."""
        self.restarts += 1
        while True:
            server.restarts += 1
            self._check_restarts(server, fault)
            logger.warning("%s is lost, restart %d: %s", server.url, server.restarts, fault)
            await asyncio.sleep(pause_before(server.restarts - 1, self.options.faults))
            try:
                await server.begin()
                await self._restore(server)
                return
            except (ServerLost, BadResponse, RequestRefused) as again:
                fault = again

    async def _restore(self, server: Server) -> None:
        """Check a restarted server and send the current weights, unless it has them (an attached one may).

        Its cache is then given up where it takes turns: weights are on their way beside it.
        """
        await inspect_server(server.client, self._policy)
        if server.launched is None:  # an interrupted update may have left it paused
            await server.client.command("/continue_generation", {})
            with suppress(RequestRefused):  # no update is open
                await server.client.command("/end_weight_update", {})
        if self._weights is not None and await weights_of(server.client) != self._tag:
            if self.options.colocated:
                await self._give_up([server], _CACHE)
            for fault in (await self._send([server])).values():
                raise fault

    async def _send(self, servers: Sequence[Server]) -> dict[Server, ServerFault]:
        """Send the current weights; returns faults of servers that did not get them."""
        assert self._weights is not None
        ranks, numbers = {server.client: server.ranks for server in servers}, map(self.servers.index, servers)
        update = WeightUpdate(ranks, self.options, self._way, [*numbers])
        async with self._sending:  # servers that come back at a time share one sender
            await update.send(self._weights, self._tag)
        return {server: update.faults[server.client] for server in servers if server.client in update.faults}

    @staticmethod
    async def _command(servers: Sequence[Server], path: str, body: dict[str, Any]) -> dict[Server, ServerFault]:
        """Command servers; returns faults of lost ones, which the next update or request finds too."""
        answers = await asyncio.gather(
            *(server.client.command(path, body) for server in servers), return_exceptions=True
        )
        lost: dict[Server, ServerFault] = {}
        for server, answer in zip(servers, answers, strict=True):
            if isinstance(answer, ServerLost | BadResponse):
                lost[server] = answer
            elif isinstance(answer, BaseException):
                raise answer
        return lost

    def _check_restarts(self, server: Server, fault: ServerFault) -> None:
        allowed = self.options.faults.restarts
        if server.restarts > allowed:
            log = "" if server.launched is None else f" Its log: {server.launched.log}."
            raise EngineStopped(
                f"{server.url} was lost {server.restarts} times since the last update of weights, "
                f"rollout.server.faults.restarts={allowed}: {fault}.{log} The same command continues from the last "
                "checkpoint."
            ) from fault


async def start_router(
    options: ServerOptions, workers: Sequence[str], places: int
) -> tuple[LaunchedRouter, ServerClient]:
    """A router in front of servers, ready, and a client of it.

    Args:
        workers: addresses of the servers.
        places: requests in flight at most.

    Raises:
        ServerLost: it does not start.
    """
    for attempt in count(1):
        router = await asyncio.to_thread(LaunchedRouter, options, workers)
        client = ServerClient(router.url, options.faults, places)
        try:
            await client.wait_until_ready("/readiness", router.lost)
            break
        except BaseException as error:
            # Another program took a free port meanwhile: try other ones.
            retry = isinstance(error, ServerLost) and router.found_port_taken() and attempt < _PORT_TRIES
            await client.close()
            await asyncio.to_thread(router.end)
            if not retry:
                raise
    return router, client


def combine_facts(facts: Sequence[ServerFacts]) -> ServerFacts:
    """Facts that hold for all servers: the narrowest limits.

    Raises:
        WrongServer: their versions differ, or only some of them sample with seeds.
    """
    first = facts[0]
    if any((other.version, other.seeded) != (first.version, first.seeded) for other in facts):
        raise WrongServer("rollout.server.urls: the servers differ in version or in deterministic inference.")
    return ServerFacts(
        first.version,
        first.seeded,
        min(other.context for other in facts),
        min(other.longest_prompt for other in facts),
        first.ranks,
        first.dtype if all(other.dtype == first.dtype for other in facts) else None,
    )
