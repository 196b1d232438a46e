"""New weights on a real server: after each kind of update responses are those of the new weights, images included."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import requests
import torch

from geo_sokoban_pipeline.config.rollout import SamplingOptions
from geo_sokoban_pipeline.config.server import ServerOptions
from geo_sokoban_pipeline.policies.policy import save_policy
from geo_sokoban_pipeline.policies.weights import WeightSource
from geo_sokoban_pipeline.rollout.engines.sglang import sender
from rollout.engines.sglang.material import (
    TOLERANCE,
    ask,
    assert_sampled_by,
    expected_log_probs,
    jolt,
    request_with,
)
from servers import attached

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("sglang")]


@pytest.mark.parametrize(
    "options",
    [
        {"update": way, **({} if size is None else {"bucket_bytes": size})}
        for way in ("tensors", "disk", "group", "ipc")
        for size in (None, 40_000)
    ],
    ids=lambda options: " in buckets of ".join(map(str, options.values())),
)
def test_responses_are_those_of_the_new_weights(sglang_server, tiny_policy, monkeypatch, options):
    """With ipc the payload is that for GPUs, but for the handle: in its place there is the memory itself."""
    policy = copy.deepcopy(tiny_policy)
    if options["update"] == "ipc":
        monkeypatch.setattr(sender, "put_on_gpu", lambda flat: flat)
        monkeypatch.setattr(sender, "Handle", torch.Tensor.clone)
        monkeypatch.setattr(ServerOptions, "way", lambda self, on_gpu: "ipc")  # which the options refuse for a CPU
        options = {name: value for name, value in options.items() if name != "update"}
    seen = request_with(policy, [0, 1], identity=0)
    with attached(policy, sglang_server, **options) as engine:
        engine.update_weights(None, 4)
        assert_sampled_by(policy, seen, ask(engine, seen)[0])
        for version in (5, 6):
            jolt(policy, version)
            engine.update_weights(None, version)
            new = request_with(policy, [version], identity=1)
            responses = ask(engine, seen, new)
            for request in (seen, new):
                assert_sampled_by(policy, request, responses[request.id])
                assert responses[request.id].weight_version == version


@pytest.mark.parametrize(("kind", "way"), [("folder", "tensors"), ("folder", "disk"), ("model", "tensors")])
def test_weights_that_are_handed_over(sglang_server, tiny_policy, tmp_path, kind, way):
    other = copy.deepcopy(tiny_policy)
    jolt(other, 9)
    save_policy(other, tmp_path / "other")
    given = WeightSource.of_folder(tmp_path / "other") if kind == "folder" else WeightSource.of_model(other.model)
    request = request_with(other, [2, 3])
    with attached(tiny_policy, sglang_server, update=way) as engine:
        engine.update_weights(given, 11)
        assert engine.version == 11
        assert_sampled_by(other, request, ask(engine, request)[0])


def test_an_update_that_was_broken_off_is_made_again(sglang_server, tiny_policy):
    policy = copy.deepcopy(tiny_policy)
    request = request_with(policy, [4])
    begun = requests.post(f"{sglang_server}/begin_weight_update", json={"selector": "all"}, timeout=60)
    assert begun.json()["success"]
    with attached(policy, sglang_server) as engine:
        engine.update_weights(None, 1)
        assert_sampled_by(policy, request, ask(engine, request)[0])


def test_weights_that_change_under_a_response_leave_their_spans(sglang_server, tiny_policy):
    """Each token's log-prob is that of the weights that sampled it; an abort keeps what was sampled."""
    policy = copy.deepcopy(tiny_policy)
    request = request_with(policy, [5], SamplingOptions(greedy=True), max_new_tokens=3000)  # has no end of its own
    short = request_with(policy, [6], identity=1, max_new_tokens=1)
    with attached(policy, sglang_server) as engine:
        for version in (7, 8):
            before = copy.deepcopy(policy)
            if version == 8:
                jolt(policy, version)
            engine.update_weights(None, version)
            engine.submit([short, request][: 9 - version])
            assert [result.id for result in engine.poll()] == [1]  # by now the long one is sampled, too
            with pytest.raises(ValueError, match="already waits"):
                engine.submit([request])
        engine.abort([0, 99])
        (result,) = engine.poll()
        assert engine.poll() == []
    assert (result.finish_reason, 0 < len(result.token_ids) < 3000) == ("abort", True)
    (first, start, middle), (second, begin, end) = result.weight_spans
    assert (first, second, start, begin, end) == (7, 8, 0, middle, len(result.token_ids))
    for weights, part in ((before, slice(0, middle)), (policy, slice(middle, end))):
        expected = expected_log_probs(weights, request, result)
        np.testing.assert_allclose(result.log_probs[part], expected[part], atol=TOLERANCE)
