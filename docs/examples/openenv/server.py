"""A game behind OpenEnv's protocol: a boat sails to a buoy, and gusts drive it aside.

`python server.py [port [capacity]]`
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import sys
from typing import Any

from PIL import Image

SIDE, CELL = 4, 16  # cells of the sea; pixels of a cell, which are a patch of the policy
WAYS = {"north": (0, -1), "south": (0, 1), "west": (-1, 0), "east": (1, 0)}


class Boat:
    """One episode. `seed` decides where boat and buoy are, `gusts` where the wind drives the boat."""

    def reset(self, seed: int = 0, gusts: int | None = None) -> dict[str, Any]:
        places = [(x, y) for x in range(SIDE) for y in range(SIDE)]
        self.boat, self.buoy = random.Random(seed).sample(places, 2)
        self.wind, self.steps = random.Random(seed if gusts is None else gusts), 0
        return self.seen(None)

    def step(self, direction: str) -> dict[str, Any]:
        x, y = WAYS[direction]
        if self.wind.random() < 0.1:
            x, y = y, x
        self.boat = tuple(min(max(place + move, 0), SIDE - 1) for place, move in zip(self.boat, (x, y), strict=True))
        self.steps += 1
        return self.seen(float(self.boat == self.buoy))

    def seen(self, reward: float | None) -> dict[str, Any]:
        sea = Image.new("RGB", (SIDE, SIDE), (20, 60, 120))
        sea.putpixel(self.buoy, (255, 120, 0))
        sea.putpixel(self.boat, (255, 255, 255))
        file = io.BytesIO()
        sea.resize((CELL * SIDE, CELL * SIDE), Image.Resampling.NEAREST).save(file, "PNG")
        picture = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        seen = {"picture": picture, "boat": list(self.boat), "buoy": list(self.buoy), "metadata": {"steps": self.steps}}
        data = {"observation": seen, "reward": reward, "done": self.boat == self.buoy, "metadata": seen["metadata"]}
        return {"type": "observation", "data": data}


def refuse(code: str, message: object) -> dict[str, Any]:
    return {"type": "error", "data": {"message": str(message), "code": code}}


def answer(game: Any, raw: str) -> dict[str, Any] | None:
    """The frame that answers another one; None: the session ends."""
    try:
        frame = json.loads(raw)
        kind, data = frame.get("type"), frame.get("data", {})
        if kind == "reset":
            return game.reset(**{name: data[name] for name in ("seed", "gusts") if name in data})
        if kind == "step":
            way = data.get("direction")
            return game.step(way) if way in WAYS else refuse("VALIDATION_ERROR", f"no action: {data}")
        if kind == "state":
            return {"type": "state", "data": {"episode_id": None, "step_count": game.steps}}
        return None if kind == "close" else refuse("UNKNOWN_TYPE", kind)
    except json.JSONDecodeError as error:
        return refuse("INVALID_JSON", error)
    except Exception as error:  # a game may raise anything; its session goes on
        return refuse("EXECUTION_ERROR", error)


def make_app(capacity: int) -> Any:
    from aiohttp import web

    sessions: set[Any] = set()

    async def session(request: Any) -> Any:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if len(sessions) >= capacity:
            await socket.send_json(refuse("CAPACITY_REACHED", f"{capacity} sessions are open"))
            return socket
        sessions.add(socket)
        try:
            game = Boat()
            async for message in socket:
                # In a thread, so that a slow step holds up its own session alone.
                if (frame := await asyncio.to_thread(answer, game, message.data)) is None:
                    break
                await socket.send_json(frame)
        finally:
            sessions.discard(socket)
        return socket

    app = web.Application()
    app.add_routes([web.get("/ws", session), web.get("/health", lambda _: web.json_response({"status": "healthy"}))])
    return app


if __name__ == "__main__":
    from aiohttp import web

    port, capacity = [*map(int, sys.argv[1:]), *(8000, 256)[len(sys.argv) - 1 :]]
    web.run_app(make_app(capacity), host="127.0.0.1", port=port, print=None)
