"""Evaluation of Sokoban: records of levels, and what the summary says of what was played."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.envs.sokoban.env import SokobanEnv
from geo_sokoban_pipeline.evaluation.metrics import Disguise, Ending, EpisodeRecord, Rows

logger = logging.getLogger(__name__)
_NUMBERS = ("solve_rate", "low", "high", "mean_return", "invalid_share")


def record_level(ending: Ending) -> EpisodeRecord:
    """What the summary keeps of an episode."""
    length, steps = ending.row.get("solution_length"), ending.metrics.get("steps")
    return EpisodeRecord(
        prompt_id=str(ending.row["id"]),
        success=ending.metrics.get("success", 0.0) >= 0.5,
        ret=ending.ret,
        steps=None if steps is None else int(steps),
        optimal_steps=None if length is None else int(length),
        turns=int(ending.metrics.get("turns", len(ending.replies))),
        invalid_turns=int(ending.metrics.get("invalid_turns", 0.0)),
    )


def describe_levels(prompts: Rows, options: TrainOptions) -> dict[str, Any]:
    """`layouts` (of walls) among the levels, and `move_limit`."""
    layouts = {row["layout_hash"] for row in prompts if row.get("layout_hash")}
    return {"layouts": len(layouts), "move_limit": move_limit(options)}


def level_numbers(row: Mapping[str, Any]) -> dict[str, float | None]:
    """Numbers of a row that a validation reports."""
    return {name: row[name] for name in _NUMBERS}


def level_disguises(prompts: Rows, options: TrainOptions, seed: int) -> list[Disguise]:
    """Blank pictures, where the options say so and there are pictures."""
    if not options.evaluation.blank_images:
        return []
    if prompts and all("images" in row and len(row["images"]) == 0 for row in prompts):
        logger.info("no evaluation with blank images: the boards are shown as text")
        return []
    return [Disguise("_blank", True, prompts)]


def moves_per_turn(options: TrainOptions) -> int:
    """Moves of a reply that the environment carries out."""
    default = inspect.signature(SokobanEnv).parameters["max_actions_per_turn"].default
    return int(options.env.args.get("max_actions_per_turn", default))


def move_limit(options: TrainOptions) -> int:
    """Moves of an episode at most, for policies and players alike."""
    return options.rollout.max_turns * moves_per_turn(options)
