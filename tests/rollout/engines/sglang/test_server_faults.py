"""What networks and servers do, done to the answers of a real server by a proxy; and servers that are wrong ones."""

from __future__ import annotations

import copy
import socket
import threading
import time

import pytest

from geo_sokoban_pipeline.config.rollout import SamplingOptions
from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
from geo_sokoban_pipeline.rollout.engines.sglang import launcher, servers
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


def cut(**entries):
    """The first token alone, as of a response that was cut off on its way."""

    def change(body):
        meta = {**body["meta_info"], "output_token_logprobs": body["meta_info"]["output_token_logprobs"][:1], **entries}
        if meta.get("weight_versions"):
            meta["weight_versions"] = [{**meta["weight_versions"][0], "start": 0, "end": 1}]
        return {**body, "output_ids": body["output_ids"][:1], "meta_info": meta}

    return changed(change)


def swap_first(token):
    """Another first token, under its own name among the log-probs too."""

    def change(body):
        (log_prob, _, *rest), *others = body["meta_info"]["output_token_logprobs"]
        meta = {**body["meta_info"], "output_token_logprobs": [[log_prob, token, *rest], *others]}
        return {**body, "output_ids": [token, *body["output_ids"][1:]], "meta_info": meta}

    return changed(change)


ONCE = {
    "500": "500",
    "dropped": "drop",
    "no JSON": lambda body: b"<html>busy</html>",
    "half of it": lambda body: body[: len(body) // 2],
    "nothing": lambda body: b"",
    "another form": changed(lambda body: {"result": body}),
    "no text": lambda body: b"\xff\xfe",
    "no log-probs": change_meta(output_token_logprobs=[]),
    "no count of cached tokens": change_meta(cached_tokens="many"),
    "cut off": cut(),
    "cut off and called whole": cut(finish_reason={"type": "stop", "matched": 386}),
    "spans of another response": change_meta(weight_versions=[{"version": "1", "start": 0, "end": 99}]),
    "numbers that are none": change_meta(finish_reason={"type": "stop", "matched": "NaN happened"}),
    "an abort that nobody wanted": change_meta(finish_reason={"type": "abort", "message": "out of memory"}),
    "a banned token": swap_first(447),
    "another token than its log-prob's": changed(lambda body: {**body, "output_ids": [3, *body["output_ids"][1:]]}),
}


@pytest.mark.parametrize("fault", ONCE.values(), ids=ONCE.keys())
def test_a_response_is_asked_for_again(sglang_server, tiny_policy, fault):
    request = request_with(tiny_policy, [0], SamplingOptions(greedy=True))
    with proxied(sglang_server) as proxy, attached(tiny_policy, proxy.url, faults=PATIENT) as engine:
        response = ask(engine, request)[0].token_ids
        assert len(response) == 12 and response[0] not in (3, *tiny_policy.end_ids)  # else some faults are none
        proxy.seen.clear()
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
    faults = {**PATIENT, "reply_timeout": 5.0}
    with proxied(sglang_server) as proxy, attached(tiny_policy, proxy.url, faults=faults) as engine:
        engine.update_weights(None, 1)
        proxy.order("/generate", "wait 8")
        began = time.monotonic()
        assert_sampled_by(tiny_policy, request, ask(engine, request)[0])
        assert time.monotonic() - began > 5


def test_a_server_that_forgot_its_weights_gets_them_again(sglang_server, tiny_policy):
    """As one that was restarted by somebody else: it comes back with the weights of its folder."""
    request = request_with(tiny_policy, [1])
    with proxied(sglang_server) as proxy, attached(tiny_policy, proxy.url, faults=PATIENT) as engine:
        engine.update_weights(None, 3)
        proxy.order("/generate", "drop")
        proxy.order("/model_info", lambda body: body, changed(lambda body: {**body, "weight_version": "default"}))
        sent = proxy.seen.count("/update_weights_from_tensor")
        assert ask(engine, request)[0].weight_version == 3
        assert proxy.seen.count("/update_weights_from_tensor") == sent + 1


def test_weights_that_are_no_more_cannot_be_given_again(sglang_server, tiny_policy):
    policy = copy.deepcopy(tiny_policy)
    with proxied(sglang_server) as proxy, attached(policy, proxy.url, faults=PATIENT) as engine:
        engine.update_weights(None, 3)
        jolt(policy, 1)
        proxy.order("/generate", "drop")
        proxy.order("/model_info", lambda body: body, changed(lambda body: {**body, "weight_version": "default"}))
        with pytest.raises(EngineStopped, match="weights of version 3 again, but the policy has changed"):
            ask(engine, request_with(policy, [1]))


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


def test_somebody_else_updates_the_same_server(sglang_server, tiny_policy):
    with proxied(sglang_server) as proxy, attached(tiny_policy, proxy.url, faults=PATIENT) as engine:
        proxy.order("/generate", *[changed(sampled_by_others)] * 40)
        with pytest.raises(WrongServer, match="named '7-theirs', which this run has not sent"):
            ask(engine, request_with(tiny_policy, [0], max_new_tokens=12))
        assert proxy.seen.count("/generate") == 1


def test_a_server_that_does_not_see_the_images_stops_the_run_at_once(sglang_server, tiny_policy):
    with proxied(sglang_server) as proxy, attached(tiny_policy, proxy.url, faults=PATIENT) as engine:
        proxy.order("/generate", change_meta(prompt_tokens=4))
        with pytest.raises(WrongServer, match="counts 4 tokens in a prompt"):
            ask(engine, request_with(tiny_policy, [0]))
        assert proxy.seen.count("/generate") == 1


def test_another_model(sglang_server):
    narrow = build_tiny_policy(TinyPolicyOptions(hidden=32), seed=0)
    with pytest.raises(WrongServer, match=r"text_config.hidden_size=64; this policy has 32"):
        SglangEngine(narrow, attach_options(sglang_server))


def test_a_model_without_images(sglang_server, tiny_policy):
    with proxied(sglang_server) as proxy:
        proxy.order("/model_info", changed(lambda b: {**b, "model_type": "qwen3", "has_image_understanding": False}))
        with pytest.raises(WrongServer, match="a qwen3 model without images"):
            SglangEngine(tiny_policy, attach_options(proxy.url))


def test_another_vocabulary(sglang_server, tiny_policy):
    other = build_tiny_policy(TinyPolicyOptions(vocabulary=380), seed=0)
    assert other.model.config.text_config.vocab_size == tiny_policy.model.config.text_config.vocab_size
    with pytest.raises(WrongServer, match="has another vocabulary"):
        SglangEngine(other, attach_options(sglang_server))


def test_nobody_listens(tiny_policy):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ServerLost, match=r"not ready within rollout.server.faults.start_timeout=1 s"):
        SglangEngine(tiny_policy, attach_options(f"http://127.0.0.1:{port}", faults={"start_timeout": 1.0}))


