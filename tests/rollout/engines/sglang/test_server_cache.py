"""Many conversations at once: what a conversation has paid for is not paid again."""

from __future__ import annotations

import numpy as np
import pytest

from geo_sokoban_pipeline.config.rollout import SamplingOptions
from proxies import proxied
from rollout.engines.sglang.material import ask, request_with
from servers import attached

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("sglang")]
EPISODES = 64


class Listener:
    """An engine that remembers, per conversation, the length of each prompt, of its response, and what was cached."""

    def __init__(self, engine):
        self.engine = engine
        self.turns = {}

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def submit(self, requests):
        for request in requests:
            self.turns.setdefault(request.id, []).append([len(request.token_ids)])
        self.engine.submit(requests)

    def poll(self):
        results = self.engine.poll()
        for result in results:
            self.turns[result.id][-1] += [len(result.token_ids), self.engine.cached_tokens[result.id]]
        return results


def test_later_turns_are_read_on_from_the_cache(sglang_server, player, make_tasks, play):
    """`cached_tokens` is at least 95 % of the prompt and response before, from the second turn on, for 64 at once."""
    tasks = make_tasks(EPISODES, 1)
    with attached(player, sglang_server, concurrency=EPISODES) as engine:
        listener = Listener(engine)
        episodes = play(listener, player, tasks, SamplingOptions(temperature=0.7), turns=6)
    assert len(episodes) == EPISODES
    pairs = [
        (cached, before[0] + before[1])
        for turns in listener.turns.values()
        for before, (_, _, cached) in zip(turns, turns[1:], strict=False)
    ]
    assert len(pairs) > EPISODES
    shares = np.array([cached / past for cached, past in pairs])
    assert shares.min() >= 0.95, sorted(shares)[:5]


def test_requests_beyond_the_bound_wait(sglang_server, tiny_policy):
    requests = [request_with(tiny_policy, 1, identity=identity) for identity in range(7)]
    with proxied(sglang_server) as proxy, attached(tiny_policy, proxy.url, concurrency=3) as engine:
        assert set(ask(engine, *requests)) == set(range(7))
        assert proxy.most == 3
