"""Requests and responses as JSON: what is sent, and which bodies are refused."""

from __future__ import annotations

import base64
from dataclasses import replace

import numpy as np
import pytest

from geo_sokoban_pipeline.config.rollout import SamplingOptions
from geo_sokoban_pipeline.policies.patches import EncodedImage
from geo_sokoban_pipeline.rollout.engines.base import Request
from geo_sokoban_pipeline.rollout.engines.sglang.client import BadResponse, WrongServer
from geo_sokoban_pipeline.rollout.engines.sglang.wire import (
    ModelLimits,
    collapse_pads,
    read_response,
    room_of,
    write_request,
)

pytestmark = pytest.mark.xdist_group("sglang")

PAD, END = 90, 91
LIMITS = ModelLimits(
    size=100, banned=frozenset({PAD, 99}), end_ids=(END, 92), pad_id=PAD, merge_size=2, context=40, longest_prompt=36
)


def image(grid, png=b"png"):
    return EncodedImage("key", png, np.empty((0, 0), np.uint8), grid)


def ask(ids, images=(), limit=5, sampling=None, seed=3):
    return Request(0, np.asarray(ids, np.int32), images, sampling or SamplingOptions(), limit, seed)


@pytest.mark.parametrize(
    ("ids", "counts", "expected"),
    [
        ([1, 2, 3], [], [1, 2, 3]),
        ([1, PAD, PAD, PAD, 2], [3], [1, PAD, 2]),
        ([PAD, PAD, 5, PAD], [2, 1], [PAD, 5, PAD]),
        ([PAD, PAD, PAD, PAD], [2, 2], [PAD, PAD]),  # images that nothing separates
        ([], [], []),
    ],
)
def test_one_pad_per_image(ids, counts, expected):
    assert collapse_pads(np.asarray(ids, np.int32), PAD, counts).tolist() == expected


@pytest.mark.parametrize(("ids", "counts"), [([PAD, 1], []), ([1], [1]), ([PAD, PAD], [3])])
def test_pads_that_belong_to_no_image(ids, counts):
    with pytest.raises(ValueError, match="image pads among the tokens"):
        collapse_pads(np.asarray(ids, np.int32), PAD, counts)


def test_a_request_on_the_wire():
    request = ask([1, PAD, PAD, 2], [image((1, 2, 4))], sampling=SamplingOptions(temperature=0.7, top_p=0.9, top_k=20))
    body = write_request(request, LIMITS, "r1")
    assert body["input_ids"] == [1, PAD, 2]
    assert body["image_data"] == ["data:image/png;base64," + base64.b64encode(b"png").decode()]
    assert (body["rid"], body["return_logprob"], body["logprob_start_len"]) == ("r1", True, -1)
    sampling = body["sampling_params"]
    assert {name: sampling[name] for name in ("temperature", "top_p", "top_k", "max_new_tokens")} == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "max_new_tokens": 5,
    }
    assert sampling["stop_token_ids"] == [END, 92] and sampling["no_stop_trim"] is True
    assert set(sampling["logit_bias"]) == {"90", "99"} and max(sampling["logit_bias"].values()) <= -1e6


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (SamplingOptions(), {"temperature": 1.0, "top_p": 1.0, "top_k": -1}),
        (SamplingOptions(greedy=True, temperature=0.5, top_k=3), {"temperature": 0.0}),
    ],
)
def test_sampling_on_the_wire(options, expected):
    sampling = write_request(ask([1], sampling=options), LIMITS, "r")["sampling_params"]
    assert {name: sampling[name] for name in expected} == expected
    assert ("top_k" in sampling) == ("top_k" in expected)


def test_a_large_seed_fits_the_server():
    body = write_request(ask([1], seed=(1 << 62) + 5), LIMITS, "r")
    assert body["sampling_params"]["sampling_seed"] == 5
    assert "image_data" not in body


@pytest.mark.parametrize(
    ("length", "limit", "room"), [(10, 5, 5), (10, None, 30), (36, 9, 4), (37, 9, 0), (60, None, 0)]
)
def test_room(length, limit, room):
    assert room_of(ask([1] * length, limit=limit), LIMITS) == room


def response(ids=(5, END), log_probs=(-0.5, -0.25), prompt=3, **changes):
    meta = {
        "prompt_tokens": prompt,
        "finish_reason": {"type": "stop", "matched": END},
        "output_token_logprobs": [[p, i, None] for p, i in zip(log_probs, ids, strict=False)],
        "weight_version": "7-a",
        "cached_tokens": 2,
    }
    return {"output_ids": list(ids), "meta_info": {**meta, **changes}}


def test_a_good_response():
    read = read_response(response(), ask([1, 2, 3]), LIMITS)
    assert (read.token_ids.tolist(), read.log_probs.tolist()) == ([5, END], [-0.5, -0.25])
    assert (read.finish_reason, read.spans, read.cached_tokens) == ("stop", (("7-a", 0, 2),), 2)


def ending(kind, **more):
    return {"finish_reason": {"type": kind, **more}}


