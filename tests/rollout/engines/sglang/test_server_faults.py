"""What networks and servers do, done to the answers of a real server by a proxy; and servers that are wrong ones."""

from __future__ import annotations

import copy
import socket
import threading
import time

import pytest

from geo_sokoban_pipeline.config.rollout import SamplingOptions
from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
from geo_sokoban_pipeline.rollout.engines.sglang.client import EngineStopped, ServerLost, WrongServer
from geo_sokoban_pipeline.rollout.engines.sglang.engine import SglangEngine
from proxies import changed, proxied
from rollout.engines.sglang.material import ask, assert_sampled_by, jolt, request_with
from servers import attach_options, attached, descendants, launch_options, need_environment
from task_options import TinyPolicyOptions

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("sglang")]
PATIENT = {"tries": 3, "restarts": 2, "first_pause": 0.01}


def change_meta(**entries):
    return changed(lambda body: {**body, "meta_info": {**body["meta_info"], **entries}})


# Faults of a response that can be read are a table of test_wire.py.
ONCE = {
    "500": "500",
    "dropped": "drop",
    "no JSON": lambda body: b"<html>busy</html>",
    "half of it": lambda body: body[: len(body) // 2],
    "nothing": lambda body: b"",
    "no text": lambda body: b"\xff\xfe",
    "no log-probs": change_meta(output_token_logprobs=[]),
    "an abort that nobody wanted": change_meta(finish_reason={"type": "abort", "message": "out of memory"}),
}


@pytest.mark.parametrize("fault", ONCE.values(), ids=ONCE.keys())
def test_a_response_is_asked_for_again(sglang_server, tiny_policy, fault):
    request = request_with(tiny_policy, [0], SamplingOptions(greedy=True))
    with proxied(sglang_server) as proxy, attached(tiny_policy, proxy.url, faults=PATIENT) as engine:
        proxy.order("/generate", fault, fault)
        result = ask(engine, request)[0]
        assert proxy.seen.count("/generate") == 3
        assert_sampled_by(tiny_policy, request, result)
        assert result.finish_reason != "abort"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("500", "answered 500: Internal Server Error"),
        ("drop", "is gone"),
        (ONCE["no JSON"], "invalid JSON: '<html>busy"),
    ],
    ids=["500", "dropped", "no JSON"],
)
def test_tries_are_bounded(sglang_server, tiny_policy, fault, message):
    requests = [request_with(tiny_policy, [0], identity=identity) for identity in range(4)]
    with proxied(sglang_server) as proxy, attached(tiny_policy, proxy.url, faults=PATIENT) as engine:
        proxy.order("/generate", *[fault] * 40)
        with pytest.raises(EngineStopped, match=message) as stopped:
            ask(engine, *requests)
        assert "rollout.server.faults" in str(stopped.value)
        assert engine.poll() == []  # nothing is in flight, and nothing half-made is handed out


def test_a_late_response_counts_as_lost(sglang_server, tiny_policy):
    request = request_with(tiny_policy, [1])
    faults = {**PATIENT, "reply_timeout": 3.0}
    with proxied(sglang_server) as proxy, attached(tiny_policy, proxy.url, faults=faults) as engine:
        engine.update_weights(None, 1)
        proxy.order("/generate", "wait 5")
        began = time.monotonic()
        assert_sampled_by(tiny_policy, request, ask(engine, request)[0])
        assert time.monotonic() - began > 3


@pytest.mark.parametrize("are_there", [True, False])
def test_a_server_that_forgot_its_weights_gets_them_again_if_they_are_there(sglang_server, tiny_policy, are_there):
    """As one that was restarted by somebody else: it comes back with the weights of its folder."""
    policy = copy.deepcopy(tiny_policy)
    request = request_with(policy, [1])
    with proxied(sglang_server) as proxy, attached(policy, proxy.url, faults=PATIENT) as engine:
        engine.update_weights(None, 3)
        sent = proxy.seen.count("/update_weights_from_tensor")
        proxy.order("/generate", "drop")
        proxy.order("/model_info", lambda body: body, changed(lambda body: {**body, "weight_version": "default"}))
        if are_there:
            assert ask(engine, request)[0].weight_version == 3
            assert proxy.seen.count("/update_weights_from_tensor") == sent + 1
        else:
            jolt(policy, 1)
            with pytest.raises(EngineStopped, match="weights of version 3 again, but the policy has changed"):
                ask(engine, request)


def test_an_update_waits_while_a_server_is_brought_back(sglang_server, tiny_policy):
    """Two who give a server weights at once would leave it with some of each."""
    policy = copy.deepcopy(tiny_policy)
    request = request_with(policy, [1])
    with proxied(sglang_server) as proxy, attached(policy, proxy.url, faults=PATIENT) as engine:
        engine.update_weights(None, 1)
        proxy.seen.clear()
        proxy.order("/generate", "drop")
        proxy.order("/ready", "wait 3")
        engine.submit([request])
        while "/ready" not in proxy.seen:  # the server is being brought back
            time.sleep(0.01)
        jolt(policy, 2)
        update = threading.Thread(target=engine.update_weights, args=(None, 2))
        update.start()
        time.sleep(1.0)
        assert update.is_alive() and "/begin_weight_update" not in proxy.seen
        update.join()
        (result,) = engine.poll()
        assert result.weight_version == 2
        assert_sampled_by(policy, request, result)
        steps = [path for path in proxy.seen if path in ("/begin_weight_update", "/end_weight_update")]
        begins = steps.index("/begin_weight_update")  # what was left open is ended first
        assert steps[begins:] == ["/begin_weight_update", "/end_weight_update"] * 2


