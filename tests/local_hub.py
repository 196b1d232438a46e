"""A hub on this machine, for tests of uploads: the requests of `HfApi.upload_folder`, answered as the hub's API does.

It keeps what is committed in a folder per repository. It asks for every file inside the commit, also for a large one.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

TOKEN = "hf_of_this_test"


class LocalHub(ThreadingHTTPServer):
    """The server.

    Attributes:
        folder: a folder for each repository, such as `me/episodes`.
        made: what was asked when a repository was made, by its name.
        commits: by repository, how many.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.folder = folder
        self.made: dict[str, dict[str, Any]] = {}
        self.commits: dict[str, int] = {}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def files(self, name: str) -> dict[str, bytes]:
        """Files of a repository by their paths."""
        root = self.folder / name
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


class _Request(BaseHTTPRequestHandler):
    server: LocalHub

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        found = re.fullmatch(r"/api/datasets/(.+)/tree/main", urlsplit(self.path).path)
        if found is None:
            return self.answer(404, {"error": "not found"})
        files = self.server.files(found[1])
        self.answer(
            200, [{"type": "file", "path": name, "size": len(data), "oid": "0" * 40} for name, data in files.items()]
        )

    def do_POST(self) -> None:
        path, body = urlsplit(self.path).path, self.body()
        if path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, {"error": "Invalid user token."})
        if path == "/api/repos/create":
            return self.make(json.loads(body))
        for pattern, act in (
            (r"/api/datasets/(.+)/preupload/main", self.sort_files),
            (r"/api/datasets/(.+)/commit/main", self.commit),
        ):
            if found := re.fullmatch(pattern, unquote(path)):
                return act(found[1], body)
        return self.answer(404, {"error": f"not found: {path}"})

    def make(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        known = name in self.server.made
        if not known:
            self.server.made[name] = asked
        self.answer(409 if known else 200, {"url": f"{self.server.address}/datasets/{name}"})

    def sort_files(self, name: str, body: bytes) -> None:
        files = [
            {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in json.loads(body)["files"]
        ]
        self.answer(200, {"files": files})

    def commit(self, name: str, body: bytes) -> None:
        root = self.server.folder / name
        for line in body.splitlines():
            asked = json.loads(line)
            kind, value = asked["key"], asked["value"]
            if kind == "deletedFile":
                (root / value["path"]).unlink()
            elif kind == "file":
                (root / value["path"]).parent.mkdir(parents=True, exist_ok=True)
                (root / value["path"]).write_bytes(base64.b64decode(value["content"]))
        self.server.commits[name] = self.server.commits.get(name, 0) + 1
        number = f"{self.server.commits[name]:040d}"
        self.answer(
            200,
            {
                "success": True,
                "commitOid": number,
                "commitUrl": f"{self.server.address}/datasets/{name}/commit/{number}",
                "hookOutput": "",
            },
        )

    def body(self) -> bytes:
        """The request's body, whole or in chunks."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        pieces = []
        while size := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def answer(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def run_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A hub that this process takes for the real one, with a token that it accepts."""
    import huggingface_hub.constants

    hub = LocalHub(folder)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.address)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    thread = threading.Thread(target=hub.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
