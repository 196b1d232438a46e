"""Libraries, accelerator, threads, servers, variables and keys: what is missing is named with the way out."""

from __future__ import annotations

import base64
import py_compile
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from geo_sokoban_pipeline.config.launcher_env import check_submit
from geo_sokoban_pipeline.config.server import ServerOptions
from geo_sokoban_pipeline.preflight import machine
from geo_sokoban_pipeline.preflight.machine import (
    check_accelerator,
    check_attention,
    check_byte_code,
    check_libraries,
    check_threads,
    check_torchvision,
    check_type,
    check_variables,
)
from geo_sokoban_pipeline.preflight.model import ModelShape
from geo_sokoban_pipeline.preflight.servers import (
    check_gpus,
    check_keys,
    check_launch,
    check_sampling_servers,
    check_servers,
    check_versions,
    needed_sampling_servers,
    needed_servers,
    read_versions,
)
from preflight.conftest import says
from task_options import TrainOptions

RUN = "train_sokoban"


def test_what_is_installed_is_in_the_ranges_of_the_project() -> None:
    says(check_libraries(), "ok")
    says([check_torchvision()], "ok")
    assert "torch" in check_accelerator().found


@pytest.mark.parametrize(
    ("requirement", "text"),
    [
        ("numpy<1", "<1 is needed"),
        ("torch==2.0.0", "==2.0.0 is needed"),
        ("no-such-library>=1", "no-such-library is not installed"),
    ],
)
def test_libraries_out_of_range(requirement: str, text: str) -> None:
    says(check_libraries([requirement, "pyarrow>=1", 'no-such-extra; extra == "ray"']), "failure", text)


