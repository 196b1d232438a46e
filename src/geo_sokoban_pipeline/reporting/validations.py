"""The same validation prompts over the course of training: what the policy did with each at every validation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from geo_sokoban_pipeline.envs.data_uris import png_data_uri
from geo_sokoban_pipeline.reporting.episodes import describe_end, is_solved
from geo_sokoban_pipeline.reporting.run_worlds import run_world
from geo_sokoban_pipeline.reporting.training_episodes import kind_order
from geo_sokoban_pipeline.rewards.math_answer.extraction import extract_answer
from geo_sokoban_pipeline.trajectories import Trajectory, table_to_trajectories

Parts = Mapping[str, Callable[..., pa.Table]]
PROMPTS, VALIDATIONS = 6, 6
_LETTERS = 40  # of an answer in the table
_ARROWS = {"up": "↑", "down": "↓", "left": "←", "right": "→"}


@dataclass(frozen=True)
class Answer:
    """What one policy version did with a prompt: in short, whether it succeeded, and in full for a pointer."""

    text: str
    solved: bool
    full: str


@dataclass(frozen=True)
class PromptHistory:
    """One validation prompt: its image as a data URI (None where it has none), a name, an answer per version."""

    image: str | None
    name: str
    answers: list[Answer | None]


@dataclass(frozen=True)
class Validations:
    """Policy versions, how they decoded, and the prompts."""

    versions: list[int]
    mode: str
    prompts: list[PromptHistory]


def follow_prompts(validations: Parts, prompts: int = PROMPTS, versions: int = VALIDATIONS) -> Validations | None:
    """The first validation prompt of each difficulty, from easy to hard, at every validation; None where none is
    stored.

    Greedy episodes, which differ by the policy alone, else sampled ones. Of many validations the first, the last and
    some between are shown, of many difficulties likewise.
    """
    names: dict[int, list[str]] = {}
    for name in validations:
        names.setdefault(int(name.split("/")[0].removeprefix("iter=")), []).append(name)
    chosen = _thin(sorted(names), versions)
    found = {version: _read(validations, names[version]) for version in chosen}
    found = {version: episodes for version, episodes in found.items() if episodes}
    if not found:
        return None
    greedy = all(any(is_greedy for is_greedy, _ in episodes) for episodes in found.values())
    by_version: dict[int, dict[str, Trajectory]] = {version: {} for version in found}
    for version, episodes in found.items():
        for is_greedy, episode in episodes:
            if is_greedy == greedy:
                by_version[version].setdefault(episode.task_id, episode)
    played = list(by_version[chosen[0]].values()) if chosen[0] in by_version else []
    first: dict[str | None, Trajectory] = {}
    for episode in played:
        first.setdefault(episode.difficulty, episode)
    kinds = sorted(first, key=lambda kind: (kind is None, kind_order(kind or "")))
    # A task without difficulties shows its first prompts.
    shown = [first[kind] for kind in _thin(kinds, prompts)] if len(kinds) > 1 else played[:prompts]
    histories = [_follow(one, [by_version[version].get(one.task_id) for version in found]) for one in shown]
    return Validations(list(found), "greedy" if greedy else "sampled", histories) if histories else None


def _read(validations: Parts, names: Sequence[str]) -> list[tuple[bool, Trajectory]]:
    episodes = [episode for name in names for episode in table_to_trajectories(validations[name]())]
    return [(bool(json.loads(episode.sampling or "{}").get("greedy")), episode) for episode in episodes]


def _thin(items: Sequence[Any], most: int) -> list[Any]:
    if len(items) <= most:
        return list(items)
    return [items[round(at * (len(items) - 1) / (most - 1))] for at in range(most)]


def _follow(prompt: Trajectory, episodes: Sequence[Trajectory | None]) -> PromptHistory:
    image = png_data_uri(prompt.images[0]) if prompt.images else None
    kind = (prompt.difficulty or "").replace("_", " ")
    name = f"optimal: {kind}" if kind.isdigit() else kind
    return PromptHistory(image, name, [None if episode is None else _answer(episode) for episode in episodes])


def _answer(episode: Trajectory) -> Answer:
    turns = [turn for turn in episode.turns if turn.role == "assistant"]
    if run_world(episode.task).world == "sokoban":
        text = "".join(_ARROWS.get(action, action) for turn in turns for action in (turn.action or "·").split(","))
    else:
        text = " → ".join(turn.action or extract_answer(turn.text) or "–" for turn in turns)
    short = text if len(text) <= _LETTERS else f"{text[: _LETTERS - 1]}…"
    full = " ".join([describe_end(episode), *(turn.text for turn in turns)])
    return Answer(short or "–", is_solved(episode), full[:600])