def test_a_port_that_is_taken(tiny_policy):
    need_environment()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerLost, match=rf"port {port} of 127.0.0.1 is taken"):
            SglangEngine(tiny_policy, launch_options(ports=(port,)))


def test_a_port_that_is_taken_in_the_meantime(tiny_policy, monkeypatch):
    """Free when it was looked for, taken when the server wants it: the server ends, and gets another one."""
    need_environment()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = launcher.find_ports
        ports = iter([[port]])
        monkeypatch.setattr(launcher, "find_ports", lambda host, count: next(ports, None) or found(host, count))
        monkeypatch.setattr(launcher, "is_free", lambda host, port: True)
        options = launch_options(random_seed=78)
        engine = SglangEngine(tiny_policy, options)
        try:
            assert not engine.urls[0].endswith(f":{port}")
            request = request_with(tiny_policy, [1])
            assert_sampled_by(tiny_policy, request, ask(engine, request)[0])
        finally:
            engine.close()
            for server in servers.IDLE.take(launcher.kind_of(options, tiny_policy), [0]).values():
                server.end()


def test_no_environment(tiny_policy, tmp_path):
    with pytest.raises(ServerLost, match="make sglang-env"):
        SglangEngine(tiny_policy, launch_options(python=str(tmp_path / "python")))


def test_a_slow_start_ends_the_server(tiny_policy):
    need_environment()
    before = {process.pid for process in descendants()}
    with pytest.raises(ServerLost, match="not ready within"):
        SglangEngine(tiny_policy, launch_options(random_seed=77, faults={"start_timeout": 2.0, "grace": 1.0}))
    assert {process.pid for process in descendants()} == before


def test_a_server_that_cannot_start_says_why(tiny_policy):
    need_environment()
    with pytest.raises(ServerLost, match="ended while it started: exit code 2") as stopped:
        SglangEngine(tiny_policy, launch_options(extra_arguments=("--no-such-flag",)))
    assert "no-such-flag" in str(stopped.value)
