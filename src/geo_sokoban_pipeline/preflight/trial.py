"""Own code on one prompt before a run: a whole episode and one that is cut off at once, without a policy or a token.

The warm start's teacher plays, or one plain reply where no warm start is wanted. What raises here would raise in the
run: after the warm start, or in the evaluation at its end, whose replies are often cut off.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from geo_sokoban_pipeline.envs.plugins import load_object
from geo_sokoban_pipeline.envs.teachers import make_teacher
from geo_sokoban_pipeline.options.sokoban import SokobanDataOptions
from geo_sokoban_pipeline.options.training import TrainOptions
from geo_sokoban_pipeline.own_code import explain, own_files
from geo_sokoban_pipeline.preflight.checks import Check, State
from geo_sokoban_pipeline.rollout.closing import (
    begin_reward,
    check_environment,
    check_reward,
    check_step,
    close_environment,
    conclude_episode,
)
from geo_sokoban_pipeline.rollout.outcome import Outcome
from geo_sokoban_pipeline.seeding import python_generator
from geo_sokoban_pipeline.tasks import task_of

Row = dict[str, Any]
_GROUP = "own code"


def is_own(options: TrainOptions) -> bool:
    """Whether environment, reward or teacher are the user's own, or the reward is another than its task's for turns."""
    named = [options.env.factory, options.reward.function]
    if options.warm_start.steps:
        named.append(options.warm_start.teacher.factory)
    return any(own_files(spec) for spec in named) or (options.grpo.credit == "turn" and not _made_of_turns(options))


def try_own_code(run: str, row: Row, options: TrainOptions, seed: int) -> list[Check]:
    """Findings about a whole and a truncated episode on a prompt; nothing where all code is the project's own.

    Args:
        run: namespace of the run, for the names in the messages.
        row: a prompt of the run.
    """
    if not is_own(options):
        return []
    # Whoever lets every episode fail is not stopped by one.
    worst: State = "warning" if options.rollout.max_failed_share >= 1 else "failure"
    try:
        parts, turns = _play(row, options, seed)
    except Exception as error:  # own code may raise anything
        return [Check(_GROUP, "whole episode", worst, f"{run}: an episode of {row.get('id')} fails: {explain(error)}")]
    found = [Check(_GROUP, "whole episode", "ok", f"reward {parts['reward']:g}")]
    if options.grpo.credit == "turn" and not _made_of_turns(options):
        found += _check_credit(run, options, parts, turns)
    try:
        parts, _ = _play(row, options, seed, cut=True)
    except Exception as error:  # own code may raise anything
        text = f"{run}: an episode whose first response is cut off fails, for which outcome.infos is empty: "
        way_out = "see docs/your_own_reward.md for what an outcome holds then"
        return [*found, Check(_GROUP, "truncated episode", worst, text + explain(error), way_out)]
    text = f"reward {parts['reward']:g} where the first response is cut off, without infos"
    return [*found, Check(_GROUP, "truncated episode", "ok", text)]


def sample_level(options: SokobanDataOptions) -> Row:
    """A prompts row of a level of the size that a run with these options generates, which two moves solve at most."""
    from geo_sokoban_pipeline.envs.sokoban import Board
    from geo_sokoban_pipeline.envs.sokoban.level_rows import LevelRow, data_source_name, raw_level_row
    from geo_sokoban_pipeline.envs.sokoban.prompts import prompt_row

    board = Board.from_text(_draw_level(options.height, options.width, options.boxes))
    level = LevelRow("a small level", "generate", data_source_name(board), board, solution_length=2)
    return prompt_row(raw_level_row(level, "train", "layout"), options)


def _draw_level(height: int, width: int, boxes: int) -> str:
    """A room with its player beside a box beside a target; all other boxes stand on targets, from the far end."""
    tall = height > width
    long, short = (height, width) if tall else (width, height)
    cells = [[" "] * (long - 2) for _ in range(short - 2)]
    cells[0][:4] = "@ $." if long >= 6 else "@$."
    free = [(row, column) for row in range(short - 3, -1, -1) for column in range(long - 3, -1, -1)]
    for row, column in [place for place in free if place[0] > 0][: boxes - 1]:
        cells[row][column] = "*"
    drawn = ["#" * long, *("#" + "".join(row)[: long - 2] + "#" for row in cells), "#" * long]
    return "\n".join("".join(row) for row in zip(*drawn, strict=True)) if tall else "\n".join(drawn)


def _play(row: Row, options: TrainOptions, seed: int, *, cut: bool = False) -> tuple[dict[str, float], list[Any]]:
    """Parts of the reward, and (reply's reward, info) of each turn.

    Args:
        cut: the first response is cut off, so that the environment never sees it.
    """
    build_env = load_object(options.env.factory, default_name="build_env")
    reward = load_object(options.reward.function, default_name="reward")
    env = build_env(row, options.env.args)
    check_environment(env, options.env.factory)
    try:
        env.reset()
        replies: list[str] = []
        infos: list[dict[str, Any]] = []
        for text in _replies(env, row, options, seed):
            replies.append(text[: len(text) // 2] if cut else text)
            if cut:
                break
            _, done, info = check_step(env.step(text), options.env.factory)
            infos.append(info)
            if done or len(replies) >= options.rollout.max_turns:
                break
        status = "truncated" if cut else "completed"
        outcome = conclude_episode(env, Outcome(row, status, replies, "".join(replies), infos))
        parts = check_reward(begin_reward(reward, outcome, options.reward.args)(), options.reward.function)
        _ = outcome.metrics
    finally:
        close_environment(env, "preflight")
    return parts, infos


def _replies(env: Any, row: Row, options: TrainOptions, seed: int) -> Iterator[str]:
    if not options.warm_start.steps:
        yield task_of(options.task).plain_reply
        return
    teacher = make_teacher(options.warm_start.teacher, row)
    generator = python_generator(seed, "preflight")
    while (text := teacher.reply(env, generator)) is not None:
        if not isinstance(text, str):
            raise TypeError(
                f"warm_start.teacher.factory={options.warm_start.teacher.factory}: reply must return a str, or None to "
                f"end the episode; it returned {type(text).__name__}"
            )
        yield text


def _made_of_turns(options: TrainOptions) -> bool:
    from geo_sokoban_pipeline.rewards.sokoban import compute_reward

    return load_object(options.reward.function, default_name="reward") is compute_reward


def _check_credit(run: str, options: TrainOptions, parts: dict[str, float], infos: list[Any]) -> list[Check]:
    from geo_sokoban_pipeline.training.scoring import adds_up, turn_worth

    turns = [SimpleNamespace(role="assistant", reward=info.get("turn_reward"), info=info) for info in infos]
    episode = SimpleNamespace(turns=turns, reward_parts={n: value for n, value in parts.items() if n != "reward"})
    values = turn_worth(episode, options.reward.args)  # type: ignore[arg-type]  # all that it reads is there
    if adds_up(values, parts["reward"]) and (len(values) or not infos):
        return []
    text = f"{run}.grpo.credit=turn: needs a reward made of turn rewards, distance and final bonus, but "
    if len(values):
        text += f"{options.reward.function} gives {parts['reward']:g} for turns that add up to {values.sum():g}"
    else:
        text += f"the infos of {options.env.factory} hold no turn_reward"
    return [Check(_GROUP, "credit", "failure", text, f"set {run}.grpo.credit=episode")]
