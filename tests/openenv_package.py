"""The boat of `docs/examples/openenv` behind the classes of the package openenv: `python openenv_package.py <port>`.

It runs in an environment of its own (`make openenv-env`). Three sessions may be open. A reset with `how` makes the
second step raise or sleep; pings come five times a second.
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path
from typing import Any, Literal

import uvicorn
from openenv.core.env_server import Action, ConcurrencyConfig, Environment, Observation, State, create_fastapi_app

SERVER = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "examples" / "openenv" / "server.py"))


class Way(Action):
    direction: Literal["north", "south", "west", "east"]


class Sea(Observation):
    picture: str
    boat: list[int]
    buoy: list[int]


class BoatEnvironment(Environment[Way, Sea, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.game = SERVER["Boat"]()

    def reset(
        self, seed: int = 0, episode_id: str | None = None, gusts: int | None = None, how: str = "", **others: Any
    ) -> Sea:
        self.how = how
        return self._seen(self.game.reset(seed, gusts))

    def step(self, action: Way, timeout_s: float | None = None, **others: Any) -> Sea:
        if self.game.steps == 1 and self.how:
            time.sleep(2.0 if self.how == "sleep" else 0.0)
            raise RuntimeError("the mast is broken")
        return self._seen(self.game.step(action.direction))

    def _seen(self, frame: dict[str, Any]) -> Sea:
        data = frame["data"]
        return Sea(**data["observation"], reward=data["reward"], done=data["done"])

    @property
    def state(self) -> State:
        return State(episode_id=None, step_count=self.game.steps)


if __name__ == "__main__":
    limits = ConcurrencyConfig(max_concurrent_envs=3, session_timeout=60)
    app = create_fastapi_app(BoatEnvironment, Way, Sea, concurrency_config=limits, state_cls=State)
    uvicorn.run(
        app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", ws_ping_interval=0.2, ws_ping_timeout=0.2
    )
