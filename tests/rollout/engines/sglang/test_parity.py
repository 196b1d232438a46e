"""A real server samples as the engine in this process does: same log-probs, same greedy episodes, same images."""

from __future__ import annotations

import json
import subprocess

import numpy as np
import pytest
import torch

from geo_sokoban_pipeline.config.rollout import SamplingOptions
from geo_sokoban_pipeline.policies.policy import save_policy
from geo_sokoban_pipeline.rollout.engines.base import Request
from geo_sokoban_pipeline.rollout.engines.transformers import TransformersEngine
from geo_sokoban_pipeline.trajectories.schema import validate_trajectories
from geo_sokoban_pipeline.trajectories.types import trajectories_to_table
from policies.library import library_log_probs, library_logits
from rollout.engines.sglang.material import TOLERANCE, ask, assert_sampled_by, request_with
from servers import PYTHON, attached
from stock_pixels import pixel_values

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("sglang")]


KINDS = [
    SamplingOptions(),
    SamplingOptions(temperature=0.6),
    SamplingOptions(top_p=0.8, top_k=30),
    SamplingOptions(greedy=True),
]


def test_log_probs_equal_those_of_this_process(sglang_server, tiny_policy):
    """Of each kind of sampling, with 0 to 8 images."""
    cases = enumerate((sampling, images) for sampling in KINDS for images in (0, 1, 2, 8))
    requests = [request_with(tiny_policy, images, sampling, number) for number, (sampling, images) in cases]
    with attached(tiny_policy, sglang_server) as engine:
        responses = ask(engine, *requests)
    greedy = ask(TransformersEngine(tiny_policy), *(one for one in requests if one.sampling.greedy))
    for request in requests:
        result = responses[request.id]
        assert 0 < len(result.token_ids) <= 12
        assert not set(result.token_ids.tolist()) & set(tiny_policy.banned_ids.tolist())
        assert_sampled_by(tiny_policy, request, result)
        if request.sampling.greedy:
            ours = greedy[request.id]
            assert ours.token_ids.tolist() == result.token_ids.tolist()
            np.testing.assert_allclose(result.log_probs, ours.log_probs, atol=TOLERANCE)


def test_greedy_episodes_are_those_of_this_process(sglang_server, player, make_tasks, play):
    tasks, greedy = make_tasks(24, 1), SamplingOptions(greedy=True)
    with attached(player, sglang_server) as engine:
        theirs = play(engine, player, tasks, greedy)
    ours = play(TransformersEngine(player), player, tasks, greedy)
    assert np.mean([len(episode.turns) > 4 for episode in theirs]) > 0.3  # else this compares little
    same = [a.token_ids.tolist() == b.token_ids.tolist() for a, b in zip(theirs, ours, strict=True)]
    assert np.mean(same) >= 0.95
    for one, other, equal in zip(theirs, ours, same, strict=True):
        if equal:
            np.testing.assert_allclose(one.rollout_log_probs, other.rollout_log_probs, atol=TOLERANCE)
        else:
            assert gap_of_the_best_two(player, one, first_difference(one, other)) < TOLERANCE
    validate_trajectories(trajectories_to_table(theirs, player.table_context))


def first_difference(one, other):
    shared = min(len(one.token_ids), len(other.token_ids))
    differing = np.flatnonzero(one.token_ids[:shared] != other.token_ids[:shared])
    assert len(differing), "one episode goes on where the other has ended"
    return int(differing[0])


def gap_of_the_best_two(policy, episode, position):
    images = [policy.reader.read_png(png) for png in episode.images]
    logits = library_logits(policy, episode.token_ids, images)[position - 1].float()
    logits[policy.banned_ids] = -torch.inf
    best, second = logits.topk(2).values.tolist()
    return best - second


def test_sampled_episodes_have_the_log_probs_of_this_process(sglang_server, player, make_tasks, play):
    with attached(player, sglang_server) as engine:
        episodes = play(engine, player, make_tasks(8, 2), SamplingOptions(temperature=0.8))
        assert not engine.seeded  # no attention for CPUs samples by seed, and the row says so
    for episode in episodes:
        np.testing.assert_allclose(episode.rollout_log_probs, library_log_probs(player, episode, 0.8), atol=TOLERANCE)
        assert json.loads(episode.sampling)["seeded"] is False
    validate_trajectories(trajectories_to_table(episodes, player.table_context))


def test_an_unseeded_server_does_not_repeat_itself(sglang_server, tiny_policy):
    """Why `seeded` is false: equal seeds, unlike responses."""
    with attached(tiny_policy, sglang_server) as engine:
        results = ask(engine, *(request_with(tiny_policy, 1, identity=identity) for identity in range(4)))
    assert len({tuple(result.token_ids.tolist()) for result in results.values()}) > 1


@pytest.mark.parametrize(("beyond", "expected"), [(0, range(1, 8)), (1, [0])])
def test_the_end_of_the_context(sglang_server, tiny_policy, beyond, expected):
    """Up to the last token the server takes the prompt, and beyond it nothing is asked."""
    with attached(tiny_policy, sglang_server) as engine:
        tokens = engine.limits.longest_prompt + beyond
        ids = np.full(tokens, tiny_policy.codec.encode_text("up")[0], np.int32)
        result = ask(engine, Request(0, ids, (), SamplingOptions(), None, seed=0))[0]
    assert len(result.token_ids) in expected
    assert result.finish_reason in ("length", "stop")


PROCESS = """
import json, sys
from PIL import Image
from transformers import AutoProcessor
processor = AutoProcessor.from_pretrained(sys.argv[1])
text, images = sys.argv[2], [Image.open(path) for path in sys.argv[3:]]
made = processor(text=[text], images=images, return_tensors="np")
print(json.dumps({name: made[name].tolist() for name in ("input_ids", "pixel_values", "image_grid_thw")}))
"""


def test_a_saved_policy_has_the_stock_processor(sglang_server, tiny_policy, tmp_path):
    """In the servers' environment, which has the torchvision that the stock processor needs."""
    request = request_with(tiny_policy, 2, SamplingOptions())
    save_policy(tiny_policy, tmp_path / "policy")
    paths = []
    for number, image in enumerate(request.images):
        paths.append(tmp_path / f"{number}.png")
        paths[-1].write_bytes(image.png)
    content = [item for n in range(2) for item in ({"type": "image"}, {"type": "text", "text": f"Board {n}"})]
    text = tiny_policy.codec.render([{"role": "user", "content": content}])
    words = [str(PYTHON), "-c", PROCESS, str(tmp_path / "policy"), text, *map(str, paths)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    made = json.loads(done.stdout.splitlines()[-1])
    assert made["input_ids"][0] == request.token_ids.tolist()
    assert made["image_grid_thw"] == [list(image.grid) for image in request.images]
    pixels = pixel_values(tiny_policy.reader, request.images)
    np.testing.assert_allclose(np.asarray(made["pixel_values"]), pixels, atol=1e-6)
