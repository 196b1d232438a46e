"""A server in a thread of this process that speaks OpenEnv's frames: a walk to the right, with faults on demand."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import WSCloseCode, web

from geo_sokoban_pipeline.background import BackgroundLoop

LENGTH = 3


class FrameServer:
    """One session is one walk; a reset says how it goes.

    The keyword `how` names the fault of the second step, `place` the beginning, `slips` the seed of the chance that a
    step goes nowhere; without it there is none.

    Args:
        capacity: sessions that may be open.
        heartbeat: seconds between pings; a client that does not answer them is dropped.

    Attributes:
        frames: all that came, in order.
        opened: sessions so far.
        sessions: those that are open.
    """

    def __init__(self, capacity: int = 100, heartbeat: float | None = None) -> None:
        self.capacity, self.heartbeat = capacity, heartbeat
        self.frames: list[dict[str, Any]] = []
        self.opened, self.sessions = 0, set[Any]()
        self._together = 0

    @contextmanager
    def listen(self) -> Iterator[str]:
        """The address, for the `with` block."""
        loop = BackgroundLoop("frame server")
        runner = loop.run(self._start())
        try:
            host, port = runner.addresses[0][:2]
            yield f"ws://{host}:{port}"
        finally:
            loop.run(runner.cleanup())
            loop.close()

    async def _start(self) -> web.AppRunner:
        app = web.Application()
        app.add_routes([web.get("/ws", self._serve)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(heartbeat=self.heartbeat)
        await socket.prepare(request)
        self.opened += 1
        if len(self.sessions) >= self.capacity:
            await socket.send_json(error("CAPACITY_REACHED"))
            return socket
        self.sessions.add(socket)
        walk = Walk()
        try:
            async for message in socket:
                frame = json.loads(message.data)
                self.frames.append(frame)
                if frame["type"] == "close":
                    break
                data = frame["data"]
                if frame["type"] == "reset":
                    answer = walk.reset(**data)
                elif walk.how and walk.steps == 1:
                    answer = await self._fail(walk, socket, request)
                else:
                    answer = walk.step(data)
                if answer is not None:
                    await socket.send_str(answer if isinstance(answer, str) else json.dumps(answer))
        finally:
            self.sessions.discard(socket)
        return socket

    async def _fail(self, walk: Any, socket: web.WebSocketResponse, request: web.Request) -> Any:  # noqa: PLR0912
        """The answer to a step that fails; None: there is none."""
        answer: Any = None
        match walk.how:
            case "hang":
                await asyncio.sleep(60)
            case "late":
                await asyncio.sleep(0.6)
                answer = walk.step({"move": 1})
            case "drop":
                request.transport.abort()
            case "leave":
                await socket.close(code=WSCloseCode.INTERNAL_ERROR)
            case "bytes":
                await socket.send_bytes(b"{}")
            case "nonsense":
                answer = "<html>"
            case "state":
                answer = {"type": "state", "data": {"step_count": 1}}
            case str(code) if code.isupper():
                answer = error(code)
            case how:
                walk.note = "x" * 5 * 2**20 if how == "large" else ""
                answer = walk.step({"move": 1})
                if how == "together":  # answered as soon as two sessions wait
                    self._together += 1
                    while self._together < 2:
                        await asyncio.sleep(0.01)
                elif how in ("truncated", "terminated"):
                    answer["data"][how] = True
                elif how != "large":
                    answer["data"]["reward"] = how
        return answer


def error(code: str) -> dict[str, Any]:
    data = {"message": f"said {code}", "code": code}
    if code == "VALIDATION_ERROR":
        data["errors"] = [{"loc": ["move"], "msg": "Field required"}]
    return {"type": "error", "data": data}


class Walk:
    """One episode: a move is 1 or −1; the last place is worth 1."""

    def reset(self, how: Any = None, place: int = 0, slips: int | None = None, **others: Any) -> dict[str, Any]:
        self.how, self.place, self.steps, self.note, self.others = how, place, 0, "", others
        self.chance = None if slips is None else random.Random(slips)
        return self.seen(None)

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        if action.get("move") not in (1, -1):
            return error("VALIDATION_ERROR")
        self.steps += 1
        if self.chance is None or self.chance.random() < 0.5:
            self.place = max(0, self.place + action["move"])
        return self.seen(1.0 if self.place == LENGTH else None)

    def seen(self, reward: float | None) -> dict[str, Any]:
        metadata = {"place": self.place, "board": [0] * LENGTH}
        observation = {"place": self.place, "note": self.note, **self.others, "metadata": metadata}
        done = self.place == LENGTH
        return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}
