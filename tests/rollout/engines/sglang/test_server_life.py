"""Launched servers that are killed or hang while they sample: brought back with the current weights, nothing lost."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time

import pytest

from geo_sokoban_pipeline.rollout.engines.sglang.engine import SglangEngine
from rollout.engines.sglang.material import ask, assert_sampled_by, jolt, request_with
from servers import all_gone, launch_options, stop, tree

pytestmark = pytest.mark.slow
# On a machine that does other work too a server that lives may be taken for one that hangs; that costs a restart more.
FAULTS = {"health_interval": 2.0, "health_timeout": 60.0, "grace": 3.0, "restarts": 6, "tries": 8}


def strike(pid, how):
    """Hit a server shortly after this call, while it samples."""

    def wait_and_strike():
        time.sleep(1.0)
        stop(pid) if how == "hang" else os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=wait_and_strike)
    thread.start()
    return thread


@pytest.mark.parametrize(("how", "router"), [("kill", "none"), ("hang", "sticky")])
def test_a_server_is_brought_back(sglang_server, tiny_policy, how, router):
    """One server through all its lives, because each start takes its time; the router, too, finds it again."""
    policy = copy.deepcopy(tiny_policy)
    engine = SglangEngine(policy, launch_options(router=router, faults=FAULTS))
    try:
        jolt(policy, 1)
        engine.update_weights(None, 1)
        requests = [request_with(policy, [n], identity=n, max_new_tokens=600) for n in range(8)]
        (member,) = engine._fleet.members
        life = member.life
        processes = tree(member.launched.pid)
        assert len(processes) > 1  # the scheduler is a child of the server
        striker = strike(member.launched.pid, how)
        replies = ask(engine, *requests)
        striker.join()
        assert member.life > life
        assert all_gone(processes)
        assert set(replies) == set(range(8))
        for request in requests:
            assert replies[request.id].weight_version == 1
            assert_sampled_by(policy, request, replies[request.id])
        assert engine.urls == [member.url]
    finally:
        engine.close()


def test_the_next_engine_takes_the_server_over(sglang_server, tiny_policy):
    first = SglangEngine(tiny_policy, launch_options())
    pids = [member.launched.pid for member in first._fleet.members]
    first.close()
    second = SglangEngine(tiny_policy, launch_options())
    assert [member.launched.pid for member in second._fleet.members] == pids
    second.close()