def test_torchvision_of_another_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real distribution on the path, as pip leaves it."""
    folder = tmp_path / "torchvision-0.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.1\nRequires-Dist: torch==1.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    says([check_torchvision()], "failure", "torchvision 0.1 is built for torch==1.0")


@pytest.mark.parametrize(
    ("forbidden", "stored", "state"), [(False, False, "ok"), (True, True, "ok"), (True, False, "warning")]
)
def test_byte_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forbidden: bool, stored: bool, state: str) -> None:
    """The library of that name which Python would import, compiled or not."""
    library = tmp_path / "torch.py"
    library.touch()
    if stored:
        py_compile.compile(str(library))
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", forbidden)
    assert check_byte_code().state == state


@pytest.mark.parametrize(
    ("threads", "processes", "cores", "load", "state"),
    [
        (1, 1, 2, 9.0, "ok"),
        (2, 1, 2, 1.0, "ok"),
        (2, 1, 2, 2.5, "warning"),
        (4, 1, 2, 0.0, "warning"),
        (None, 1, 8, 0.5, "ok"),
        (None, 1, 8, 3.0, "warning"),
        # Processes sleep while they wait for each other.
        (1, 2, 2, 9.0, "ok"),
        (2, 2, 4, 1.0, "ok"),
        (2, 2, 2, 0.0, "warning"),
        (1, 3, 2, 0.0, "warning"),
    ],
)
def test_threads(threads: int | None, processes: int, cores: int, load: float, state: str) -> None:
    check = check_threads(threads, processes, cores, load)
    assert check.state == state
    assert ("1 thread" in check.found) == (threads == 1) and "1 threads" not in check.found


@pytest.mark.parametrize(
    ("name", "state", "text"),
    [
        ("sdpa", "ok", "qwen3_vl supports it"),
        ("eager", "ok", "qwen3_vl supports it"),
        # Their packages need a GPU, and are no dependencies.
        ("flash_attention_2", "failure", "the package for FlashAttention"),
        ("flash_attention_3", "failure", "the package for FlashAttention"),
        ("flash_attention_4", "failure", "the package for FlashAttention"),
        ("sdqa", "failure", 'policy.attention=sdqa: Specified `attn_implementation="sdqa"` is not supported'),
    ],
)
def test_attention(model: ModelShape, name: str, state: str, text: str) -> None:
    check = says([check_attention(name, model.config)], state, text)
    assert check.state == "ok" or "attention=sdpa" in check.way_out
    assert model.config._attn_implementation != name or name == "sdpa"


@pytest.mark.parametrize(("dtype", "states"), [("float32", {"ok"}), ("bfloat16", {"ok", "failure"})])
def test_types_are_tried(dtype: str, states: set[str]) -> None:
    assert check_type(dtype).state in states
    assert check_type("float16").state in ("warning", "failure")


class _Answer(BaseHTTPRequestHandler):
    """Lets in whoever has the token `good`, or the name and password `me:it`; other tokens are codes to answer with."""

    def do_GET(self) -> None:
        kind, _, token = (self.headers.get("Authorization") or "").partition(" ")
        allowed = token == ("good" if kind == "Bearer" else base64.b64encode(b"me:it").decode())
        self.send_response(200 if allowed else int(token) if token.isdigit() else 401)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    made = HTTPServer(("127.0.0.1", 0), _Answer)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()
    made.server_close()
    thread.join()


def tracked(make_subject: Any, uri: str | None, seconds: float = 5.0) -> Any:
    parameters = make_subject(tracking={"enabled": True, "uri": uri}).parameters
    return check_servers(needed_servers(parameters), seconds)


@pytest.mark.parametrize("uri", [None, "sqlite:///x.db", "file:///tmp/x"])
def test_local_tracking_needs_no_port(make_subject: Any, uri: str | None) -> None:
    says(tracked(make_subject, uri), "ok", "none needed")


def test_tracking_server(make_subject: Any, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_TOKEN", raising=False)
    refused = says(tracked(make_subject, server), "warning", "refuses this user (401)")
    assert "MLFLOW_TRACKING_TOKEN" in refused.way_out
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "good")
    says(tracked(make_subject, server), "ok")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    gone = says(tracked(make_subject, f"http://127.0.0.1:{port}"), "warning", f"127.0.0.1:{port} does not answer")
    assert "tracking.uri=null" in gone.way_out
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert "tracking.uri=null" in says(tracked(make_subject, uri, 0.2), "warning", "not answered for 0.2 s").way_out


@pytest.mark.parametrize("uri", ["http://127.0.0.1:99999", "http://127.0.0.1:port/x", "http://[::1"])
def test_addresses_that_cannot_be_read_are_warnings(make_subject: Any, uri: str) -> None:
    assert "tracking.uri=null" in says(tracked(make_subject, uri), "warning").way_out


def test_a_server_that_speaks_something_else_is_a_warning(make_subject: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            talk, _ = server.accept()
            with talk:
                talk.sendall(b"220 mail.example.org ready\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        says(tracked(make_subject, uri), "warning", "BadStatusLine")
        thread.join()


@pytest.mark.parametrize(("password", "state"), [("it", "ok"), ("wrong", "warning")])
def test_a_user_in_the_address_is_used_and_not_shown(
    make_subject: Any, server: str, monkeypatch: pytest.MonkeyPatch, password: str, state: str
) -> None:
    for name in ("TOKEN", "USERNAME"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name}", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password)
    uri = server.replace("http://", "http://me@")
    check = says(tracked(make_subject, f"{uri}/path"), state, f"{server}: ")
    assert not any(word in str(check) for word in ("me@", password))


HUB = {"train_sokoban": {"policy": {"source": "hub", "path": "someone/gated"}}}


@pytest.mark.parametrize(
    ("changes", "token", "login", "state", "text"),
    [
        ({}, "", "", "ok", "nothing comes from the hub"),
        (HUB, "", "", "failure", "the hub refuses access (401); no token"),
        (HUB, "bad", "", "failure", "the hub refuses access (401); HF_TOKEN is set"),
        (HUB, "good", "", "ok", "accepts this user; HF_TOKEN is set"),
        (HUB, "", "good", "ok", "with the token of `hf auth login`"),
        (HUB, "403", "", "failure", "the hub refuses access (403)"),
        (HUB, "404", "", "failure", "has none of this name, or hides it from this user (404)"),
        (HUB, "429", "", "warning", "the hub answers 429"),
        (HUB, "500", "", "warning", "the hub answers 500"),
        ({"sokoban": {"source": "hub"}}, "", "", "failure", "Xiaofeng77/sokoban"),
    ],
)
def test_keys(
    make_subject: Any, server: str, monkeypatch: Any, tmp_path: Path, changes: Any, token: str, login: str,
    state: str, text: str,
) -> None:  # fmt: skip
    """The test's server answers instead of the hub, and no token counts but those of the test."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
        monkeypatch.setenv(name, token if name == "HF_TOKEN" else "")
    if login:
        (tmp_path / "token").write_text(login)
    for name, value in {
        "ENDPOINT": server,
        "HF_HUB_OFFLINE": False,
        "HF_TOKEN_PATH": str(tmp_path / "token"),
        "HF_STORED_TOKENS_PATH": str(tmp_path / "stored_tokens"),
    }.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    parameters = make_subject(**changes).parameters
    check = says(check_keys(parameters, RUN, 5.0), state, text)
    assert "good" not in check.found and "bad" not in check.found
    if changes == HUB:  # a run with its own copy asks for no policy
        says(check_keys(parameters, RUN, 5.0, has_policy=True), "ok", "none needed: nothing comes from the hub")


