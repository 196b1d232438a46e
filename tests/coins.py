"""A task of one turn that any policy solves now and then, for tests that need both kinds of episodes at no cost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from geo_sokoban_pipeline.envs.base import user_message


class CoinEnv:
    """One response; solved where the number of its characters is even. Prompts with `sure` are always solved."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.row, self.solved = row, False

    def reset(self) -> tuple[None, dict[str, Any]]:
        return None, {}

    def step(self, text: str) -> tuple[None, bool, dict[str, Any]]:
        self.solved = len(text) % 2 == 0 or bool(self.row.get("sure"))
        return None, True, {"turn_reward": float(self.solved)}

    def format_observation(self, observation: Any) -> dict[str, Any]:
        return user_message(observation)

    def final_metrics(self) -> dict[str, float]:
        return {"success": float(self.solved)}

    def close(self) -> None:
        """Nothing is held."""


def build_env(row: dict[str, Any], args: dict[str, Any]) -> CoinEnv:
    return CoinEnv(row)


class Caller:
    """An expert that says heads or tails."""

    def respond(self, env: Any, generator: Any) -> str:
        return str(generator.choice(("up", "down")))


def build_teacher(name: str, patience: int | None, noise: float) -> Caller:
    return Caller()


def solved_reward(outcome: Any, args: dict[str, Any]) -> dict[str, float]:
    return {"reward": float(len(outcome.responses[0]) % 2)}


def rows_of(count: int, lengths: Sequence[int] = (1,)) -> list[dict[str, Any]]:
    """Rows with one text, so that only a seed can tell episodes apart."""
    lengths = list(itertools.islice(itertools.cycle(lengths), count))
    return [
        {"id": f"row{n}", "prompt": "Which way?", "images": None, "solution_length": length}
        for n, length in enumerate(lengths)
    ]
