"""Baselines: agents without a policy, run on the same prompts with the same environment, reward and turn limit."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.policy import ExpertOptions
from geo_sokoban_pipeline.envs.base import make_expert
from geo_sokoban_pipeline.envs.metrics import FinishedEpisode, Rows
from geo_sokoban_pipeline.envs.plugins import load_object
from geo_sokoban_pipeline.evaluation.rollouts import summary_row
from geo_sokoban_pipeline.rollout.episode import (
    EpisodeResult,
    begin_reward,
    check_reward,
    check_step,
    close_environment,
    finalize_environment,
)
from geo_sokoban_pipeline.runs.own_code import explain
from geo_sokoban_pipeline.seeding import python_generator
from geo_sokoban_pipeline.tasks import task_of

logger = logging.getLogger(__name__)


def evaluate_baselines(prompts: Rows, training: Rows, options: TrainOptions, seed: int) -> list[dict[str, Any]]:
    """Summary rows of the task's baselines, the warm start's expert among them.

    Args:
        training: training prompts, from which baselines count frequent answers.
    """
    task = task_of(options.task).evaluated_in(options.env.factory)
    return [
        summary_row(task, evaluate_baseline(agent, prompts, options, seed), policy=name, mode="-")
        for name, agent in task.baselines(options, training).items()
    ]


def evaluate_baseline(
    agent: ExpertOptions, prompts: Sequence[dict[str, Any]], options: TrainOptions, seed: int
) -> list[Any]:
    """Run an agent on every prompt once, with the turn limit of a policy.

    As for a policy, an episode that raises counts as not solved and has no return; the first error is logged.

    Returns:
        Records of the task.
    """
    build_env = load_object(options.env.factory, default_name="build_env")
    reward = load_object(options.reward.function, default_name="reward")
    task = task_of(options.task)
    records: list[Any] = []
    errors: list[str] = []
    for row in prompts:
        try:
            finished = _run_episode(agent, row, build_env, reward, options, seed)
        except Exception as error:  # an own environment or reward may raise anything; the other episodes count
            errors.append(explain(error))
            finished = FinishedEpisode(row, {}, None)
        records.append(task.record(replace(finished, cluster=task.cluster_of(row))))
    if errors:
        logger.warning(
            "%d of %d episodes of the baseline %s failed; first: %s", len(errors), len(prompts), agent.name, errors[0]
        )
    return records


def _run_episode(
    chosen: ExpertOptions, row: dict[str, Any], build_env: Any, reward: Any, options: TrainOptions, seed: int
) -> FinishedEpisode:
    generator = python_generator(seed, "baseline", chosen.name, str(row["id"]))
    agent = make_expert(chosen, row)
    env = build_env(row, options.env.args)
    try:
        env.reset()
        infos: list[dict[str, Any]] = []
        responses: list[str] = []
        done = False
        while not done and len(infos) < options.rollout.max_turns:
            if (text := agent.respond(env, generator)) is None:
                break
            responses.append(text)
            _, done, info = check_step(env.step(text), options.env.factory)
            infos.append(info)
        result = finalize_environment(env, EpisodeResult(row, "completed", responses, "", infos))
        ret = check_reward(begin_reward(reward, result, options.reward.args)(), options.reward.function)["reward"]
        return FinishedEpisode(row=row, metrics=result.metrics, ret=ret, responses=responses)
    finally:
        close_environment(env, f"the baseline {chosen.name} on {row['id']}")
