"""An engine over the servers of another process's engine, which alone launches, updates and restarts them.

Rollout workers sample with it. A server that it finds lost is reported, and its requests wait until the other process
has brought the server back, with the weights that all responses are to be sampled with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from geo_sokoban_pipeline.config.server import ServerOptions
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.engines.sglang.client import ServerFault, ServerLost
from geo_sokoban_pipeline.rollout.engines.sglang.engine import SglangEngine
from geo_sokoban_pipeline.rollout.engines.sglang.servers import Fleet, Server, ServerPlace

# (number of a server, its life, what was seen) → where it is once it is back
Report = Callable[[int, int, str], "Future[ServerPlace]"]


class FollowingEngine(SglangEngine):
    """`RolloutEngine` over servers that another process keeps.

    Args:
        policy: its model may be empty.
        options: of servers that are there; their addresses are those of `places`.
        places: of these servers.
        report: tells the process that keeps them of a lost one.

    Raises:
        ServerLost, WrongServer: as `SglangEngine`.
    """

    def __init__(self, policy: Policy, options: ServerOptions, places: Sequence[ServerPlace], report: Report) -> None:
        self._places, self._report = places, report
        super().__init__(policy, options)

    def follow(self, tag: str, version: int, places: Sequence[ServerPlace]) -> None:
        """Note the weights that the servers have, and where they are."""
        self._loop.run(self._following.move_to(places))
        self.tag, self._versions[tag] = tag, version
        self.version = self._dispatcher.version = version

    def _make_fleet(self) -> Fleet:
        self._following = FollowingFleet(self._options, self.policy, self._places, self._report)
        return self._following


class FollowingFleet(Fleet):
    """Servers that another process keeps.

    Args:
        places: of these servers.
        report: see `FollowingEngine`.
    """

    def __init__(self, options: ServerOptions, policy: Policy, places: Sequence[ServerPlace], report: Report) -> None:
        super().__init__(options.model_copy(update={"urls": tuple(place.url for place in places)}), policy)
        self._places, self._report = list(places), report

    async def move_to(self, places: Sequence[ServerPlace]) -> None:
        """Take over where the servers are, unless a later life of one is known; no request is in flight."""
        for number, (server, place) in enumerate(zip(self.servers, places, strict=True)):
            if place.life > self._places[number].life:
                self._places[number] = place
                await server.move(place.url)

    async def _begin(self, server: Server) -> None:
        if await server.answers():
            await server.move(server.url)
        else:  # not noticed so far, and only the other process can bring it back
            await self._restart(server, ServerLost(f"{server.url} does not answer"))

    async def _restart(self, server: Server, fault: ServerFault) -> None:
        number = self.servers.index(server)
        life = self._places[number].life
        place = self._places[number] = await asyncio.wrap_future(self._report(number, life, str(fault)))
        await server.move(place.url)
