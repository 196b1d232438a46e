"""Servers that Ray places: why one does not start, whose GPUs it has, and that a late answer holds up no other."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from geo_sokoban_pipeline.config.ray import RayOptions
from geo_sokoban_pipeline.config.server import FaultOptions, ServerOptions
from geo_sokoban_pipeline.distributed.ray_process import ActorPlace
from geo_sokoban_pipeline.distributed.ray_servers import ray_launcher, shared_ranks
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.engines.sglang.client import ServerClient, ServerLost
from geo_sokoban_pipeline.rollout.engines.sglang.engine import SglangEngine
from ray_cluster import RayCluster, joined
from servers import launch_options

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ranks")]

PLACING = RayOptions(cpus=0.5, patience=60)


@pytest.mark.slow
def test_a_server_that_cannot_start_on_its_node_says_why(ray_cluster: RayCluster, tiny_policy: Policy) -> None:
    options = launch_options(python="/no/such/python")
    said = r"(?s)server 1 of 1 on [\d.]+: .*/no/such/python: no such interpreter"
    with joined(ray_cluster, PLACING):
        with ray_launcher(PLACING) as launcher, pytest.raises(ServerLost, match=said):
            SglangEngine(tiny_policy, options, launcher)
        assert ray_cluster.ranks_left() == []


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
