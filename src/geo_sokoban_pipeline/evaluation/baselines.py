"""Baselines: players without a policy on the same levels, with the same rules and the same number of turns."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any

from geo_sokoban_pipeline.envs.plugins import load_object
from geo_sokoban_pipeline.envs.sokoban.env import SokobanEnv
from geo_sokoban_pipeline.envs.sokoban.teacher import SokobanTeacher, build_teacher
from geo_sokoban_pipeline.evaluation.metrics import EpisodeRecord
from geo_sokoban_pipeline.options.policy import TeacherOptions
from geo_sokoban_pipeline.options.training import TrainOptions
from geo_sokoban_pipeline.rollout.outcome import Outcome
from geo_sokoban_pipeline.seeding import python_generator

logger = logging.getLogger(__name__)
BASELINES = ("random", "random_legal", "solver")
PATIENT = ", never gives up"  # end of the name of a teacher who plays on to the last move


def play_baseline(
    player: TeacherOptions, prompts: Sequence[dict[str, Any]], options: TrainOptions, seed: int
) -> list[EpisodeRecord]:
    """Play every prompt once with a player, who has as many moves as a policy may make.

    An episode that raises counts as not solved and without a return, as a policy's does; the first error is logged.
    A player of one's own (`factory`) replies as in its demonstrations, one reply a turn.
    """
    name = player.name
    build_env = load_object(options.env.factory, default_name="build_env")
    reward = load_object(options.reward.function, default_name="reward")
    records: list[EpisodeRecord] = []
    errors: list[str] = []
    for row in prompts:
        try:
            records.append(_play(player, row, build_env, reward, options, seed))
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
    """Name of the teacher's row in the summary: who plays, and with how much noise."""
    own = teacher.factory != TeacherOptions().factory
    name = f"{teacher.name} of {teacher.factory}" if own else teacher.name
    return f"teacher ({name}, noise {teacher.noise:g})" if teacher.noise else f"teacher ({name})"


def patient_teacher(teacher: TeacherOptions) -> TeacherOptions | None:
    """The teacher without giving up, which costs a player levels that demonstrations need not; None: is the same one.

    A demonstration that ends at a block teaches nothing wrong, but a player who ends there cannot solve the level.
    """
    impatient = teacher.factory == TeacherOptions().factory and teacher.name == "direct"
    return teacher.model_copy(update={"patience": None}) if impatient and teacher.patience is not None else None


def is_baseline(teacher: TeacherOptions) -> bool:
    """Whether a teacher plays exactly as one of the baselines does, so that a row of its own would say nothing."""
    return teacher.factory == TeacherOptions().factory and not teacher.noise and teacher.name in BASELINES


def _build_player(player: TeacherOptions, options: TrainOptions) -> Any:
    build = load_object(player.factory, default_name="build_teacher")
    # Only the project's own players know a search limit.
    limit = {"max_states": options.evaluation.solver_states} if build is build_teacher else {}
    return build(player.name, player.patience, player.noise, **limit)


def _play(
    chosen: TeacherOptions, row: dict[str, Any], build_env: Any, reward: Any, options: TrainOptions, seed: int
) -> EpisodeRecord:
    generator = python_generator(seed, "baseline", chosen.name, str(row["id"]))
    env = build_env(row, options.env.args)
    env.reset()
    player = _build_player(chosen, options)
    infos: list[dict[str, Any]] = []
    replies: list[str] = []
    done = env.board.is_solved
    moves = (moves_per_turn(options),) if isinstance(player, SokobanTeacher) else ()
    while not done and len(infos) < options.rollout.max_turns:
        text = player.reply(env, generator, *moves)
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
