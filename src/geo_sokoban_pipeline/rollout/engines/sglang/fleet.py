"""The servers of an engine: every one has the current weights before it gets a request, after a restart too.

Whoever needs a server asks for it by the key of its conversation, and waits while it is brought back. A conversation
keeps its server (highest random weight, so that the loss of one moves nobody else's conversations), because that is
where its past is cached.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from contextlib import suppress

from geo_sokoban_pipeline.options.server import ServerOptions
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.engines.sglang.client import ServerClient
from geo_sokoban_pipeline.rollout.engines.sglang.faults import (
    BadReply,
    EngineStopped,
    RequestRefused,
    ServerFault,
    ServerLost,
    WrongServer,
    pause_before,
)
from geo_sokoban_pipeline.rollout.engines.sglang.identity import ServerFacts, inspect_server
from geo_sokoban_pipeline.rollout.engines.sglang.keeper import keep_servers, take_servers
from geo_sokoban_pipeline.rollout.engines.sglang.launcher import LaunchedRouter, LaunchedServer, kind_of
from geo_sokoban_pipeline.rollout.engines.sglang.member import Member
from geo_sokoban_pipeline.rollout.engines.sglang.readiness import wait_until_ready
from geo_sokoban_pipeline.rollout.engines.sglang.weights import WeightSet, send_weights, weights_of

logger = logging.getLogger(__name__)


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
