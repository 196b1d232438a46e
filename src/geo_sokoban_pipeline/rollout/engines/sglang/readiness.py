"""Waiting for a server: until it takes requests, its process ends, or the time is over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from geo_sokoban_pipeline.rollout.engines.sglang.client import ServerClient
from geo_sokoban_pipeline.rollout.engines.sglang.faults import ServerLost

_POLL_SECONDS = 0.5


async def wait_until_ready(
    client: ServerClient, path: str, seconds: float, lost: Callable[[], str | None] | None
) -> None:
    """Wait until a server answers at a path with 200.

    Args:
        lost: says why the server's process is gone, None while it runs; None: it is somebody else's.

    Raises:
        ServerLost: its process has ended, or the time is over.
    """
    began = time.monotonic()
    while not await client.is_ready(path):
        reason = None if lost is None else lost()
        if reason is not None:
            raise ServerLost(f"{client.url} ended while it started: {reason}")
        if time.monotonic() - began > seconds:
            raise ServerLost(
                f"{client.url} was not ready within rollout.server.faults.start_timeout={seconds:g} s. See its log, "
                "or give it more time."
            )
        await asyncio.sleep(_POLL_SECONDS)
