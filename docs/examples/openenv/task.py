"""A game behind an OpenEnv server as a task: a boat sails to a buoy, one way a response."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from geo_sokoban_pipeline.envs.adapters.openenv import OpenEnv, OpenEnvTask
from geo_sokoban_pipeline.envs.base import Vocabulary, Words
from geo_sokoban_pipeline.envs.report import TaskReport


def ways_to_buoy(seen: Mapping[str, Any]) -> list[str]:
    """Ways that bring the boat nearer: the observation has fields that the policy does not see."""
    (x, y), (to_x, to_y) = seen["boat"], seen["buoy"]
    found = {"west": to_x < x, "east": to_x > x, "north": to_y < y, "south": to_y > y}
    return [way for way, is_nearer in found.items() if is_nearer]


class Skipper:
    """Sails nearer, or with a chance of `noise` anywhere."""

    def __init__(self, noise: float) -> None:
        self.noise = noise

    def respond(self, env: OpenEnv, generator: random.Random) -> str:
        is_lost = generator.random() < self.noise
        return generator.choice(env.words if is_lost else ways_to_buoy(env.observation))


def build_teacher(name: str, patience: int | None, noise: float) -> Skipper:
    return Skipper(noise)


class BoatReport(TaskReport):
    difficulty = "distance"
    solves = "reaches the buoy in"
    rivals = ("random",)


class BoatTask(OpenEnvTask):
    name = "boat"
    title = "a boat behind an OpenEnv server"
    words = Words("sea", "seas", "success rate", "at the buoy", "not at the buoy")
    environment = "ws://127.0.0.1:8000"
    vocabulary = Vocabulary(("user", "assistant", "north", "south", "west", "east"))
    difficulty = "distance"
    ordered = True
    plain_response = "north"
    report = BoatReport()

    @property
    def train_defaults(self) -> Mapping[str, Any]:
        teacher = {"factory": f"{__file__}:build_teacher", "name": "skipper"}
        return {**super().train_defaults, "warm_start": {"teacher": teacher}}

    def describe(self, env: OpenEnv) -> Mapping[str, Any]:
        (x, y), (to_x, to_y) = env.observation["boat"], env.observation["buoy"]
        return {"distance": abs(x - to_x) + abs(y - to_y)}


TASK = BoatTask()
