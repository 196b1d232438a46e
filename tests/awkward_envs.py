"""Environments of Sokoban that end their process, stop it, or do not answer, for tests of rollout workers."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.envs.sokoban.env import build_env as build_sokoban


class AwkwardEnv:
    """An environment one of whose steps may be awkward; all else is Sokoban's.

    Args:
        sign: sent to this process, once: where `mark`, a file, is missing.
        seconds: that the step sleeps.
        number: of the step, from 1.
    """

    def __init__(self, env: Any, sign: int | None, mark: str, seconds: float, number: int) -> None:
        self._env, self._sign, self._mark, self._seconds = env, sign, Path(mark), seconds
        self._steps, self._number = 0, number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def step(self, text: str) -> Any:
        self._steps += 1
        if self._steps == self._number:
            time.sleep(self._seconds)
            if self._sign is not None and not self._mark.exists():
                self._mark.touch()
                os.kill(os.getpid(), self._sign)
        return self._env.step(text)


def build_env(sample: dict[str, Any], args: dict[str, Any]) -> Any:
    """Environment of a row: awkward where its id is `args["row"]` or that is `any`, else Sokoban's own."""
    own = dict(args)
    row, sign, mark, seconds = (own.pop(name, None) for name in ("row", "sign", "mark", "seconds"))
    step = own.pop("step", 2)
    env = build_sokoban(sample, own)
    if row is None or row not in (sample["id"], "any"):
        return env
    number = None if sign is None else getattr(signal, sign)
    return AwkwardEnv(env, number, mark or "", seconds or 0.0, step)
