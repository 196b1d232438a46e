"""SGLang's router in front of a real server: nothing of a request or a response is lost, and conversations keep their
server.
"""

from __future__ import annotations

import asyncio
import copy
from contextlib import closing

import numpy as np
import pytest

from geo_sokoban_pipeline.config.rollout import SamplingOptions
from geo_sokoban_pipeline.config.server import FaultOptions
from geo_sokoban_pipeline.policies.weights import WeightSource
from geo_sokoban_pipeline.rollout.engines.sglang.client import ServerClient
from geo_sokoban_pipeline.rollout.engines.sglang.engine import SglangEngine
from geo_sokoban_pipeline.rollout.engines.sglang.launcher import LaunchedRouter
from policies.library import library_log_probs
from proxies import proxied
from rollout.engines.sglang.material import ask, ask_directly, assert_sampled_by, jolt, request_with
from servers import attached, launch_options

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("sglang")]


def test_sampling_through_a_router(sglang_server, tiny_policy, player, make_tasks, play):
    """The ban of tokens above all, which the router does not pass on: the server has it from its launch."""
    mine = copy.deepcopy(player)
    with closing(SglangEngine(mine, launch_options(router="cache_aware"))) as engine:
        for version in (1, 2):
            jolt(mine, version)
            engine.update_weights(None, version)
            for episode in play(engine, mine, make_tasks(8, 1), SamplingOptions(temperature=0.9), turns=3):
                expected = library_log_probs(mine, episode, 0.9)
                np.testing.assert_allclose(episode.rollout_log_probs, expected, atol=1e-4)
                assert {span[0] for span in episode.weight_spans} == {version}
                assert not set(mine.banned_ids.tolist()) & set(episode.token_ids[episode.loss_mask == 1].tolist())
        # A policy that has learnt nothing repeats itself without an end.
        engine.update_weights(WeightSource.of_model(tiny_policy.model), 3)
        long = request_with(tiny_policy, [1], SamplingOptions(greedy=True), max_new_tokens=3000)
        engine.submit([long, request_with(tiny_policy, [1], identity=1, max_new_tokens=1)])
        assert [result.id for result in engine.poll()] == [1]  # by now the long one has arrived, too
        engine.abort([0])
        (aborted,) = engine.poll()
        assert aborted.finish_reason == "abort" and len(aborted.token_ids) < 3000
        request = request_with(tiny_policy, [2, 3])
        assert_sampled_by(tiny_policy, request, ask(engine, request)[0])


def test_a_conversation_keeps_its_server(sglang_server, tiny_policy):
    """Two doors to the same server stand for two servers; each notes who comes in."""
    with (
        proxied(sglang_server) as one,
        proxied(sglang_server) as other,
        attached(tiny_policy, sglang_server) as engine,
    ):
        router = LaunchedRouter(launch_options(router="sticky"), [one.url, other.url])
        try:
            doors = asyncio.run(_knock(router, engine, (one, other)))
        finally:
            router.end()
    assert {door for came in doors for door in came} == {0, 1}
    assert [len(came) for came in doors] == [1] * len(doors), doors


async def _knock(router, engine, proxies):
    """Through which doors each of eight conversations came, over three turns."""
    client = ServerClient(router.url, FaultOptions(), 8)
    try:
        await client.wait_until_ready("/readiness", router.lost)
        doors = [set() for _ in range(8)]
        for turn in range(3):
            for number in range(8):
                request = request_with(engine.policy, [turn], max_new_tokens=1)
                before = [proxy.seen.count("/generate") for proxy in proxies]
                await ask_directly(client, engine, request, f"conversation-{number}")
                after = [proxy.seen.count("/generate") for proxy in proxies]
                doors[number] |= {door for door in range(2) if after[door] > before[door]}
        return doors
    finally:
        await client.close()
