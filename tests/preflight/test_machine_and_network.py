"""Libraries, accelerator, threads, servers and keys: what is missing is named with the way out."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from geo_sokoban_pipeline.preflight.machine import (
    check_accelerator,
    check_attention,
    check_libraries,
    check_threads,
    check_torchvision,
    check_type,
)
from geo_sokoban_pipeline.preflight.network import check_keys, check_servers, needed_servers

RUN = "train_sokoban"


def test_what_is_installed_is_in_the_ranges_of_the_project() -> None:
    (check,) = check_libraries()
    assert check.state == "ok", check
    assert check_torchvision().state == "ok"


@pytest.mark.parametrize(
    ("requirement", "text"),
    [
        ("numpy<1", "<1 is needed"),
        ("torch==2.0.0", "==2.0.0 is needed"),
        ("no-such-library>=1", "no-such-library is not installed"),
    ],
)
def test_libraries_out_of_range(requirement: str, text: str) -> None:
    (check,) = check_libraries([requirement, "pyarrow>=1", 'no-such-extra; extra == "ray"'])
    assert check.state == "failure"
    assert text in check.found


def test_torchvision_of_another_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real distribution on the path, as pip leaves it."""
    folder = tmp_path / "torchvision-0.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.1\nRequires-Dist: torch==1.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    check = check_torchvision()
    assert check.state == "failure"
    assert "torchvision 0.1 is built for torch==1.0" in check.found


@pytest.mark.parametrize(
    ("threads", "cores", "load", "state"),
    [
        (1, 2, 9.0, "ok"),
        (2, 2, 1.0, "ok"),
        (2, 2, 2.5, "warning"),
        (4, 2, 0.0, "warning"),
        (None, 8, 0.5, "ok"),
        (None, 8, 3.0, "warning"),
    ],
)
def test_threads(threads: int | None, cores: int, load: float, state: str) -> None:
    assert check_threads(threads, cores, load).state == state


@pytest.mark.parametrize(
    ("name", "state", "text"),
    [
        ("sdpa", "ok", "sdpa"),
        ("flash_attention_2", "failure", "flash-attn"),
        ("sdqa", "failure", "policy.attention=sdqa: known are"),
    ],
)
def test_attention(name: str, state: str, text: str) -> None:
    check = check_attention(name)
    assert check.state == state
    assert text in check.found
    assert check.state == "ok" or "attention=sdpa" in check.way_out


@pytest.mark.parametrize(("dtype", "states"), [("float32", {"ok"}), ("bfloat16", {"ok", "failure"})])
def test_types_are_tried(dtype: str, states: set[str]) -> None:
    assert check_type(dtype).state in states
    assert check_type("float16").state in ("warning", "failure")


def test_accelerator_of_the_tests(make_subject: Any) -> None:
    assert [check.name for check in check_accelerator(make_subject().options.policy)] == [
        "accelerator",
        "attention",
        "type",
    ]


class _Answer(BaseHTTPRequestHandler):
    """Lets in whoever has the token `good`."""

    def do_GET(self) -> None:
        allowed = self.headers.get("Authorization") == "Bearer good"
        self.send_response(200 if allowed else 401)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    made = HTTPServer(("127.0.0.1", 0), _Answer)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()
    made.server_close()
    thread.join()


def tracking(make_subject: Any, uri: str | None) -> Any:
    return make_subject(tracking={"enabled": True, "uri": uri}).parameters


@pytest.mark.parametrize("uri", [None, "sqlite:///x.db", "file:///tmp/x"])
def test_local_tracking_needs_no_port(make_subject: Any, uri: str | None) -> None:
    (check,) = check_servers(needed_servers(tracking(make_subject, uri)), 1.0)
    assert (check.state, check.found) == ("ok", "none needed")


def test_tracking_server(make_subject: Any, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_TOKEN", raising=False)
    servers = needed_servers(tracking(make_subject, server))
    (refused,) = check_servers(servers, 5.0)
    assert (refused.state, "refuses this user (401)" in refused.found) == ("warning", True)
    assert "MLFLOW_TRACKING_TOKEN" in refused.way_out
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "good")
    (allowed,) = check_servers(servers, 5.0)
    assert allowed.state == "ok"


def test_tracking_server_that_is_not_there(make_subject: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (check,) = check_servers(needed_servers(tracking(make_subject, f"http://127.0.0.1:{port}")), 1.0)
    assert check.state == "warning"
    assert f"port {port} of 127.0.0.1 does not answer" in check.found
    assert "tracking.uri=null" in check.way_out


HUB = {"train_sokoban": {"policy": {"source": "hub", "path": "someone/gated"}}}


@pytest.mark.parametrize(
    ("changes", "token", "state", "text"),
    [
        ({}, "", "ok", "nothing comes from the hub"),
        (HUB, "", "failure", "the hub refuses access (401); no HF_TOKEN"),
        (HUB, "bad", "failure", "the hub refuses access (401); HF_TOKEN is set"),
        (HUB, "good", "ok", "lets this user in"),
        ({"sokoban": {"source": "hub"}}, "", "failure", "Xiaofeng77/sokoban"),
    ],
)
def test_keys(
    make_subject: Any,
    server: str,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    token: str,
    state: str,
    text: str,
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", token)
    (check,) = check_keys(make_subject(**changes).parameters, RUN, 5.0)
    assert check.state == state
    assert text in check.found
    assert "good" not in check.found and "bad" not in check.found
