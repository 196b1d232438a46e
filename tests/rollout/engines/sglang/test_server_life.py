"""Launched servers that are killed or hang while they sample: brought back with the current weights, nothing lost."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path

import pytest

from geo_sokoban_pipeline.config.server import FaultOptions
from geo_sokoban_pipeline.rollout.engines.sglang.client import ServerClient
from geo_sokoban_pipeline.rollout.engines.sglang.engine import SglangEngine
from geo_sokoban_pipeline.rollout.engines.sglang.wire import read_response, write_request
from rollout.engines.sglang.material import ask, assert_sampled_by, jolt, kill, request_with, strike
from servers import all_gone, launch_options, stop, tree

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("sglang")]
# On a machine that does other work too a server that lives may be taken for one that hangs; that costs a restart more.
FAULTS = {"health_interval": 2.0, "health_timeout": 30.0, "restarts": 6, "tries": 8}


@pytest.mark.parametrize(("how", "router", "count"), [("kill", "none", 1), ("hang", "sticky", 2)])
def test_a_server_is_brought_back(sglang_server, tiny_policy, how, router, count):
    """The same server through all its lives, because each start takes its time; the router, too, finds it again, and
    whoever asks through it need not know which of the servers behind it hangs.
    """
    policy = copy.deepcopy(tiny_policy)
    engine = SglangEngine(policy, launch_options(router=router, count=count, faults=FAULTS))
    try:
        jolt(policy, 1)
        engine.update_weights(None, 1)
        requests = [request_with(policy, [n], identity=n, max_new_tokens=600) for n in range(8)]
        urls, member = engine.urls, engine.servers[0]
        life = member.life
        processes = tree(member.launched.pid)
        assert len(processes) > 1  # the scheduler is a child of the server
        striker = strike(member, member.launched.pid, stop if how == "hang" else kill)
        responses = ask(engine, *requests)
        striker.join()
        assert member.life > life
        assert all_gone(processes)
        assert set(responses) == set(range(8))
        for request in requests:
            assert responses[request.id].weight_version == 1
            assert_sampled_by(policy, request, responses[request.id])
        assert engine.urls == urls and len(urls) == count
    finally:
        engine.close()


def test_the_next_engine_takes_the_server_over(sglang_server, tiny_policy):
    first = SglangEngine(tiny_policy, launch_options())
    pids = [member.launched.pid for member in first.servers]
    first.close()
    second = SglangEngine(tiny_policy, launch_options())
    assert [member.launched.pid for member in second.servers] == pids
    second.close()
    # Its processes are forks: the system gives the heap of a new program another address.
    own = [process for process in tree(pids[0]) if "multiprocessing" not in " ".join(process.cmdline())]
    heaps = [heap_of(process.pid) for process in own]
    assert len(heaps) == 3 and len(set(heaps)) == 1


def heap_of(pid):
    """Address at which a process's heap begins."""
    lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    return next(line.partition("-")[0] for line in lines if line.endswith("[heap]"))


def test_several_servers_have_the_same_weights_and_stand_in_for_each_other(sglang_server, tiny_policy):
    policy = copy.deepcopy(tiny_policy)
    engine = SglangEngine(policy, launch_options(count=2, update="group", faults=FAULTS))
    try:
        jolt(policy, 1)
        engine.update_weights(None, 1)
        assert len(set(engine.urls)) == 2
        for url in engine.urls:
            request = request_with(policy, [1])
            assert_sampled_by(policy, request, asyncio.run(_ask_directly(url, engine, request)))
        requests = [request_with(policy, [n], identity=n, max_new_tokens=600) for n in range(8)]
        struck, spared = engine.servers
        lives = struck.life, spared.life
        striker = strike(struck, struck.launched.pid)
        responses = ask(engine, *requests)
        striker.join()
        assert spared.life == lives[1]
        for request in requests:
            assert responses[request.id].weight_version == 1
            assert_sampled_by(policy, request, responses[request.id])
        jolt(policy, 2)
        engine.update_weights(None, 2)  # on the one that was killed, too, which is brought back for it at the latest
        assert struck.life > lives[0]
        for url in engine.urls:
            request = request_with(policy, [2])
            assert_sampled_by(policy, request, asyncio.run(_ask_directly(url, engine, request)))
    finally:
        engine.close()


def test_a_server_that_hangs_since_is_not_taken_over(sglang_server, tiny_policy):
    options = launch_options(faults={**FAULTS, "health_timeout": 5.0})
    first = SglangEngine(tiny_policy, options)
    pid = first.servers[0].launched.pid
    processes = tree(pid)
    first.close()
    stop(pid)
    second = SglangEngine(tiny_policy, options)
    try:
        assert all_gone(processes)
        request = request_with(tiny_policy, [1])
        second.update_weights(None, 1)
        assert_sampled_by(tiny_policy, request, ask(second, request)[request.id])
    finally:
        second.close()


async def _ask_directly(url, engine, request):
    """The response of one server, past whatever shares the requests out."""
    client = ServerClient(url, FaultOptions(), 1)
    try:
        body = write_request(request, engine.limits, "directly", bias=engine.limits.bias)
        return read_response(await client.generate(body, "directly"), request, engine.limits)
    finally:
        await client.close()
