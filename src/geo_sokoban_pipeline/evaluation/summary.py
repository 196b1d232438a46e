"""Evaluation summary: policies and baselines side by side on the same held-out prompts.

Baselines are agents without a policy, run with the same environment, reward and turn limit.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import product
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.policy import ExpertOptions
from geo_sokoban_pipeline.config.rollout import SamplingOptions
from geo_sokoban_pipeline.envs.base import Task, make_expert
from geo_sokoban_pipeline.envs.metrics import FinishedEpisode, Rows
from geo_sokoban_pipeline.envs.plugins import load_object
from geo_sokoban_pipeline.envs.report import BLANK, FIRST_SHUFFLED, SHUFFLED
from geo_sokoban_pipeline.evaluation.metrics import PairedTest, Successes, group_successes, paired_test
from geo_sokoban_pipeline.evaluation.rollouts import read_finished, rollout_prompts, summary_row
from geo_sokoban_pipeline.policies.policy import load_as
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.rollout.episode import (
    EpisodeRequest,
    EpisodeResult,
    begin_reward,
    check_reward,
    check_step,
    close_environment,
    finalize_environment,
)
from geo_sokoban_pipeline.runs.fingerprint import hash_rows
from geo_sokoban_pipeline.runs.own_code import explain
from geo_sokoban_pipeline.runs.policy_folder import PolicyFolder, identify_policy
from geo_sokoban_pipeline.seeding import derive_seed, python_generator
from geo_sokoban_pipeline.tasks import task_of
from geo_sokoban_pipeline.trajectories.parquet import name_parts
from geo_sokoban_pipeline.trajectories.types import Trajectory

if TYPE_CHECKING:
    from geo_sokoban_pipeline.rollout.engines.sglang.servers import Launcher

logger = logging.getLogger(__name__)


def evaluate_policies(
    run: str,
    seed: int,
    policies: Mapping[str, PolicyFolder],
    prompts: Rows,
    options: TrainOptions,
    *,
    training: Rows = (),
    baselines: bool = True,
    ablations: bool = True,
    launcher: Launcher | None = None,
) -> tuple[dict[str, Any], dict[str, pa.Table]]:
    """Evaluate policies, image ablations and baselines on the evaluation prompts.

    Args:
        policies: by the name of their row.
        training: training prompts, from which baselines count frequent answers.
        baselines: evaluate the task's baselines too.
        ablations: evaluate the last policy also under the image ablations of the options.
        launcher: of servers; None: they are launched on this machine.

    Returns:
        The summary (see `docs/architecture.md`), and the policies' trajectories; the partitions `iter=00000/…` are the
        first policy's, `iter=00001/…` the second one's, and so on.
    """
    chosen = list(prompts[: options.evaluation.prompts])
    summary_rows: list[dict[str, Any]] = []
    tables: dict[str, pa.Table] = {}
    task = task_of(options.task).evaluated_in(options.env.factory)
    ablated = image_ablations(chosen, options, seed) if ablations else {}
    clusters = describe_clusters(task, chosen)
    for number, (name, folder) in enumerate(policies.items()):
        shown = {"": chosen, **(ablated if number == len(policies) - 1 else {})}
        rows, parts = _evaluate_policy(
            run, seed, number, name, folder, shown, clusters["cluster_of"], options, launcher
        )
        summary_rows += rows
        tables |= parts
    if baselines:
        summary_rows += evaluate_baselines(chosen, training, options, seed)
    summary = {
        "task": options.task,
        "run": run,
        "prompts": len(chosen),
        "prompts_hash": hash_rows(chosen),
        **clusters,
        **task.describe_prompts(chosen, options),
        "policies": list(policies),
        "checkpoints": {name: identify_policy(folder) for name, folder in policies.items()},
        "rows": summary_rows,
    }
    return summary, tables


def describe_clusters(task: Task, prompts: Rows) -> dict[str, Any]:
    """Entries of the summary: `clusters`, how many prompts are evidence of their own, and `cluster_of`, by the key of a
    prompt, where it is another name than that key."""
    named = {task.key_of(row): task.cluster_of(row) for row in prompts}
    clusters = {key: cluster for key, cluster in named.items() if cluster != key}
    return {"clusters": len(set(named.values())), "cluster_of": clusters}


def image_ablations(prompts: Rows, options: TrainOptions, seed: int) -> dict[str, Rows]:
    """The ablations that the options ask for: blank images, and images of other prompts; none without images.

    Returns:
        By the suffix of the policy's name in the summary row, the prompts to roll out.
    """
    evaluation = options.evaluation
    if evaluation.image_ablations and prompts and all("images" in row and len(row["images"]) == 0 for row in prompts):
        logger.info("no evaluation with blank or shuffled images: the prompts have none")
        return {}
    ablations = {BLANK: prompts} if evaluation.blank_images else {}
    if evaluation.shuffled_images:
        shuffled = shuffle_images(prompts, seed)
        if any(one is not other for one, other in zip(shuffled, prompts, strict=True)):
            ablations[SHUFFLED] = shuffled
        else:
            logger.info("no evaluation with shuffled images: all prompts have the same")
    return ablations


def shuffle_images(prompts: Rows, seed: int) -> list[dict[str, Any]]:
    """Prompts with the images of another prompt that has equally many, but other ones; without one it keeps its own.

    Number and kind of the images stay, so only a policy that uses their content loses accuracy.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for index, row in enumerate(prompts):
        groups[len(row.get("images") or [])].append(index)
    shown = list(prompts)
    for order in groups.values():
        python_generator(seed, "shuffled images", len(order)).shuffle(order)
        images = [tuple(prompts[index].get("images") or []) for index in order]
        if len(set(images)) < 2:
            continue
        for place, index in enumerate(order):
            # The next prompt, unless it is a copy: a prompt must not get its own images back.
            other = place
            while images[other] == images[place]:
                other = (other + 1) % len(order)
            shown[index] = {**prompts[index], "images": prompts[order[other]]["images"]}
    return shown