# Variables that are set: the launchers' own, and the key of Weights & Biases.

FROM_HUB = {"train_sokoban": {"policy": {"source": "hub", "path": "Qwen/Qwen3-VL-2B-Instruct"}}}
ROWS = {"sokoban": {"source": "file", "file": {"path": "/rows/train.parquet"}}}
OF_USER = {"sokoban": {"source": "file", "file": {"path": "/home/somebody/rows/train.parquet"}}}


def servers(**server):
    return {"train_sokoban": {"rollout": {"engine": "sglang", "server": server}}}


def cluster(**server):
    own = {"placement": "ray", "processes": 1, "rollout": {"engine": "sglang", "server": server}}
    return {"train_sokoban": own}


@pytest.mark.parametrize(
    ("changes", "name", "value", "state", "found"),
    [
        (FROM_HUB, "SLIME_SCRIPT_MODEL_NAME", "Qwen3-VL-2B-Instruct", "ok", "sets train_sokoban.policy.path"),
        (FROM_HUB, "SLIME_SCRIPT_MODEL_NAME", "Qwen3-VL-4B-Instruct", "warning", "changes nothing"),
        ({}, "SLIME_SCRIPT_TRAIN_BACKEND", "FSDP", "ok", "sets train_sokoban.backend"),
        ({}, "SLIME_SCRIPT_DATASET_NAME", "someone/rows", "ok", "not of this task"),
        (ROWS, "SLIME_SCRIPT_SOKOBAN_DATA_ROOT", "/rows/", "ok", "sets sokoban.file.path"),
        (ROWS, "SLIME_SCRIPT_SOKOBAN_DATA_ROOT", "/other", "warning", "sokoban.file.path is /rows/train.parquet"),
        (OF_USER, "SLIME_SCRIPT_SOKOBAN_DATA_ROOT", "~/rows", "ok", "sets sokoban.file.path"),
        (ROWS, "SLIME_SCRIPT_SOKOBAN_DATASET_ID", "someone/levels", "warning", "sokoban.source is file"),
        ({}, "SLIME_SCRIPT_NUM_GPUS", "512", "warning", "train_sokoban.rollout.engine is transformers"),
        ({}, "SLIME_SCRIPT_EXTERNAL_RAY", "1", "warning", "train_sokoban.placement is local"),
        ({}, "SLIME_SCRIPT_MODEL", "x", "warning", "no launcher knows"),
        (servers(count=512), "SLIME_SCRIPT_NUM_GPUS", "512", "warning", "512 asked for, from GPU 0 on; torch sees"),
        (servers(count=2), "SLIME_SCRIPT_NUM_GPUS", "512", "warning", "changes nothing, train_sokoban.rollout.server"),
        # GPUs of a cluster are those of ranks and servers.
        (cluster(count=2), "SLIME_SCRIPT_NUM_GPUS", "3", "ok", "1 ranks and servers on 2 GPUs of their own take 3"),
        (cluster(count=2), "SLIME_SCRIPT_NUM_GPUS", "1", "warning", "take 3"),
        (cluster(count=1, colocated=True), "SLIME_SCRIPT_NUM_GPUS", "1", "ok", "1: 1 ranks take 1"),
        (cluster(count=1, colocated=True), "SLIME_SCRIPT_NUM_GPUS", "8", "warning", "8: 1 ranks take 1"),
    ],
)
def test_a_row_per_variable(make_subject, monkeypatch, changes, name, value, state, found):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert says(check_variables(make_subject(**changes), {name: value}), state, found).name == name


@pytest.mark.parametrize(
    ("version", "mode", "tracking", "state", "found"),
    [
        ("0.31.0", "", {}, "ok", "set: runs are tracked by Weights & Biases too (wandb 0.31.0, online)"),
        ("0.31.0", "offline", {}, "ok", "set: runs are tracked by Weights & Biases too (wandb 0.31.0, offline)"),
        (None, "", {}, "warning", "set, but the package wandb is not installed: runs are tracked by MLflow alone"),
        ("0.31.0", "", {"wandb": False}, "ok", "set but not used: tracking.wandb=false"),
        ("0.31.0", "", {"enabled": False}, "ok", "set but not used: tracking.enabled=false"),
    ],
)
def test_the_key_of_tracking(make_subject, monkeypatch, version, mode, tracking, state, found):
    monkeypatch.setattr(machine, "installed_version", lambda name: version if name == "wandb" else None)
    environment = {"WANDB_API_KEY": "secret", "WANDB_MODE": mode}
    check = says(check_variables(make_subject(tracking=tracking), environment), state, found)
    assert "secret" not in check.found + check.way_out


