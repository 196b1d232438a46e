"""Launched servers that are killed or hang: brought back with the current weights, nothing lost, or not taken over."""

from __future__ import annotations

import asyncio
import copy
import socket
from contextlib import closing
from pathlib import Path

import pytest

from geo_sokoban_pipeline.config.server import FaultOptions
from geo_sokoban_pipeline.rollout.engines.sglang import launcher
from geo_sokoban_pipeline.rollout.engines.sglang.client import ServerClient
from geo_sokoban_pipeline.rollout.engines.sglang.engine import SglangEngine
from rollout.engines.sglang.material import (
    ask,
    ask_directly,
    assert_sampled_by,
    jolt,
    kill,
    request_with,
    strike,
)
from servers import all_gone, launch_options, stop, tree

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("sglang")]
# On a machine that does other work too a server that lives may be taken for one that hangs; that costs a restart more.
FAULTS = {"health_interval": 2.0, "health_timeout": 12.0, "restarts": 6, "tries": 8}


def launched(policy, **changes):
    """An engine with two servers. The first one is that of the session; both stay for the tests below."""
    return closing(SglangEngine(policy, launch_options(count=2, faults=FAULTS, **changes)))


def lose_one(engine, policy, blow):
    """A server is lost while it samples; all responses come, of the current weights, and the server is back."""
    requests = [request_with(policy, [n], identity=n, max_new_tokens=600) for n in range(8)]
    urls, struck = engine.urls, engine.servers[0]
    life, processes = struck.life, tree(struck.launched.pid)
    assert len(processes) > 1  # the scheduler is a child of the server
    striker = strike(struck, struck.launched.pid, blow)
    responses = ask(engine, *requests)
    striker.join()
    assert all_gone(processes)
    assert set(responses) == set(range(8))
    for request in requests:
        assert responses[request.id].weight_version == engine.version
        assert_sampled_by(policy, request, responses[request.id])
    assert engine.urls == urls
    return life, struck


def assert_both_sample(engine, policy):
    """Each server by itself, past whatever shares the requests out."""
    request = request_with(policy, [1])
    assert len(set(engine.urls)) == 2
    for url in engine.urls:
        assert_sampled_by(policy, request, asyncio.run(_ask_directly(url, engine, request)))


async def _ask_directly(url, engine, request):
    client = ServerClient(url, FaultOptions(), 1)
    try:
        return await ask_directly(client, engine, request, "directly")
    finally:
        await client.close()


def test_a_server_whose_port_was_taken_and_one_that_is_killed(sglang_server, tiny_policy, monkeypatch):
    """The second server's port is free when it is looked for and taken when the server wants it: it gets another one.
    The first one is killed then; it alone is started again.
    """
    policy = copy.deepcopy(tiny_policy)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found, ports = launcher.find_ports, iter([[port]])
        monkeypatch.setattr(launcher, "find_ports", lambda host, count: next(ports, None) or found(host, count))
        monkeypatch.setattr(launcher, "is_free", lambda host, port: True)
        engines = launched(policy, update="group")
    with engines as engine:
        assert next(ports, None) is None and not engine.urls[1].endswith(f":{port}")
        jolt(policy, 1)
        engine.update_weights(None, 1)
        assert_both_sample(engine, policy)
        spared = engine.servers[1].life
        life, struck = lose_one(engine, policy, kill)
        assert engine.servers[1].life == spared
        jolt(policy, 2)
        engine.update_weights(None, 2)  # on the one that was killed, too, which is brought back for it at the latest
        assert struck.life > life
        assert_both_sample(engine, policy)


def test_a_server_behind_a_router_hangs(sglang_server, tiny_policy):
    """The router finds it again, and whoever asks through it need not know which of the servers behind it hangs."""
    policy = copy.deepcopy(tiny_policy)
    with launched(policy, router="sticky") as engine:
        jolt(policy, 1)
        engine.update_weights(None, 1)
        life, struck = lose_one(engine, policy, stop)
        assert struck.life > life


def test_the_next_engine_takes_over_servers_that_do_not_hang_since(sglang_server, tiny_policy):
    with launched(tiny_policy) as first:
        pids = [server.launched.pid for server in first.servers]
    # The processes of a server are forks: the system gives the heap of a new program another address.
    own = [process for process in tree(pids[0]) if "multiprocessing" not in " ".join(process.cmdline())]
    heaps = [heap_of(process.pid) for process in own]
    assert len(heaps) == 3 and len(set(heaps)) == 1
    hanging = tree(pids[1])
    stop(pids[1])
    with launched(tiny_policy) as second:
        assert all_gone(hanging)
        assert second.servers[0].launched.pid == pids[0]
        second.update_weights(None, 1)
        assert_both_sample(second, tiny_policy)


def heap_of(pid):
    """Address at which a process's heap begins."""
    lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    return next(line.partition("-")[0] for line in lines if line.endswith("[heap]"))