def observes_images(episode: Trajectory) -> bool:
    """Whether an episode has images beyond those of its prompt: then shuffled prompts replace only the first ones."""
    roles = [turn.role for turn in episode.turns]
    first = roles.index("assistant") if "assistant" in roles else len(roles)
    return any(turn.image_indices for turn in episode.turns[first:])


def _evaluate_policy(
    run: str,
    seed: int,
    number: int,
    name: str,
    folder: PolicyFolder,
    shown: Mapping[str, Rows],
    clusters: Mapping[str, str],
    options: TrainOptions,
    launcher: Launcher | None,
) -> tuple[list[dict[str, Any]], dict[str, pa.Table]]:
    """Summary rows of one policy, and its trajectories without ablations.

    Args:
        shown: prompts as they are, under the suffix "", and those of image ablations.
    """
    evaluation, prompts = options.evaluation, shown[""]
    is_sent = options.rollout.engine == "sglang"
    policy = load_as(options.sent_policy if is_sent else options.policy, folder.path)
    task = task_of(options.task).evaluated_in(options.env.factory)
    modes = {"sampled": options.evaluation_sampling}
    if evaluation.greedy:
        modes["greedy"] = SamplingOptions(greedy=True)
    rows, trajectories = [], []
    seeing: dict[str, Successes] = {}
    observed = False
    with closing(build_engine(policy, options.rollout, launcher)) as engine:
        for (suffix, given), (mode, sampling) in product(shown.items(), modes.items()):
            engine.update_weights(None, int(folder.manifest.get("policy_version", 0)))
            episodes = rollout_prompts(
                f"{run}/{name}{suffix}/{mode}",
                seed,
                options,
                given,
                policy,
                engine,
                sampling=sampling,
                samples=evaluation.samples if suffix == "" and mode == "sampled" else 1,
                iteration=number,
                blank=suffix == BLANK,
            )
            own = [prompts[episode.group_index] for episode in episodes]
            records = [task.record(read_finished(task, *both)) for both in zip(episodes, own, strict=True)]
            line = summary_row(task, records, policy=name + suffix, mode=mode)
            observed = observed or any(map(observes_images, episodes))
            solved = group_successes(
                (task.key_of(row), episode.group_index, record.success)
                for row, episode, record in zip(own, episodes, records, strict=True)
            )
            if suffix:
                line["change"] = _describe_change(paired_test(seeing[mode], solved, clusters))
            else:
                seeing[mode] = solved
                trajectories += episodes
            rows.append(line)
    if observed:
        for row in rows:
            if row["policy"] == name + SHUFFLED:
                row["policy"] = name + FIRST_SHUFFLED
    return rows, name_parts(number, trajectories, policy.table_context)


def _describe_change(test: PairedTest | None) -> dict[str, Any] | None:
    """Effect of an image ablation on the same prompts, as an entry of its row."""
    return None if test is None else {name: getattr(test, name) for name in ("difference", "low", "high", "is_change")}


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
            generator = python_generator(seed, "baseline", agent.name, str(row["id"]))
            env_seed = derive_seed(seed, "baseline", agent.name, str(row["id"]), "environment")
            request = EpisodeRequest(f"the agent {agent.name} on {row['id']}", row, 0, 0, env_seed)
            finished = play_agent(agent, request, build_env, reward, options, generator)
        except Exception as error:  # an own environment or reward may raise anything; the other episodes count
            errors.append(explain(error))
            finished = FinishedEpisode(row, {}, None)
        records.append(task.record(replace(finished, cluster=task.cluster_of(row))))
    if errors:
        logger.warning(
            "%d of %d episodes of the baseline %s failed; first: %s", len(errors), len(prompts), agent.name, errors[0]
        )
    return records


def play_agent(
    chosen: ExpertOptions,
    request: EpisodeRequest,
    build_env: Any,
    reward: Any,
    options: TrainOptions,
    generator: Random,
    past: Sequence[str] = (),
) -> FinishedEpisode:
    """Run an agent on a prompt, with the turn limit of a policy.

    Args:
        request: prompt and seeds; its own past is tokens, which no agent reads.
        build_env, reward: as the options name them.
        generator: of the agent's random choices.
        past: responses with which the episode begins.

    Raises:
        Exception: whatever an environment or reward of one's own raises.
    """
    row = request.prompt
    agent = make_expert(chosen, row)
    env = build_env(row, options.env.args)
    try:
        request.reset(env)
        infos: list[dict[str, Any]] = []
        responses: list[str] = []
        done = False
        while not done and len(infos) < options.rollout.max_turns:
            text = past[len(infos)] if len(infos) < len(past) else agent.respond(env, generator)
            if text is None:
                break
            responses.append(text)
            if request.reseed_at == len(infos) and hasattr(env, "reseed"):
                env.reseed(request.seed)
            _, done, info = check_step(env.step(text), options.env.factory)
            infos.append(info)
        result = finalize_environment(env, EpisodeResult(row, "completed", responses, "", infos))
        ret = check_reward(begin_reward(reward, result, options.reward.args)(), options.reward.function)["reward"]
        return FinishedEpisode(row=row, metrics=result.metrics, ret=ret, responses=responses)
    finally:
        close_environment(env, request.trajectory_id)