@pytest.mark.parametrize(
    ("ids", "changes", "expected"),
    [
        ((5, END), ending("stop", matched=END), "stop"),
        ((5, 92), ending("stop", matched=92), "stop"),
        ((5, 6, 7, 8, 9), ending("length", length=5), "length"),
        # The limit, or the word to stop, came with the token that ends the response: it is whole.
        ((5, 6, 7, 8, END), ending("length", length=5), "stop"),
        ((5, END), ending("abort"), "stop"),
        ((5, 6), ending("abort"), "abort"),
        ((), ending("abort"), "abort"),
    ],
)
def test_how_a_response_ended(ids, changes, expected):
    body = response(ids=ids, log_probs=[-0.5] * len(ids), **changes)
    assert read_response(body, ask([1, 2, 3]), LIMITS).finish_reason == expected


def test_the_end_of_the_context_is_a_length():
    body = response(ids=(5, 6, 7), log_probs=[-0.5] * 3, prompt=37, **ending("length"))
    limits = replace(LIMITS, longest_prompt=40)
    assert read_response(body, ask([1] * 37, limit=9), limits).finish_reason == "length"


def test_spans_of_several_versions():
    spans = [{"version": "1", "start": 0, "end": 1}, {"version": "x", "start": 1, "end": 1}]
    spans.append({"version": "2", "start": 1, "end": 2})
    read = read_response(response(weight_versions=spans), ask([1, 2, 3]), LIMITS)
    assert read.spans == (("1", 0, 1), ("2", 1, 2))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (None, "malformed"),
        ([], "malformed"),
        ({"output_ids": [1]}, "malformed"),
        (response() | {"output_ids": ["x"]}, "malformed"),
        (response(finish_reason=None), "malformed"),
        (response(ids=(5, 6), finish_reason={"type": "tired"}), "ended with 'tired' after 2 of 5 tokens"),
        (response(finish_reason={"type": "tired"}), "ended with 'tired'"),
        (response(finish_reason={"type": "stop", "matched": "NaN happened"}), "was stopped: NaN happened"),
        (response(ids=(5, 6)), "ended with 'stop' after 2 of 5 tokens, the last one no end token"),
        (response(ids=(), log_probs=()), "ended with 'stop' after 0 of 5 tokens"),
        (response(ids=(5, 6), finish_reason={"type": "length"}), "ended with 'length' after 2 of 5 tokens"),
        (response(ids=(1, 2, 3, 4, 5, 6), log_probs=[-0.5] * 6, finish_reason={"type": "length"}), "has 6 of 5 tokens"),
        (response(ids=(END, 5)), "or tokens after its end token"),
        (response(cached_tokens="many"), "malformed"),
        (response(ids=(5, 6), log_probs=(-0.5,)), "2 tokens, but log-probs of 1"),
        (response(output_token_logprobs=[[-0.5, 4, None], [-0.25, END, None]]), "or of other tokens"),
        (response(ids=(5, 100)), "token 100 of a vocabulary of 100"),
        (response(ids=(-1, 4)), "vocabulary"),
        (response(ids=(5, PAD)), r"banned tokens \[90\]"),
        (response(log_probs=(-0.5, float("nan"))), "log-probs that are above 0 or not finite"),
        (response(log_probs=(-0.5, 0.1)), "log-probs that are above 0 or not finite"),
        (response(weight_versions=[{"version": "1", "start": 0, "end": 1}]), "malformed"),
    ],
)
def test_bad_responses(body, message):
    with pytest.raises(BadResponse, match=message):
        read_response(body, ask([1, 2, 3]), LIMITS)


def test_a_server_that_does_not_see_the_images():
    request = ask([1, PAD, PAD, 2], [image((1, 2, 4))])
    with pytest.raises(WrongServer, match="counts 2 tokens in a prompt of 4 with 1 images"):
        read_response(response(prompt=2), request, LIMITS)
    with pytest.raises(WrongServer, match="counts 2 tokens"):  # what was sampled before an abort, too
        read_response(response(ids=(5, 6), prompt=2, finish_reason={"type": "abort"}), request, LIMITS)


@pytest.mark.parametrize("ids", [(), (5, 6)])
def test_what_waited_when_it_was_aborted(ids):
    """The server stops it before it is read, or read again, and counts no prompt."""
    body = response(ids=ids, log_probs=[-0.5] * len(ids), finish_reason={"type": "abort"})
    del body["meta_info"]["prompt_tokens"]
    read = read_response(body, ask([1, 2, 3]), LIMITS)
    assert (read.finish_reason, read.token_ids.tolist()) == ("abort", list(ids))
    body["meta_info"]["finish_reason"] = {"type": "length"}
    with pytest.raises(BadResponse, match="counts no prompt_tokens"):
        read_response(body, ask([1, 2, 3]), LIMITS)


def test_a_saturated_token_is_never_above_zero():
    assert read_response(response(log_probs=(5e-7, 0.0)), ask([1, 2, 3]), LIMITS).log_probs.tolist() == [0.0, 0.0]
