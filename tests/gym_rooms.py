"""Environments of gymnasium for tests: a walk to the right whose steps may slip, hang, raise, or show nothing."""

from __future__ import annotations

import threading
from typing import Any

import gymnasium
import numpy as np

waiting = threading.Event()  # set at the end of a test, so that no thread is left
LENGTH = 4


class Walk(gymnasium.Env[Any, Any]):
    """Actions 1 (left) and 2 (right) on a line; the last place is worth 1. The seed decides where it begins.

    Args:
        slips: chance that a step goes the other way.
        stops_at: the place whose step hangs or raises, by `how`.
        shown: what `render` gives.
        says: what the info says about success.
        prize: for the last place.
    """

    metadata = {"render_modes": ["rgb_array"]}

    def __init__(
        self,
        render_mode: str | None = None,
        slips: float = 0.0,
        stops_at: int = -1,
        how: str = "raise",
        shown: str = "image",
        says: bool | None = None,
        prize: float = 1.0,
    ) -> None:
        self.render_mode, self.slips, self.stops_at, self.how = render_mode, slips, stops_at, how
        self.shown, self.says, self.prize = shown, says, prize
        self.action_space = gymnasium.spaces.Discrete(2, start=1)
        self.observation_space = gymnasium.spaces.Dict({})

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(2))
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self.place == self.stops_at and self.how == "hang":
            waiting.wait(60)
        if self.place == self.stops_at:
            raise RuntimeError("the floor is open")
        assert type(action) is int and action in (1, 2), "no text gets here"
        forward = (action == 2) != (self.np_random.random() < self.slips)
        self.place = max(0, self.place + (1 if forward else -1))
        done = self.place == LENGTH
        info = {
            "place": np.int64(self.place),
            "board": object(),
            "odds": float("nan"),
            **({} if self.says is None else {"is_success": self.says}),
        }
        return self._seen(), np.float32(self.prize if done else 0.0), done, False, info

    def _seen(self) -> dict[str, Any]:
        return {"image": self._picture(), "goal": "the end", "place": self.place}

    def _picture(self) -> np.ndarray:
        picture = np.zeros((32, 32 * LENGTH, 3), np.uint8)
        picture[:, 32 * self.place :, 1] = 255
        return picture

    def render(self) -> Any:
        grey = self._picture()[..., 1]
        return {"image": self._picture(), "grey": grey, "floats": grey / 255.0, "nothing": None}[self.shown]


gymnasium.register("Tests/Walk-v0", Walk, max_episode_steps=6)
