"""Launched servers outlive engines: the next engine of this process that needs the same ones takes them over.

A run makes several engines (for validations of the warm start, the loop, the evaluation), and a server takes a minute
to start. What is kept ends with the process, or by `end_servers`.
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
    BadReply,
    EngineStopped,
    RequestRefused,
    ServerClient,
    ServerFacts,
    ServerFault,
    ServerLost,
    WrongServer,
    inspect_server,
    pause_before,
)
from geo_sokoban_pipeline.rollout.engines.sglang.launcher import (
    LaunchedRouter,
    LaunchedServer,
    kind_of,
    wait_until_ready,
)
from geo_sokoban_pipeline.rollout.engines.sglang.weights import WeightSet, send_weights, weights_of

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

# A member of a fleet: one server that is brought to life, watched, and brought back.


logger = logging.getLogger(__name__)
_PORT_TRIES = 3
_PAUSE_SECONDS = 1.0


class Member:
    """One server.

    Args:
        launched: that this process starts; None: the server at `url` is somebody else's.
        url: of a server that is somebody else's.
        key: that such a server asks for; None: it asks for none.
    """

    def __init__(
        self,
        faults: FaultOptions,
        connections: int,
        launched: LaunchedServer | None = None,
        url: str = "",
        key: str | None = None,
    ) -> None:
        self.faults = faults
        self.launched = launched
        self.life = 0
        self.restarts = 0
        self.in_flight = 0
        self.ready = False
        self.lock = asyncio.Lock()
        self.hung = asyncio.Event()
        self.places = asyncio.Semaphore(connections)
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
        for attempt in range(_PORT_TRIES):
            try:
                await self._begin(same_port=attempt == 0)
                break
            except ServerLost:
                launched = self.launched
                # A free port was found, then somebody else took it: another one, unless the port is given.
                retry = launched is not None and launched.options.ports is None and launched.found_port_taken()
                if not retry or attempt == _PORT_TRIES - 1:
                    raise
        self.life += 1
        self.ready = True
        self.hung = asyncio.Event()

    def _connect(self) -> ServerClient:
        return ServerClient(self.url, self.faults, self._connections, self._key)

    async def settle(self) -> int:
        """Wait while the server is being brought back; returns the number of its life."""
        async with self.lock:
            return self.life

    async def watch(self) -> None:
        """Look at intervals whether a server that has requests still computes; mark it as hung where it does not."""
        while True:
            await asyncio.sleep(self.faults.health_interval)
            sign = self.hung  # of this life: the answer may come when another one has begun
            if self.in_flight and self.ready and not await self._computes():
                logger.warning("%s has not computed anything for %g s", self.url, self.faults.health_timeout)
                sign.set()

    async def _computes(self) -> bool:
        """Whether the server shows a sign of work within `health_timeout`.

        It gives up by itself after 20 s, which a server on a busy machine may take for a few tokens; so it is asked
        again until the time is over.
        """
        life, end = self.life, time.monotonic() + self.faults.health_timeout
        while (left := end - time.monotonic()) > 0:
            if self.life != life or await self.client.is_computing(left):
                return True
            await asyncio.sleep(_PAUSE_SECONDS)
        return False

    async def _begin(self, *, same_port: bool) -> None:
        self.ready = False
        if self.launched is not None and not (self.life == 0 and self.launched.alive):
            # In a thread: ending a server that hangs takes its time, and other servers go on meanwhile.
            await asyncio.to_thread(self.launched.start, same_port=same_port)
        await self.client.close()
        self.client = self._connect()
        lost = None if self.launched is None else self.launched.lost
        await wait_until_ready(self.client, "/ready", self.faults.start_timeout, lost)


# The servers of an engine: every one has the current weights before it gets a request, after a restart too.


class Fleet:
    """All servers of an engine; used inside one event loop.

    Args:
        policy: that the servers serve.
    """

    def __init__(self, options: ServerOptions, policy: Policy) -> None:
        self.options = options
        self.facts: list[ServerFacts] = []
        self.members: list[Member] = []
        self._policy = policy
        self._weights: WeightSet | None = None
        self._kind = kind_of(options, policy)
        self._router: LaunchedRouter | None = None
        self._entrance: ServerClient | None = None
        self._watches: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Launch or attach; returns once all servers are ready and known to be the right ones.

        Raises:
            ServerLost: one does not start.
            WrongServer: one is not what the policy needs.
        """
        self.members = [self._member(launched) for launched in self._launch()] if self._launches else self._attach()
        await asyncio.gather(*(member.begin() for member in self.members))
        self.facts = [await inspect_server(member.client, self._policy) for member in self.members]
        if self.options.router != "none":
            await self._start_router()
        self._watches = [asyncio.create_task(member.watch()) for member in self.members]

    async def renew(self, weights: WeightSet, *, pause: bool) -> None:
        """Give all servers new weights.

        Args:
            pause: hold what is being sampled meanwhile; it goes on with the new weights.
        """
        self._weights = weights
        for member in self.members:
            member.restarts = 0
        await asyncio.gather(*(self._renew(member, pause=pause) for member in self.members))

    def member_of(self, key: str) -> Member:
        """The server of a conversation."""
        return max(self.members, key=lambda member: hashlib.blake2b(f"{key} {member.url}".encode()).digest())

    def entrance_of(self, member: Member) -> ServerClient:
        """Where requests for a server go in: at the router, where there is one."""
        return self._entrance or member.client

    async def bring_back(self, member: Member, life: int, fault: ServerFault) -> None:
        """Have a lost server ready again, with the current weights.

        Args:
            life: of the server in which the fault was seen; a later one has been brought back already.

        Raises:
            EngineStopped: it was lost more often than `faults.restarts` allows.
        """
        async with member.lock:
            if member.life != life:
                return
            while True:
                self._count(member, fault)
                logger.warning("%s is lost and brought back (%d): %s", member.url, member.restarts, fault)
                await asyncio.sleep(pause_before(member.restarts - 1, self.options.faults))
                try:
                    await member.begin()
                    await self._restore(member)
                    return
                except (ServerLost, BadReply, RequestRefused) as again:
                    fault = again

    def asked_with(self, member: Member) -> list[Member]:
        """Servers that may have a request for this one: behind a router all, because nobody knows which one has it."""
        return [member] if self._router is None else list(self.members)

    async def settle(self, member: Member) -> int:
        """Wait while any server that may get a request for this one is brought back; returns the life of this one.

        A server that listens again may not have its weights yet, and a router does not know that.
        """
        lives = [(one, await one.settle()) for one in self.asked_with(member)]
        return next(life for one, life in lives if one is member)

    async def abort(self, rid: str, member: Member) -> None:
        """Have a server stop a request."""
        asked = [other.client.abort(rid) for other in self.asked_with(member)]
        for failed in await asyncio.gather(*asked, return_exceptions=True):
            if failed is not None and not isinstance(failed, ServerFault):  # what is wrong with it, its reply will show
                raise failed

    async def close(self) -> None:
        """Close connections; launched servers that run are kept for the next engine of this process."""
        for watch in self._watches:
            watch.cancel()
        for member in self.members:
            await member.client.close()
        if self._entrance is not None:
            await self._entrance.close()
        if self._router is not None:
            await asyncio.to_thread(self._router.end)
        if self.members and self._launches:
            await asyncio.to_thread(self._let_go)
        self.members = []

    async def recover(self, member: Member, life: int, fault: ServerFault) -> None:
        """Do what a fault of a request asks for; afterwards it can be asked again.

        Behind a router nobody knows which server it was, so all are looked at.
        """
        if self._router is None:
            if isinstance(fault, ServerLost):
                await self.bring_back(member, life, fault)
            return
        for other in self.members:
            life = await other.settle()
            if other.hung.is_set() or not await other.client.is_ready():
                await self.bring_back(other, life, fault)
        if (reason := self._router.lost()) is not None:
            raise EngineStopped(f"the router has ended: {reason}") from fault

    def _let_go(self) -> None:
        healthy = []
        for member in self.members:
            assert member.launched is not None
            if member.ready and member.launched.alive and not member.hung.is_set():
                healthy.append(member.launched)
            else:
                member.launched.end()
        keep_servers(self._kind, healthy)

    @property
    def _launches(self) -> bool:
        return self.options.mode == "launch"

    def _launch(self) -> list[LaunchedServer]:
        kept = take_servers(self._kind, range(self.options.count))
        return [
            kept.get(number) or LaunchedServer(self.options, self._policy, number)
            for number in range(self.options.count)
        ]

    def _member(self, launched: LaunchedServer) -> Member:
        return Member(self.options.faults, self.options.concurrency, launched=launched)

    def _attach(self) -> list[Member]:
        key = self.options.api_key()
        return [Member(self.options.faults, self.options.concurrency, url=url, key=key) for url in self.options.urls]

    async def _start_router(self) -> None:
        self._router = await asyncio.to_thread(LaunchedRouter, self.options, [member.url for member in self.members])
        everyone = self.options.concurrency * len(self.members)
        self._entrance = ServerClient(self._router.url, self.options.faults, everyone)
        await wait_until_ready(self._entrance, "/readiness", self.options.faults.start_timeout, self._router.lost)

    async def _renew(self, member: Member, *, pause: bool) -> None:
        try:
            async with member.lock:  # not while it is brought back, nor may anybody bring it back meanwhile
                life = member.life
                member.ready = False  # whoever fails here leaves a server that nobody may take over
                if pause:
                    await member.client.command("/pause_generation", {"mode": "retract"})
                await self._send(member)
                if pause:
                    await member.client.command("/continue_generation", {})
                member.ready = True
        except (ServerLost, BadReply) as fault:
            await self.bring_back(member, life, fault)

    async def _restore(self, member: Member) -> None:
        """Give a server that came back what it needs: an attached one may have kept its weights."""
        await inspect_server(member.client, self._policy)
        if member.launched is None:  # it may have been paused for an update that was broken off
            await member.client.command("/continue_generation", {})
            with suppress(RequestRefused):  # none has begun
                await member.client.command("/end_weight_update", {})
        if self._weights is not None and await weights_of(member.client) != self._weights.tag:
            await self._send(member)

    async def _send(self, member: Member) -> None:
        assert self._weights is not None
        ranks = self.facts[self.members.index(member)].ranks
        await send_weights(member.client, self._weights, ranks, self.options)

    def _count(self, member: Member, fault: ServerFault) -> None:
        member.restarts += 1
        allowed = self.options.faults.restarts
        if member.restarts > allowed:
            log = "" if member.launched is None else f" Its log: {member.launched.log}."
            raise EngineStopped(
                f"{member.url} was lost {member.restarts} times since the last update of weights, "
                f"rollout.server.faults.restarts={allowed}: {fault}.{log} The same command continues from the last "
                "checkpoint."
            ) from fault


def check_alike(facts: Sequence[ServerFacts]) -> ServerFacts:
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
