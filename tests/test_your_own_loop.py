"""`docs/your_own_loop.md`: its functions run as they stand, and the first one gives the bits of the built-in loop."""

from __future__ import annotations

import inspect
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from geo_sokoban_pipeline.background import BackgroundLoop
from geo_sokoban_pipeline.rollout.episode import Episode
from kill_hook import kill_at
from rollout.scripted import make_settings, play_scripted
from runs import ROOT, assert_same_run, finish, kedro_command, params, read_run

PAGE = (ROOT / "docs" / "your_own_loop.md").read_text(encoding="utf-8")
FIRST, SERVED = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
SMALL = {"loop": {"iterations": 2}, "warm_start": {"steps": 40}}


@pytest.mark.slow
def test_a_run_with_the_loop_of_the_page_has_the_bits_of_a_run_without(tmp_path: Path) -> None:
    """Also where it was killed and goes on."""
    (tmp_path / "loop.py").write_text(FIRST, encoding="utf-8")
    own = {"rollout": {"function": f"{tmp_path / 'loop.py'}:generate"}}
    found = []
    for name, given in (("built_in", {}), ("own", own)):
        command = ("--pipelines=train_sokoban", "--env=test", *params(SMALL, given))
        if given:
            killed = kill_at("after_save:train_sokoban.trajectories", 1)
            finish(kedro_command(*command, data_root=tmp_path / name, **killed), -signal.SIGKILL)
        finish(kedro_command(*command, data_root=tmp_path / name))
        found.append(read_run(tmp_path / name))
    assert_same_run(*found)
    finish(kedro_command("--pipelines=audit_sokoban", "--env=test", *params(SMALL, own), data_root=tmp_path / "own"))
    audits = [*(tmp_path / "own").rglob("audit.json")]
    replays = [check for check in json.loads(audits[0].read_text())["checks"] if check["check"] == "replay"]
    assert replays
    for check in replays:
        assert check["checked"]
        assert check["findings"] == []


def test_a_server_may_be_the_environment(tmp_path: Path) -> None:
    async def reply(request: web.Request) -> web.Response:
        text = (await request.json())["text"]
        return web.json_response({"score": len(text) / 2, "done": text == "bye", "text": text.upper()})

    async def serve() -> str:
        app = web.Application()
        app.router.add_post("/", reply)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}/"

    (tmp_path / "served.py").write_text(SERVED, encoding="utf-8")
    loop = BackgroundLoop("server")
    try:
        row: dict[str, Any] = {"url": loop.run(serve())}
        responses = {0: [("ab", "stop"), ("bye", "stop")], 1: [("bye", "stop")], 2: [("a", "stop")] * 2}
        settings = make_settings(function=f"{tmp_path / 'served.py'}:generate", max_turns=2)
        episodes, _ = play_scripted(responses, settings, [row, row, {"url": "http://127.0.0.1:9/"}])
    finally:
        loop.close()
    assert [episode.status for episode in episodes] == ["completed", "completed", "failed"]
    assert [turn.text for turn in episodes[0].turns[1:]] == ["ab", "AB", "bye"]
    assert [turn.reward for turn in episodes[0].turns[1::2]] == [1.0, 1.5]


def test_every_call_of_the_page_is_there() -> None:
    named = set(re.findall(r"^\| `(?:await )?session\.(\w+)", PAGE, re.MULTILINE))
    assert {"open", "prompt", "respond", "step", "end_turn", "observe", "call", "is_pending"} == named
    for name in named:
        assert hasattr(Episode, name)
        is_awaited = f"`await session.{name}(" in PAGE
        assert is_awaited == inspect.iscoroutinefunction(getattr(Episode, name)), name
