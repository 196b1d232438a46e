"""Servers that Ray places: they sample with what they are sent, whoever of them dies, and none outlives its run."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psutil
import pytest

from geo_sokoban_pipeline.config.ray import RayOptions
from geo_sokoban_pipeline.config.server import FaultOptions, ServerOptions
from geo_sokoban_pipeline.distributed.ray_actors import ActorPlace
from geo_sokoban_pipeline.distributed.ray_placement import connected
from geo_sokoban_pipeline.distributed.ray_servers import RayServers, shared_ranks
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.engines.sglang.client import ServerClient, ServerLost
from geo_sokoban_pipeline.rollout.engines.sglang.engine import SglangEngine
from ray_cluster import RayCluster, is_rank, is_server, own_address, processes_of
from rollout.engines.sglang.material import ask, assert_sampled_by, jolt, request_with, strike
from servers import all_gone, launch_options, need_environment, tree

PLACING = RayOptions(cpus=0.5, patience=60)
FAULTS = {"health_interval": 5.0, "health_timeout": 60.0, "grace": 3.0, "restarts": 6, "tries": 8}


def host_of(pid: int) -> psutil.Process:
    """The actor of a server: the process above its supervisor."""
    supervisor = psutil.Process(pid).parent()
    assert supervisor is not None
    actor = supervisor.parent()
    assert actor is not None and is_rank(actor)
    return actor


@pytest.fixture
def joined(ray_cluster: RayCluster) -> Iterator[RayCluster]:
    """A cluster that this process has joined as a driver."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ray_cluster.environment.items():
            patch.setenv(name, value)
        with connected(PLACING, 1):
            yield ray_cluster


@pytest.mark.slow
def test_a_server_that_is_killed_with_its_actor_in_a_response_is_brought_back(
    joined: RayCluster, tiny_policy: Policy
) -> None:
    """It begins with arbitrary weights, so that none of its responses could come from another source than an update.

    `test_ray_gpus.py` starts one again in an actor that lives.
    """
    need_environment()
    policy = copy.deepcopy(tiny_policy)
    options = launch_options(faults=FAULTS)
    with closing(RayServers(PLACING)) as servers:
        engine = SglangEngine(policy, options, servers.launcher)
        (server,) = engine.servers
        assert server.launched is not None
        assert server.url.startswith(f"http://{own_address()}:"), "the other nodes reach it"
        whole: list[psutil.Process] = []
        for version, is_killed in enumerate((False, True), start=1):
            jolt(policy, version)
            engine.update_weights(None, version)
            requests = [request_with(policy, [n], identity=n, max_new_tokens=300) for n in range(2)]
            if is_killed:
                actor = host_of(server.launched.pid)
                life, whole = server.life, actor.children(recursive=True)
                striker = strike(server, actor.pid)
            responses = ask(engine, *requests)
            for request in requests:
                assert responses[request.id].weight_version == version
                assert_sampled_by(policy, request, responses[request.id])
            if is_killed:
                striker.join()
                assert server.life > life
                assert len(whole) > 1 and all_gone(whole, 60)
        pid = server.launched.pid
        engine.close()
        second = SglangEngine(policy, options, servers.launcher)
        assert [one.launched.pid for one in second.servers if one.launched is not None] == [pid], "it was idle"
        whole = tree(pid)
        second.close()
    assert all_gone(whole)
    assert joined.ranks_left() == []
    assert not [process for node in joined.nodes for process in processes_of(node) if is_server(process)]


@pytest.mark.slow
def test_a_server_that_cannot_start_on_its_node_says_why(joined: RayCluster, tiny_policy: Policy) -> None:
    options = launch_options(python="/no/such/python")
    said = r"(?s)server 1 of 1 on [\d.]+: .*/no/such/python: no such interpreter"
    with closing(RayServers(PLACING)) as servers, pytest.raises(ServerLost, match=said):
        SglangEngine(tiny_policy, options, servers.launcher)
    assert joined.ranks_left() == []


def test_a_late_answer_of_an_actor_holds_up_no_other_server() -> None:
    def lost() -> str:
        time.sleep(0.5)
        return "its node is gone"

    async def count_turns() -> int:
        client, turns = ServerClient("http://127.0.0.1:1", FaultOptions(), 1), 0
        waiting = asyncio.create_task(client.wait_until_ready(lost=lost))
        while not waiting.done():
            await asyncio.sleep(0.01)
            turns += 1
        await client.close()
        with pytest.raises(ServerLost, match="ended while it started: its node is gone"):
            await waiting
        return turns

    assert asyncio.run(count_turns()) > 10


def places(*nodes: str) -> list[ActorPlace]:
    return [ActorPlace(node, f"10.0.0.{node}", 1, "/scratch", (str(gpu),)) for gpu, node in enumerate(nodes)]


@pytest.mark.parametrize(
    ("nodes", "size", "shared"),
    [
        ("aaaa", 1, ["0", "1", "2", "3"]),
        ("aaaa", 2, ["01", "23"]),
        ("aabb", 2, ["01", "23"]),
        ("aaab", 2, ["01", None]),
        ("aabb", 4, [None]),
    ],
)
def test_a_server_has_the_gpus_of_neighbouring_ranks_of_one_node(nodes: str, size: int, shared: list[Any]) -> None:
    options = ServerOptions.model_validate({"count": len(shared), "tensor_parallel": size, "colocated": True})
    for number, expected in enumerate(shared):
        if expected is None:
            with pytest.raises(ServerLost, match=f"tensor_parallel={size} with colocated=true: .*are on the nodes"):
                shared_ranks(places(*nodes), options, number)
        else:
            chosen = shared_ranks(places(*nodes), options, number)
            assert "".join(gpu for place in chosen for gpu in place.gpus) == expected
