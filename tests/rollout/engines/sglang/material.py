"""Requests that the tests of a real server make, and what their responses must be."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import torch

from geo_sokoban_pipeline.config.rollout import SamplingOptions
from geo_sokoban_pipeline.envs.sokoban import Board
from geo_sokoban_pipeline.envs.sokoban.drawing import render_observation
from geo_sokoban_pipeline.rollout.engines.base import Request
from geo_sokoban_pipeline.rollout.engines.sglang.wire import read_response, write_request
from policies.library import library_logits

TOLERANCE = 1e-4  # the bar; measured differences are below 1e-5
BOARDS = [
    f"#####\n#{row}#\n#{other}#\n#####\n#####\n#####"
    for row in ("@$.", ".$@", "$@.", "@ *")
    for other in ("   ", "  #", " # ", "#  ")
]


def image(policy, number):
    """Image `number` of sixteen."""
    return policy.reader.read(render_observation(Board.from_text(BOARDS[number]), 16))


def request_with(policy, chosen, sampling=None, identity=0, max_new_tokens=12, seed=7):
    """One conversation: a message with these images, or with the first so many."""
    numbers = range(chosen) if isinstance(chosen, int) else chosen
    images = [image(policy, number) for number in numbers]
    content = [item for n in numbers for item in ({"type": "image"}, {"type": "text", "text": f"Board {n}"})]
    ids = policy.codec.encode_prompt([{"role": "user", "content": content}], [encoded.grid for encoded in images])
    return Request(identity, ids, images, sampling or SamplingOptions(), max_new_tokens, seed)


def ask(engine, *requests):
    """Responses, by conversation."""
    engine.submit(requests)
    responses = {}
    while results := engine.poll():
        responses |= {result.id: result for result in results}
    return responses


async def ask_directly(client, engine, request, name):
    """The response of a server to a request of this name, past the engine."""
    body = write_request(request, engine.limits, name)
    return read_response(await client.generate(body, name), request, engine.limits)


def kill(pid):
    """SIGKILL."""
    os.kill(pid, signal.SIGKILL)


def strike(server, pid, blow=kill):
    """Hit a process of a server as soon as it samples; the thread that does."""

    def wait_and_strike():
        while not server.in_flight:
            time.sleep(0.01)
        time.sleep(0.1)
        blow(pid)

    thread = threading.Thread(target=wait_and_strike, daemon=True)
    thread.start()
    return thread


def expected_log_probs(policy, request, result):
    """Log-probs of a response by the library's own forward pass."""
    ids = np.concatenate([request.token_ids, result.token_ids])
    logits = library_logits(policy, ids, request.images)[len(request.token_ids) - 1 : -1].float()
    logits[:, policy.banned_ids] = -torch.inf
    scale = 1.0 if request.sampling.greedy else request.sampling.temperature
    chosen = torch.from_numpy(result.token_ids.astype(np.int64))[:, None]
    return torch.log_softmax(logits / scale, -1).gather(1, chosen).squeeze(1).numpy()


def assert_sampled_by(policy, request, result):
    """The response is one that these weights give."""
    assert len(result.token_ids) > 0
    np.testing.assert_allclose(result.log_probs, expected_log_probs(policy, request, result), atol=TOLERANCE)


def jolt(policy, seed):
    """Change every weight, those of the vision tower included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
