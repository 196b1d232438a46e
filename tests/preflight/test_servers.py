"""Pre-flight of SGLang servers: what a launch would fail at, found without one."""

from __future__ import annotations

import socket
import sys
from typing import Any

import pytest

from geo_sokoban_pipeline.config.server import ServerOptions
from geo_sokoban_pipeline.preflight.servers import (
    check_gpus,
    check_launch,
    check_sampling_servers,
    check_versions,
    needed_sampling_servers,
    read_versions,
)
from preflight.conftest import says
from task_options import TrainOptions

RUN = "train_sokoban"
GOOD = {"sglang": "0.5.21", "torch": "2.13.0+cpu", "sglang-router": "0.3.2"}


def options(**server: Any) -> TrainOptions:
    return TrainOptions.model_validate({"rollout": {"engine": "sglang", "server": server}})


def test_servers_to_attach_to_are_asked_and_shown_their_key_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for without in (TrainOptions(), options()):
        assert needed_sampling_servers(RUN, without) == []
    assert check_sampling_servers(RUN, TrainOptions()) == []
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "for-mlflow")
    monkeypatch.setenv("MY_KEY", "swordfish")
    given = options(mode="attach", urls=["http://a:1"], api_key_variable="MY_KEY")
    (bare,) = needed_sampling_servers(RUN, options(mode="attach", urls=["http://a:1"]))
    (keyed,) = needed_sampling_servers(RUN, given)
    assert (bare.uri, bare.state) == ("http://a:1", "failure")
    assert (bare.header, keyed.header) == ({}, {"Authorization": "Bearer swordfish"})
    assert "swordfish" not in repr(keyed)
    monkeypatch.delenv("MY_KEY")  # which is known before any work
    for check in (check_launch, check_sampling_servers):
        with pytest.raises(ValueError, match="api_key_variable=MY_KEY: this environment variable is not set"):
            check(RUN, given)


@pytest.mark.parametrize(
    ("server", "versions", "state", "text"),
    [
        ({}, GOOD, "ok", "sglang 0.5.21, torch 2.13.0"),
        ({}, {"torch": "2.13.0"}, "failure", "no sglang there"),
        ({}, {**GOOD, "sglang": "0.5.23"}, "warning", "tested with 0.5.21"),
        ({"router": "sticky"}, {**GOOD, "sglang-router": None}, "failure", "no sglang-router"),
        ({}, {**GOOD, "torch": "2.9.1"}, "failure", "convolution is very slow"),
        ({}, {**GOOD, "torch": "2.9.1", "nvidia-cudnn-cu12": "9.10.2.21"}, "failure", "cuDNN 9.10.2.21"),
        ({}, {**GOOD, "torch": "2.9.1", "nvidia-cudnn-cu12": "9.16.0.29"}, "ok", "torch 2.9.1"),
        ({"device": "cpu"}, {**GOOD, "torch": "2.9.1"}, "ok", "torch 2.9.1"),
    ],
)
def test_versions(server: dict[str, Any], versions: dict[str, str | None], state: str, text: str) -> None:
    says(check_versions("x", ServerOptions(**server), versions), state, text)


@pytest.mark.parametrize(
    ("server", "gpus", "state", "text"),
    [
        ({"attention_backend": "fa3"}, [9], "ok", "1 of 1"),
        ({"attention_backend": "fa3"}, [10], "failure", "attention_backend=fa3: this GPU has no flash attention 3"),
        ({"mm_attention_backend": "fa3"}, [10], "failure", "mm_attention_backend=fa3"),
        ({"mm_attention_backend": "sdpa"}, [10], "ok", "1 of 1"),
        ({"count": 2, "tensor_parallel": 2}, [9, 9, 9], "failure", "2 servers of 2 GPUs; 3 are visible"),
        ({"count": 2, "first_gpu": 1}, [9, 9], "failure", "2 servers of 1 GPUs from GPU 1 on; 2 are visible"),
        ({"count": 2, "first_gpu": 1}, [9, 9, 9], "ok", "3 of 3"),
    ],
)
def test_gpus(server: dict[str, Any], gpus: list[int], state: str, text: str) -> None:
    check = says(check_gpus("x", ServerOptions(**server), gpus), state, text)
    if "flash attention 3" in check.found:
        (option,) = server
        assert check.way_out == f"set {option}={'sdpa' if option.startswith('mm') else 'triton'}"


@pytest.mark.parametrize(
    ("server", "device", "found"),
    [
        ({"update": "group"}, "auto", "server 0 shares GPU 0 with a rank; nccl takes one process a GPU"),
        ({"update": "group", "first_gpu": 1}, "auto", None),
        ({"update": "group"}, "cpu", None),  # by gloo
        ({"update": "ipc"}, "auto", None),
        ({"update": "ipc"}, "cpu", "update=ipc: the policy is on the CPU"),
    ],
)
def test_the_way_of_weights_suits_their_place(server: dict[str, Any], device: str, found: str | None) -> None:
    given = {"rollout": {"engine": "sglang", "server": {**server, "python": sys.executable}}}
    chosen = TrainOptions.model_validate({**given, "policy": {"device": device}})
    checks = [check for check in check_sampling_servers(RUN, chosen, gpus=[9, 9]) if check.name == "weights"]
    assert [check.state for check in checks] == ([] if found is None else ["failure"])
    assert all(found is not None and found in check.found for check in checks)


@pytest.mark.parametrize(("pool", "state"), [(100, "failure"), (1000, "warning"), (10_000_000, None)])
def test_room_for_all_conversations(pool: int, state: str | None) -> None:
    urls = ["http://a:1"]
    found = check_sampling_servers(RUN, options(mode="attach", urls=urls, max_total_tokens=pool), longest=500)
    assert [check.state for check in found if check.name == "cache"] == ([] if state is None else [state])
    assert [check.state for check in found if check.name == "image cache"] == ["warning"]


def test_an_environment_that_is_not_there_or_lacks_sglang_and_a_taken_port(tmp_path: Any) -> None:
    found = check_sampling_servers(RUN, options(device="cpu", python=str(tmp_path / "python")))
    assert [(check.state, check.way_out) for check in found] == [("failure", "make sglang-env")]
    versions = read_versions(ServerOptions(python=sys.executable))
    assert versions is not None and str(versions["torch"]).startswith("2.") and versions["sglang"] is None
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = check_sampling_servers(RUN, options(device="cpu", python=sys.executable, ports=[port]))
    assert [check.name for check in found if check.state == "failure"] == ["environment", "ports"]
