"""Frames of the boat of `docs/examples/openenv`: what a client sends, and how a server of OpenEnv answers.

`python -m openenv_frames` (in `tests`) records `openenv_frames.json` from a server of the package openenv.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from geo_sokoban_pipeline.envs.images import read_data_uri

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".venv-openenv" / "bin" / "python"
RECORDED = Path(__file__).with_suffix(".json")
PLACES = 3
# Sessions one after the other, and of each the texts that it sends.
SENT = (
    (
        '{"type": "reset", "data": {"seed": 3, "gusts": 5}}',
        '{"type": "step", "data": {"direction": "north"}}',
        '{"type": "step", "data": {"direction": "up"}}',
        '{"type": "step", "data": {}}',
        '{"type": "state"}',
        '{"type": "dance"}',
        "{no json",
        '{"type": "step", "data": {"direction": "west"}}',
        '{"type": "step", "data": {"direction": "east"}}',
        '{"type": "step", "data": {"direction": "east"}}',
        '{"type": "step", "data": {"direction": "north"}}',
        '{"type": "state"}',
        '{"type": "close"}',
    ),
    ('{"type": "step", "data": {"direction": "north"}}', '{"type": "close"}'),
)


@contextmanager
def running(python: str | Path, script: Path, *arguments: str) -> Iterator[str]:
    """The address of a server in a process of its own, for the `with` block."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen([str(python), str(script), str(port), *arguments], env=environment)
    try:
        deadline = time.monotonic() + 120
        while not _answers(port):
            assert process.poll() is None and time.monotonic() < deadline, "the server does not start"
            time.sleep(0.1)
        yield f"ws://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


async def talk(url: str) -> list[list[Any]]:
    """The answers of a server to `SENT`, frame by frame; None: it closes the connection."""
    found = []
    async with aiohttp.ClientSession() as client:
        for texts in SENT:
            async with client.ws_connect(f"{url}/ws") as session:
                answers = []
                for text in texts:
                    await session.send_str(text)
                    answer = await session.receive(timeout=20)
                    answers.append(json.loads(answer.data) if isinstance(answer.data, str) else None)
                found.append(answers)
        # One session more than there are places: an answer comes before the first frame.
        sessions = [await client.ws_connect(f"{url}/ws") for _ in range(PLACES + 1)]
        found.append([json.loads((await sessions[-1].receive(timeout=20)).data)])
        assert (await sessions[-1].receive(timeout=20)).type == aiohttp.WSMsgType.CLOSE
        for session in sessions:
            await session.close()
    return found


def plain(found: Any) -> Any:
    """Frames as they are compared: errors by their code, pictures by their pixels, since encoders differ."""
    if isinstance(found, list):
        return [plain(one) for one in found]
    if not isinstance(found, dict):
        return found
    if found.get("type") == "error":
        return {"type": "error", "code": found["data"]["code"]}
    values = {name: plain(value) for name, value in found.items()}
    if "picture" in values:
        picture = read_data_uri(values["picture"], max_bytes=2**20, max_pixels=2**20)
        values["picture"] = np.asarray(picture).tolist()
    return values


if __name__ == "__main__":
    with running(PYTHON, ROOT / "tests" / "openenv_package.py") as address:
        RECORDED.write_text(json.dumps(asyncio.run(talk(address)), indent=1) + "\n", encoding="utf-8")
