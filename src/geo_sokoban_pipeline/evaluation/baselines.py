"""Baselines: players without a policy on the same levels, with the same rules and the same number of turns."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any

from geo_sokoban_pipeline.envs.plugins import load_object
from geo_sokoban_pipeline.envs.sokoban.env import SokobanEnv
from geo_sokoban_pipeline.envs.sokoban.teacher import build_teacher
from geo_sokoban_pipeline.evaluation.metrics import EpisodeRecord
from geo_sokoban_pipeline.options.policy import TeacherOptions
from geo_sokoban_pipeline.options.training import TrainOptions
from geo_sokoban_pipeline.rollout.outcome import Outcome
from geo_sokoban_pipeline.seeding import python_generator

logger = logging.getLogger(__name__)


def play_baseline(
    name: str, prompts: Sequence[dict[str, Any]], options: TrainOptions, seed: int, patience: int | None = None
) -> list[EpisodeRecord]:
    """Play every prompt once with a player of `envs.sokoban.players`, with as many moves as a policy may make.

    An episode that raises counts as not solved and without a return, as a policy's does; the first error is logged.

    Args:
        name: `random`, `random_legal`, `solver` or `direct`.
        patience: of the player `direct`.
    """
    build_env = load_object(options.env.factory, default_name="build_env")
    reward = load_object(options.reward.function, default_name="reward")
    records: list[EpisodeRecord] = []
    errors: list[str] = []
    for row in prompts:
        try:
            records.append(_play(name, row, build_env, reward, options, seed, patience))
        except Exception as error:  # an own environment or reward may raise anything; the other episodes count
            errors.append(f"{type(error).__name__}: {error}")
            records.append(EpisodeRecord(str(row["id"]), False, None, None, row.get("solution_length"), 0, 0))
    if errors:
        logger.warning(
            "%d of %d episodes of the player %s failed; first: %s", len(errors), len(prompts), name, errors[0]
        )
    return records


def moves_per_turn(options: TrainOptions) -> int:
    """Moves of a reply that the environment carries out."""
    default = inspect.signature(SokobanEnv).parameters["max_actions_per_turn"].default
    return int(options.env.args.get("max_actions_per_turn", default))


def move_limit(options: TrainOptions) -> int:
    """Moves of an episode at most, for policies and players alike."""
    return options.rollout.max_turns * moves_per_turn(options)


def describe_teacher(teacher: TeacherOptions) -> str:
    """Name of the teacher's row in the summary."""
    return f"teacher ({teacher.name})"


def _play(
    name: str, row: dict[str, Any], build_env: Any, reward: Any, options: TrainOptions, seed: int, patience: int | None
) -> EpisodeRecord:
    generator = python_generator(seed, "baseline", name, str(row["id"]))
    env = build_env(row, options.env.args)
    env.reset()
    player = build_teacher(name, patience)
    infos: list[dict[str, Any]] = []
    replies: list[str] = []
    done = env.board.is_solved
    moves = moves_per_turn(options)
    while not done and len(infos) < options.rollout.max_turns:
        text = player.reply(env, generator, moves)
        if text is None:
            break
        replies.append(text)
        _, done, info = env.step(text)
        infos.append(info)
    outcome = Outcome(row, "completed", replies, "", infos, env.metadata())
    metrics = env.final_metrics()
    length = row.get("solution_length")
    record = EpisodeRecord(
        prompt_id=str(row["id"]),
        success=metrics["success"] >= 0.5,
        ret=float(reward(outcome, options.reward.args)["reward"]),
        steps=int(metrics["steps"]),
        optimal_steps=None if length is None else int(length),
        turns=len(infos),
        invalid_turns=int(metrics.get("invalid_turns", 0.0)),
    )
    env.close()
    return record
