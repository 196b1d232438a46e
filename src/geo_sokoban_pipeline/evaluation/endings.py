"""Endings: what the evaluation sees of a finished episode, whether a policy or somebody else has played it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from geo_sokoban_pipeline.trajectories import Trajectory

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Ending:
    """A finished episode.

    Attributes:
        row: of the prompts.
        metrics: the environment's numbers; empty where the episode failed.
        ret: reward; None where it was not graded.
        replies: texts, in order.
        tokens: written by the policy; None where no policy played.
        truncated: cut off at a limit.
    """

    row: Mapping[str, Any]
    metrics: Mapping[str, float]
    ret: float | None
    replies: Sequence[str] = ()
    tokens: int | None = None
    truncated: bool = False


@dataclass(frozen=True)
class Disguise:
    """A way to show a policy pictures that tell it nothing.

    Attributes:
        suffix: of the name of its row in the summary.
        blank: black pictures.
        prompts: as they are then played.
    """

    suffix: str
    blank: bool
    prompts: Rows


def read_ending(trajectory: Trajectory, row: Mapping[str, Any]) -> Ending:
    """Ending of an episode that a policy has played."""
    return Ending(
        row=row,
        metrics=trajectory.metrics,
        ret=trajectory.reward,
        replies=[turn.text for turn in trajectory.turns if turn.role == "assistant"],
        tokens=int(trajectory.loss_mask.sum()),
        truncated=trajectory.status == "truncated",
    )
