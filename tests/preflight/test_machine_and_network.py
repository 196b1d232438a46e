"""Libraries, accelerator, threads, servers and keys: what is missing is named with the way out."""

from __future__ import annotations

import base64
import py_compile
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from geo_sokoban_pipeline.preflight.machine import (
    check_accelerator,
    check_attention,
    check_byte_code,
    check_libraries,
    check_threads,
    check_torchvision,
    check_type,
)
from geo_sokoban_pipeline.preflight.model import ModelShape
from geo_sokoban_pipeline.preflight.servers import check_keys, check_servers, needed_servers
from preflight.conftest import says

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
    gone = says(tracked(make_subject, f"http://127.0.0.1:{port}"), "warning", f"port {port} of 127.0.0.1 does not")
    assert "tracking.uri=null" in gone.way_out


@pytest.mark.parametrize("uri", ["http://127.0.0.1:99999", "http://127.0.0.1:port/x", "http://[::1"])
def test_addresses_that_cannot_be_read_are_warnings(make_subject: Any, uri: str) -> None:
    assert "tracking.uri=null" in says(tracked(make_subject, uri), "warning").way_out


def test_a_server_that_speaks_something_else_is_a_warning(make_subject: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for _ in range(2):  # the port is tried, then asked
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
    assert not any(word in str(check.to_json()) for word in ("me@", password))


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