def test_nothing_is_said_where_nothing_is_set(make_subject):
    environment = {"SLIME_SCRIPT_MODEL_NAME": "", "PATH": "/bin", "WANDB_MODE": "offline"}
    assert check_variables(make_subject(), environment) == []


@pytest.mark.parametrize(("value", "refused"), [("0", True), ("False", True), ("1", False), (None, False)])
def test_who_wants_to_prepare_only_does_not_train(value, refused):
    environment = {} if value is None else {"SLIME_SCRIPT_ENABLE_RAY_SUBMIT": value}
    with pytest.raises(ValueError, match="asks to prepare only") if refused else nullcontext():
        check_submit(environment)


def test_a_gpu_that_is_asked_for_must_be_there():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert check_accelerator("cuda").state == "failure"
    assert check_accelerator("auto").state == "ok"


# SGLang servers: what a launch would fail at, found without one.

GOOD = {"sglang": "0.5.21", "torch": "2.13.0+cpu", "sglang-router": "0.3.2"}


def server_options(**server: Any) -> TrainOptions:
    return TrainOptions.model_validate({"rollout": {"engine": "sglang", "server": server}})


def test_servers_to_attach_to_are_asked_and_shown_their_key_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for without in (TrainOptions(), server_options()):
        assert needed_sampling_servers(RUN, without) == []
    assert check_sampling_servers(RUN, TrainOptions()) == []
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "for-mlflow")
    monkeypatch.setenv("MY_KEY", "swordfish")
    given = server_options(mode="attach", urls=["http://a:1"], api_key_variable="MY_KEY")
    (bare,) = needed_sampling_servers(RUN, server_options(mode="attach", urls=["http://a:1"]))
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
        ({}, "auto", None),  # by ipc
        ({"first_gpu": 1}, "auto", None),
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


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("value", "server", "device", "warned"),
    [
        ("expandable_segments:True", {}, "auto", True),
        ("max_split_size_mb:64,expandable_segments:True", {"first_gpu": 1, "colocated": True}, "auto", True),
        ("expandable_segments:False", {}, "auto", False),
        ("expandable_segments:True", {"first_gpu": 1}, "auto", False),  # by a group
        ("expandable_segments:True", {}, "cpu", False),
    ],
)
def test_memory_that_servers_cannot_open(
    variable: str, value: str, server: dict[str, Any], device: str, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    given = {"rollout": {"engine": "sglang", "server": {**server, "python": sys.executable}}}
    chosen = TrainOptions.model_validate({**given, "policy": {"device": device}})
    checks = [check for check in check_sampling_servers(RUN, chosen, gpus=[9, 9]) if check.name == "weights"]
    assert [check.state for check in checks] == ["warning"] * warned
    assert all(variable in check.found for check in checks)


@pytest.mark.parametrize(("pool", "state"), [(100, "failure"), (1000, "warning"), (10_000_000, None)])
def test_room_for_all_conversations(pool: int, state: str | None) -> None:
    urls = ["http://a:1"]
    found = check_sampling_servers(RUN, server_options(mode="attach", urls=urls, max_total_tokens=pool), longest=500)
    assert [check.state for check in found if check.name == "cache"] == ([] if state is None else [state])
    assert [check.state for check in found if check.name == "image cache"] == ["warning"]


def test_an_environment_that_is_not_there_or_lacks_sglang_and_a_taken_port(tmp_path: Any) -> None:
    found = check_sampling_servers(RUN, server_options(device="cpu", python=str(tmp_path / "python")))
    assert [(check.state, check.way_out) for check in found] == [("failure", "make sglang-env")]
    versions = read_versions(ServerOptions(python=sys.executable))
    assert versions is not None and str(versions["torch"]).startswith("2.") and versions["sglang"] is None
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = check_sampling_servers(RUN, server_options(device="cpu", python=sys.executable, ports=[port]))
    assert [check.name for check in found if check.state == "failure"] == ["environment", "ports"]
