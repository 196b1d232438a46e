"""A member of a fleet: one server that is brought to life, watched, and brought back.

Each life has a number. A request remembers the life it was sent to, so that of many requests that notice the same
death, one brings the server back and the others wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import time

from geo_sokoban_pipeline.options.server import FaultOptions
from geo_sokoban_pipeline.rollout.engines.sglang.client import ServerClient
from geo_sokoban_pipeline.rollout.engines.sglang.faults import ServerLost
from geo_sokoban_pipeline.rollout.engines.sglang.launcher import LaunchedServer
from geo_sokoban_pipeline.rollout.engines.sglang.readiness import wait_until_ready

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
