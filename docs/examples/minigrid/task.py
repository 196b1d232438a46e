"""MiniGrid as a task: the triangle of an empty room walks to the green square, one action a response."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.policy import ExpertOptions
from geo_sokoban_pipeline.envs.adapters.gymnasium import GymnasiumEnv, GymnasiumTask
from geo_sokoban_pipeline.envs.base import Breakdown, Column, Vocabulary, Words
from geo_sokoban_pipeline.envs.metrics import (
    EpisodeRecord,
    FinishedEpisode,
    clusters_of,
    count_solved,
    mean_of,
    read_record,
)
from geo_sokoban_pipeline.envs.report import TaskReport

AHEAD = ((1, 0), (0, 1), (-1, 0), (0, -1))  # by the direction of the triangle: right, down, left, up


def shortest_way(env: GymnasiumEnv) -> list[str]:
    """The fewest actions to the green square from here, by breadth-first search; it must be reachable."""
    room = env.env.unwrapped
    start = (int(room.agent_pos[0]), int(room.agent_pos[1]), int(room.agent_dir))
    ways: dict[tuple[int, int, int], list[str]] = {start: []}
    waiting = deque([start])
    while True:
        x, y, turned = place = waiting.popleft()
        cell = room.grid.get(x, y)
        if cell is not None and cell.type == "goal":
            return ways[place]
        ahead = (x + AHEAD[turned][0], y + AHEAD[turned][1])
        cell = room.grid.get(*ahead)
        nexts = {"left": (x, y, (turned - 1) % 4), "right": (x, y, (turned + 1) % 4)}
        if cell is None or cell.can_overlap():
            nexts["forward"] = (*ahead, turned)
        for action, other in nexts.items():
            if other not in ways:
                ways[other] = [*ways[place], action]
                waiting.append(other)


class Walker:
    """Takes the first action of a shortest way."""

    def respond(self, env: GymnasiumEnv, generator: random.Random) -> str:
        return shortest_way(env)[0]


class Wanderer:
    """Takes any action that changes something: left, right, or forward unless a wall is ahead."""

    def respond(self, env: GymnasiumEnv, generator: random.Random) -> str:
        room = env.env.unwrapped
        ahead = room.grid.get(*room.front_pos)
        can_walk = ahead is None or ahead.can_overlap()
        return generator.choice([word for word in env.words if can_walk or word != "forward"])


def build_teacher(name: str, patience: int | None, noise: float) -> Walker | Wanderer:
    return Wanderer() if name == "wanderer" else Walker()


def describe_expert(options: ExpertOptions, rows: Any) -> str:
    return "SFT on random actions that change something" if options.name == "wanderer" else "SFT on shortest ways"


@dataclass(frozen=True)
class WalkRecord(EpisodeRecord):
    """Beside success and reward: actions made, and the fewest that reach the goal."""

    steps: int | None
    fewest: int


class MiniGridReport(TaskReport):
    difficulty = "fewest actions"
    solves = "reaches the goal in"
    rivals = ("random",)
    agents = {"random": ("random play", "random"), "shortest": ("shortest way", "legal")}


class MiniGridTask(GymnasiumTask):
    name = "minigrid"
    title = "MiniGrid"
    words = Words("room", "rooms", "success rate", "at the goal", "not at the goal")
    environment = "MiniGrid-Empty-Random-6x6-v0"
    vocabulary = Vocabulary(("user", "assistant", "left", "right", "forward"))
    difficulty = "fewest"
    ordered = True
    plain_response = "forward"
    columns = (
        Column(
            "actions ÷ fewest",
            lambda row: row.get("over_fewest"),
            "number",
            note="mean over the episodes that reach the goal",
        ),
    )
    breakdowns = (
        Breakdown("fewest actions", lambda row: {cell["fewest"]: cell for cell in row.get("by_fewest") or []}),
    )
    report = MiniGridReport()

    @property
    def train_defaults(self) -> Mapping[str, Any]:
        teacher = {"factory": f"{__file__}:build_teacher", "name": "wanderer"}
        return {**super().train_defaults, "warm_start": {"teacher": teacher}}

    def describe(self, env: GymnasiumEnv) -> Mapping[str, Any]:
        return {"fewest": len(shortest_way(env))}

    def steps_to_goal(self, env: Any) -> int | None:
        return len(shortest_way(env))

    def baselines(self, options: TrainOptions, training: Any) -> Mapping[str, ExpertOptions]:
        """Beside random play, the best that there is."""
        best = ExpertOptions(factory=f"{__file__}:build_teacher", name="shortest")
        return {**super().baselines(options, training), "shortest": best}

    def record(self, episode: FinishedEpisode) -> WalkRecord:
        steps = episode.metrics.get("steps")
        return WalkRecord(
            **read_record(episode), steps=None if steps is None else int(steps), fewest=int(episode.row["fewest"])
        )

    def summarise(self, records: Sequence[WalkRecord]) -> dict[str, Any]:
        """Entries of a row of the summary, which the column and the breakdown above read."""
        lengths = {record.fewest for record in records}
        groups = {fewest: [one for one in records if one.fewest == fewest] for fewest in lengths}
        return {
            "over_fewest": mean_of([one.steps / one.fewest for one in records if one.success and one.steps]),
            "by_fewest": [
                {"fewest": fewest, **count_solved([one.success for one in group], clusters_of(group))}
                for fewest, group in sorted(groups.items())
            ],
        }


TASK = MiniGridTask()
