"""The servers of an engine, from their launch to their end: started or attached, watched, brought back, closed.

Every server has the current weights before it gets a request, after a restart too. A lost one is brought back by the
request that noticed, while the others wait. Launched servers outlive engines: a run makes several engines (validations
of the warm start, the loop, the evaluation), and a server takes a minute to start, so the next engine of this process
that needs the same ones takes them over. They end with the process.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from geo_sokoban_pipeline.config.server import FaultOptions, ServerOptions
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.engines.sglang.client import (
    BadResponse,
    EngineStopped,
    RequestRefused,
    ServerClient,
    ServerFacts,
    ServerFault,
    ServerLost,
    WrongServer,
    inspect_server,
)
from geo_sokoban_pipeline.rollout.engines.sglang.launcher import LaunchedRouter, LaunchedServer, kind_of
from geo_sokoban_pipeline.rollout.engines.sglang.weights import WeightSet, send_weights, weights_of

logger = logging.getLogger(__name__)
_PORT_TRIES = 3
_PAUSE_SECONDS = 1.0


def pause_before(attempt: int, options: FaultOptions) -> float:
    """Seconds to wait before a try: none before the first, then doubling up to `longest_pause`.

    Two lines instead of `tenacity`: between tries a server is brought back, and restarts are counted from one update of
    weights to the next, not within one call.

    Args:
        attempt: number of the try, from 0.
    """
    doubled = options.first_pause * 2 ** (attempt - 1)
    return 0.0 if attempt == 0 else float(min(options.longest_pause, doubled))


class Server:
    """One server: launched by this process, or somebody else's.

    Args:
        launched: that this process starts; None: the server at `url` is somebody else's.
        url: of a server that is somebody else's.
        key: that such a server asks for; None: it asks for none.

    Attributes:
        life: how often it has become ready; a fault belongs to the life in which it was seen.
        restarts: since the last update of weights.
        in_flight: requests that it has, or may have behind a router.
        ready: whether it runs with weights that it may be taken over with.
        lock: held while it is brought back or gets weights.
        hung: set once it computes nothing in this life.
        places: one for each request at a time.
    """

    def __init__(
        self,
        faults: FaultOptions,
        connections: int,
        launched: LaunchedServer | None = None,
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
        self.facts: ServerFacts | None = None
        self._faults = faults
        self._url = url
        self._connections = connections
        self._key = key
        self.client = self._connect()

    @property
    def url(self) -> str:
        """Address of the server."""
        return self._url if self.launched is None else self.launched.url

    async def begin(self) -> None:
        """Have the server ready for requests, as a new life of it.

        Raises:
            ServerLost: it is not ready in time, or its process has ended.
        """
        self.ready = False
        for attempt in range(_PORT_TRIES):
            launched = self.launched
            if launched is not None and not (self.life == attempt == 0 and launched.alive):
                # In a thread: ending a server that hangs takes its time, and other servers go on meanwhile.
                await asyncio.to_thread(launched.start, same_port=attempt == 0)
            await self.client.close()
            self.client = self._connect()
            try:
                await self.client.wait_until_ready(lost=None if launched is None else launched.lost)
                break
            except ServerLost:
                # A free port was found, then somebody else took it: another one, unless the port is given.
                retry = launched is not None and launched.options.ports is None and launched.found_port_taken()
                if not retry or attempt == _PORT_TRIES - 1:
                    raise
        self.life += 1
        self.ready = True
        self.hung = asyncio.Event()

    async def settle(self) -> int:
        """Wait while the server is being brought back; returns the number of its life."""
        async with self.lock:
            return self.life

    async def watch(self) -> None:
        """Look at intervals whether a server that has requests still computes; mark it as hung where it does not."""
        while True:
            await asyncio.sleep(self._faults.health_interval)
            sign = self.hung  # of this life: the answer may come when another one has begun
            if self.in_flight and self.ready and not await self._computes():
                logger.warning("%s has not computed anything for %g s", self.url, self._faults.health_timeout)
                sign.set()

    async def _computes(self) -> bool:
        """Whether the server shows a sign of work within `health_timeout`.

        It gives up by itself after 20 s, which a server on a busy machine may take for a few tokens; so it is asked
        again until the time is over.
        """
        life, end = self.life, time.monotonic() + self._faults.health_timeout
        while (left := end - time.monotonic()) > 0:
            if self.life != life or await self.client.is_computing(left):
                return True
            await asyncio.sleep(_PAUSE_SECONDS)
        return False

    def _connect(self) -> ServerClient:
        return ServerClient(self.url, self._faults, self._connections, self._key)


class Fleet:
    """All servers of an engine; used inside one event loop.

    Args:
        policy: that the servers serve.
    """

    def __init__(self, options: ServerOptions, policy: Policy) -> None:
        self.options = options
        self.servers: list[Server] = []
        self._policy = policy
        self._weights: WeightSet | None = None
        self._kind = kind_of(options, policy)
        self._router: LaunchedRouter | None = None
        self._entrance: ServerClient | None = None
        self._watches: list[asyncio.Task[None]] = []

    async def start(self) -> ServerFacts:
        """Launch or attach; returns once all servers are ready and known to be the right ones.

        Returns:
            What holds for all of them together.

        Raises:
            ServerLost: one does not start.
            WrongServer: one is not what the policy needs, or they differ in what they sample.
        """
        faults, places = self.options.faults, self.options.concurrency
        if self.options.mode == "launch":
            kept = take_servers(self._kind, range(self.options.count))
            launched = [
                kept.get(number) or LaunchedServer(self.options, self._policy, number)
                for number in range(self.options.count)
            ]
            self.servers = [Server(faults, places, launched=one) for one in launched]
        else:
            key = self.options.api_key()
            self.servers = [Server(faults, places, url=url, key=key) for url in self.options.urls]
        await asyncio.gather(*(server.begin() for server in self.servers))
        facts = []
        for server in self.servers:
            server.facts = await inspect_server(server.client, self._policy)
            facts.append(server.facts)
        if self.options.router != "none":
            urls = [server.url for server in self.servers]
            self._router = await asyncio.to_thread(LaunchedRouter, self.options, urls)
            self._entrance = ServerClient(self._router.url, faults, places * len(urls))
            await self._entrance.wait_until_ready("/readiness", self._router.lost)
        self._watches = [asyncio.create_task(server.watch()) for server in self.servers]
        return combine_facts(facts)

    async def update_weights(self, weights: WeightSet, *, pause: bool) -> None:
        """Give all servers new weights.

        Args:
            pause: hold what is being sampled meanwhile; it goes on with the new weights.
        """
        self._weights = weights
        for server in self.servers:
            server.restarts = 0
        await asyncio.gather(*(self._update(server, pause=pause) for server in self.servers))

    def server_of(self, key: str) -> Server:
        """The server of a conversation."""
        return max(self.servers, key=lambda server: hashlib.blake2b(f"{key} {server.url}".encode()).digest())

    def entrance_of(self, server: Server) -> ServerClient:
        """Where requests for a server go in: at the router, where there is one."""
        return self._entrance or server.client

    def asked_with(self, server: Server) -> list[Server]:
        """Servers that may have a request for this one: behind a router all, because nobody knows which one has it."""
        return [server] if self._router is None else list(self.servers)

    async def settle(self, server: Server) -> int:
        """Wait while any server that may get a request for this one is brought back; returns the life of this one.

        A server that listens again may not have its weights yet, and a router does not know that.
        """
        lives = [(one, await one.settle()) for one in self.asked_with(server)]
        return next(life for one, life in lives if one is server)

    async def abort(self, rid: str, server: Server) -> None:
        """Have a server stop a request."""
        asked = [one.client.abort(rid) for one in self.asked_with(server)]
        for failed in await asyncio.gather(*asked, return_exceptions=True):
            if failed is not None and not isinstance(
                failed, ServerFault
            ):  # what is wrong with it, its response will show
                raise failed

    async def recover(self, server: Server, life: int, fault: ServerFault) -> None:
        """Do what a fault of a request asks for; afterwards it can be asked again.

        Behind a router nobody knows which server it was, so all are looked at.

        Args:
            life: of the server in which the fault was seen.

        Raises:
            EngineStopped: a server was lost more often than `faults.restarts` allows, or the router has ended.
        """
        if self._router is None:
            if isinstance(fault, ServerLost):
                await self._bring_back(server, life, fault)
            return
        for other in self.servers:
            life = await other.settle()
            if other.hung.is_set() or not await other.client.is_ready():
                await self._bring_back(other, life, fault)
        if (reason := self._router.lost()) is not None:
            raise EngineStopped(f"the router has ended: {reason}") from fault

    async def close(self) -> None:
        """Close connections; launched servers that run are kept for the next engine of this process."""
        for watch in self._watches:
            watch.cancel()
        for server in self.servers:
            await server.client.close()
        if self._entrance is not None:
            await self._entrance.close()
        if self._router is not None:
            await asyncio.to_thread(self._router.end)
        servers, self.servers = self.servers, []
        for server in servers:
            if server.launched is None:
                continue
            if server.ready and server.launched.alive and not server.hung.is_set():
                keep_servers(self._kind, [server.launched])
            else:
                await asyncio.to_thread(server.launched.end)

    async def _update(self, server: Server, *, pause: bool) -> None:
        try:
            async with server.lock:  # not while it is brought back, nor may anybody bring it back meanwhile
                life = server.life
                server.ready = False  # whoever fails here leaves a server that nobody may take over
                if pause:
                    await server.client.command("/pause_generation", {"mode": "retract"})
                await self._send(server)
                if pause:
                    await server.client.command("/continue_generation", {})
                server.ready = True
        except (ServerLost, BadResponse) as fault:
            await self._bring_back(server, life, fault)

    async def _bring_back(self, server: Server, life: int, fault: ServerFault) -> None:
        """Have a lost server ready again, with the current weights; nothing if a later life of it has begun."""
        async with server.lock:
            if server.life != life:
                return
            while True:
                server.restarts += 1
                self._check_restarts(server, fault)
                logger.warning("%s is lost and brought back (%d): %s", server.url, server.restarts, fault)
                await asyncio.sleep(pause_before(server.restarts - 1, self.options.faults))
                try:
                    await server.begin()
                    await self._restore(server)
                    return
                except (ServerLost, BadResponse, RequestRefused) as again:
                    fault = again

    async def _restore(self, server: Server) -> None:
        """Give a server that came back what it needs: an attached one may have kept its weights."""
        await inspect_server(server.client, self._policy)
        if server.launched is None:  # it may have been paused for an update that was broken off
            await server.client.command("/continue_generation", {})
            with suppress(RequestRefused):  # none has begun
                await server.client.command("/end_weight_update", {})
        if self._weights is not None and await weights_of(server.client) != self._weights.tag:
            await self._send(server)

    async def _send(self, server: Server) -> None:
        assert self._weights is not None
        assert server.facts is not None
        await send_weights(server.client, self._weights, server.facts.ranks, self.options)

    def _check_restarts(self, server: Server, fault: ServerFault) -> None:
        allowed = self.options.faults.restarts
        if server.restarts > allowed:
            log = "" if server.launched is None else f" Its log: {server.launched.log}."
            raise EngineStopped(
                f"{server.url} was lost {server.restarts} times since the last update of weights, "
                f"rollout.server.faults.restarts={allowed}: {fault}.{log} The same command continues from the last "
                "checkpoint."
            ) from fault


def combine_facts(facts: Sequence[ServerFacts]) -> ServerFacts:
    """What holds for all servers together: the narrowest limits.

    Raises:
        WrongServer: they run different software, or only some of them sample by seed.
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
    )


# Launched servers that no engine uses now; state of the process, as the servers themselves are.
_kept: dict[str, list[LaunchedServer]] = {}


def take_servers(key: str, numbers: Iterable[int]) -> dict[int, LaunchedServer]:
    """Kept servers of a kind that still run, by their numbers; they are the caller's now."""
    wanted, found, others = set(numbers), dict[int, LaunchedServer](), []
    for server in _kept.pop(key, []):
        if not server.alive:
            server.end()
        elif server.number in wanted - found.keys():
            found[server.number] = server
        else:
            others.append(server)
    if others:
        _kept[key] = others
    return found


def keep_servers(key: str, servers: Sequence[LaunchedServer]) -> None:
    """Keep servers for whoever asks for this kind next."""
    _kept.setdefault(key, []).extend(servers)


def end_servers() -> None:
    """End all that are kept."""
    for servers in list(_kept.values()):
        for server in servers:
            server.end()
    _kept.clear()


atexit.register(end_servers)
