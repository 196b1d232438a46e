"""Launched servers outlive engines: the next engine of this process that needs the same ones takes them over.

A run makes several engines (for validations of the warm start, the loop, the evaluation), and a server takes a minute
to start. What is kept ends with the process, or by `end_servers`.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence

from geo_sokoban_pipeline.rollout.engines.sglang.launcher import LaunchedServer

_kept: dict[str, list[LaunchedServer]] = {}


def take_servers(key: str, count: int) -> list[LaunchedServer]:
    """Kept servers of a kind that still run, `count` at most; they are the caller's now."""
    found = []
    for server in _kept.pop(key, []):
        if server.alive:
            found.append(server)
        else:
            server.end()
    if len(found) > count:
        _kept[key] = found[count:]
    return found[:count]


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