def test_a_response_that_was_whole_when_it_should_have_been_stopped(sglang_server, tiny_policy):
    """It stays what it is: gone on with later, it would have tokens after its end."""
    request = request_with(tiny_policy, [1], SamplingOptions(greedy=True), max_new_tokens=3)
    with proxied(sglang_server) as proxy, attached(tiny_policy, proxy.url, faults=PATIENT) as engine:
        whole = ask(engine, request)[0]
        proxy.order("/generate", "late 2")
        answered = proxy.answered
        engine.submit([request])
        while proxy.answered == answered:
            time.sleep(0.01)
        engine.abort([0])
        (result,) = engine.poll()
    assert result.finish_reason == whole.finish_reason == "length"
    assert result.token_ids.tolist() == whole.token_ids.tolist()


def test_weights_that_do_not_arrive(sglang_server, tiny_policy):
    policy = copy.deepcopy(tiny_policy)
    request = request_with(policy, [2])
    with proxied(sglang_server) as proxy, attached(policy, proxy.url, faults=PATIENT) as engine:
        proxy.order("/update_weights_from_tensor", "500", "drop")
        engine.update_weights(None, 1)
        assert_sampled_by(policy, request, ask(engine, request)[0])
        proxy.order("/update_weights_from_tensor", *["500"] * 9)
        with pytest.raises(EngineStopped, match="was lost 3 times"):
            engine.update_weights(None, 2)


@pytest.mark.parametrize("path", ["/init_weights_update_group", "/update_weights_from_distributed"])
@pytest.mark.parametrize("fault", ["500", "drop"])
def test_a_broadcast_that_is_broken_off_is_made_again(sglang_server, tiny_policy, path, fault):
    """The server has not heard the command, so this process must not wait for it."""
    policy = copy.deepcopy(tiny_policy)
    options = {"update": "group", "bucket_bytes": 400_000, "faults": {**PATIENT, "control_timeout": 100.0}}
    request = request_with(policy, [2])
    with proxied(sglang_server) as proxy, attached(policy, proxy.url, **options) as engine:
        proxy.order(path, fault)
        jolt(policy, 3)
        began = time.monotonic()
        engine.update_weights(None, 1)
        assert time.monotonic() - began < 50  # no time limit had to pass
        assert proxy.seen.count("/init_weights_update_group") == 2
        assert proxy.seen.count("/destroy_weights_update_group") == 2
        assert_sampled_by(policy, request, ask(engine, request)[0])


def sampled_by_others(body):
    """The whole response under a version that this engine has not sent."""
    span = {"version": "7-theirs", "start": 0, "end": len(body["output_ids"])}
    return {**body, "meta_info": {**body["meta_info"], "weight_versions": [span]}}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (changed(sampled_by_others), "named '7-theirs', which this run has not sent"),
        (change_meta(prompt_tokens=4), "counts 4 tokens in a prompt"),
    ],
    ids=["somebody else gives it weights", "it does not see the images"],
)
def test_a_wrong_server_stops_the_run_at_once(sglang_server, tiny_policy, fault, message):
    with proxied(sglang_server) as proxy, attached(tiny_policy, proxy.url, faults=PATIENT) as engine:
        proxy.order("/generate", fault)
        with pytest.raises(WrongServer, match=message):
            ask(engine, request_with(tiny_policy, [0], max_new_tokens=12))
        assert proxy.seen.count("/generate") == 1


@pytest.mark.parametrize(
    ("sizes", "model", "message"),
    [
        ({"hidden": 32}, {}, r"text_config.hidden_size=64; this policy has 32"),
        ({"vocabulary": 380}, {}, "has another vocabulary"),
        ({}, {"model_type": "qwen3", "has_image_understanding": False}, "a qwen3 model without images"),
    ],
)
def test_another_model(sglang_server, tiny_policy, sizes, model, message):
    policy = build_tiny_policy(TinyPolicyOptions(**sizes), seed=0)
    size = policy.model.config.text_config.vocab_size
    assert size == tiny_policy.model.config.text_config.vocab_size  # also of the smaller vocabulary
    with proxied(sglang_server) as proxy:
        proxy.order("/model_info", changed(lambda body: {**body, **model}))
        with pytest.raises(WrongServer, match=message):
            SglangEngine(policy, attach_options(proxy.url))


@pytest.mark.parametrize(
    ("launched", "options", "message"),
    [
        (False, {"faults": {"start_timeout": 1.0}}, "not ready within rollout.server.faults.start_timeout=1 s"),
        (True, {}, r"port \d+ of 127.0.0.1 is taken"),
        (True, {"ports": None, "python": "/no/such/python"}, "make sglang-env"),
        (True, {"ports": None, "random_seed": 77, "faults": {"start_timeout": 2.0}}, "not ready within"),
        (True, {"ports": None, "extra_arguments": ("--no-such-flag",)}, r"exit code 2(.|\n)*no-such-flag"),
    ],
    ids=["nothing listens", "port taken", "no environment", "slow start", "cannot start"],
)
def test_servers_that_are_refused(tiny_policy, launched, options, message):
    """They leave no process behind."""
    need_environment()
    before = {process.pid for process in descendants()}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        if launched:
            taken.listen()
            chosen = launch_options(**{"ports": (port,), **options})
        else:
            chosen = attach_options(f"http://127.0.0.1:{port}", **options)
        with pytest.raises(ServerLost, match=message):
            SglangEngine(tiny_policy, chosen)
    assert {process.pid for process in descendants()} == before
