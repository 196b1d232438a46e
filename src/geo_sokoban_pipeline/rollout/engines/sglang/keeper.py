"""Launched servers outlive engines: the next engine of this process that needs the same ones takes them over.

A run makes several engines (for validations of the warm start, the loop, the evaluation), and a server takes a minute
to start. What is kept ends with the process, or by `end_servers`.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterable, Sequence

from geo_sokoban_pipeline.rollout.engines.sglang.launcher import LaunchedServer

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
