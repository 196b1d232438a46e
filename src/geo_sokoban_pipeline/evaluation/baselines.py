"""Baselines: players without a policy on the same prompts, with the same rules and the same number of turns."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from geo_sokoban_pipeline.config.geo3k_training import GeometryTeacherOptions
from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.policy import TeacherOptions
from geo_sokoban_pipeline.envs.base import make_teacher
from geo_sokoban_pipeline.envs.plugins import load_object
from geo_sokoban_pipeline.envs.sokoban.expert import SokobanTeacher, build_teacher
from geo_sokoban_pipeline.evaluation.levels import moves_per_turn
from geo_sokoban_pipeline.evaluation.metrics import Ending, Rows
from geo_sokoban_pipeline.evaluation.scorers import scorer_of
from geo_sokoban_pipeline.rollout.episode import EpisodeResult, begin_reward, check_reward, check_step, conclude_episode
from geo_sokoban_pipeline.runs.own_code import explain
from geo_sokoban_pipeline.seeding import python_generator
from geo_sokoban_pipeline.tasks import World, task_of

logger = logging.getLogger(__name__)
BASELINES = ("random", "random_legal", "solver")
MOST_FREQUENT = "most_frequent"
PATIENT = ", never gives up"  # end of the name of a teacher who plays on to the last move


def play_baselines(prompts: Rows, training: Rows, options: TrainOptions, seed: int) -> list[dict[str, Any]]:
    """Rows of all players that the task has, the warm start's teacher among them.

    Args:
        training: prompts, from which players learn what is frequent.
    """
    scorer = scorer_of(options.task)
    players = _PLAYERS[task_of(options.task).world](options, training)
    return [
        scorer.summarise(play_baseline(player, prompts, options, seed), policy=label, mode="-")
        for label, player in players.items()
    ]


def play_baseline(
    player: TeacherOptions, prompts: Sequence[dict[str, Any]], options: TrainOptions, seed: int
) -> list[Any]:
    """Play every prompt once with a player, who has as many moves as a policy may make.

    An episode that raises counts as not solved and without a return, as a policy's does; the first error is logged.
    A player of one's own (`factory`) replies as in its demonstrations, one reply a turn.

    Returns:
        Records of the task's scorer.
    """
    name = player.name
    build_env = load_object(options.env.factory, default_name="build_env")
    reward = load_object(options.reward.function, default_name="reward")
    record = scorer_of(options.task).record
    records: list[Any] = []
    errors: list[str] = []
    for row in prompts:
        try:
            records.append(record(_play(player, row, build_env, reward, options, seed)))
        except Exception as error:  # an own environment or reward may raise anything; the other episodes count
            errors.append(explain(error))
            records.append(record(Ending(row, {}, None)))
    if errors:
        logger.warning(
            "%d of %d episodes of the player %s failed; first: %s", len(errors), len(prompts), name, errors[0]
        )
    return records


def describe_teacher(teacher: TeacherOptions) -> str:
    """Name of the teacher's row in the summary: who plays, and with how much noise."""
    own = teacher.factory != type(teacher)().factory
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


def _level_players(options: TrainOptions, training: Rows) -> dict[str, TeacherOptions]:
    teacher = options.warm_start.teacher
    players = {name: TeacherOptions.model_validate({"name": name}) for name in BASELINES}
    if options.warm_start.steps and not is_baseline(teacher):
        players[describe_teacher(teacher)] = teacher
        patient = patient_teacher(teacher)
        if patient is not None:
            players[describe_teacher(teacher) + PATIENT] = patient
    return players


def _answer_players(options: TrainOptions, training: Rows) -> dict[str, TeacherOptions]:
    """The label, the most frequent label of training (of evaluation nobody may know it), and the teacher."""
    teacher = options.warm_start.teacher
    players: dict[str, TeacherOptions] = {"label": GeometryTeacherOptions(name="solver")}
    answers = Counter(str(row["answer"]) for row in training)
    if answers:
        # The first one in the alphabet where several are as frequent: the order of the rows must not decide.
        most = min(answers, key=lambda answer: (-answers[answer], answer))
        players[MOST_FREQUENT] = GeometryTeacherOptions(name="constant", args={"answer": most, "tool_share": 0.0})
    if options.warm_start.steps and teacher != GeometryTeacherOptions(name="solver"):
        players[describe_teacher(teacher)] = teacher
    return players


_PLAYERS: Mapping[World, Callable[[TrainOptions, Rows], dict[str, TeacherOptions]]] = {
    "sokoban": _level_players,
    "geometry": _answer_players,
}


def _play(
    chosen: TeacherOptions, row: dict[str, Any], build_env: Any, reward: Any, options: TrainOptions, seed: int
) -> Ending:
    generator = python_generator(seed, "baseline", chosen.name, str(row["id"]))
    env = build_env(row, options.env.args)
    env.reset()
    # Only the project's own players know a search limit, and how many moves a reply may hold.
    own = load_object(chosen.factory, default_name="build_teacher") is build_teacher
    player = make_teacher(chosen, row, **({"max_states": options.evaluation.solver_states} if own else {}))
    moves = (moves_per_turn(options),) if isinstance(player, SokobanTeacher) else ()
    infos: list[dict[str, Any]] = []
    replies: list[str] = []
    done = hasattr(env, "board") and env.board.is_solved
    while not done and len(infos) < options.rollout.max_turns:
        text = player.reply(env, generator, *moves)
        if text is None:
            break
        replies.append(text)
        _, done, info = check_step(env.step(text), options.env.factory)
        infos.append(info)
    outcome = conclude_episode(env, EpisodeResult(row, "completed", replies, "", infos))
    given = begin_reward(reward, outcome, options.reward.args)()
    ret = check_reward(given, options.reward.function)["reward"]
    ending = Ending(row=row, metrics=outcome.metrics, ret=ret, replies=replies)
    env.close()
    return ending
