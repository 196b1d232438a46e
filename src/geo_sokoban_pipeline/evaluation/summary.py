"""Evaluation summary: policies and baselines side by side on the same held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import pyarrow as pa

from geo_sokoban_pipeline.evaluation.baselines import (
    BASELINES,
    PATIENT,
    describe_teacher,
    is_baseline,
    move_limit,
    patient_teacher,
    play_baseline,
)
from geo_sokoban_pipeline.evaluation.metrics import summarise_episodes
from geo_sokoban_pipeline.evaluation.playing import play_prompts, record_episode
from geo_sokoban_pipeline.folders import PolicyFolder
from geo_sokoban_pipeline.options.policy import TeacherOptions
from geo_sokoban_pipeline.options.rollout import SamplingOptions
from geo_sokoban_pipeline.options.training import TrainOptions
from geo_sokoban_pipeline.policies.policy import load_policy
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.trajectory_files import name_parts

Rows = Sequence[dict[str, Any]]


def evaluate_policies(
    run: str,
    seed: int,
    policies: Mapping[str, PolicyFolder],
    prompts: Rows,
    options: TrainOptions,
    *,
    baselines: bool = True,
) -> tuple[dict[str, Any], dict[str, pa.Table]]:
    """Play the evaluation prompts with policies, blank pictures and baselines.

    Args:
        policies: by the name of their row; the last one also plays with blank pictures, where the options say so.
        baselines: players without a policy, too.

    Returns:
        The summary (see `docs/architecture.md`), and the policies' trajectories; the partitions `iter=00000/…` are the
        first policy's, `iter=00001/…` the second one's, and so on.
    """
    rows_to_play = list(prompts[: options.evaluation.prompts])
    summary_rows: list[dict[str, Any]] = []
    played: dict[str, pa.Table] = {}
    for number, (name, folder) in enumerate(policies.items()):
        last = number == len(policies) - 1
        rows, parts = _evaluate_policy(run, seed, name, number, folder, rows_to_play, options, blank=last)
        summary_rows += rows
        played |= parts
    if baselines:
        summary_rows += _baseline_rows(rows_to_play, options, seed)
    summary = {
        "task": options.task,
        "run": run,
        "prompts": len(rows_to_play),
        "layouts": len({row["layout_hash"] for row in rows_to_play if row.get("layout_hash")}),
        "move_limit": move_limit(options),
        "policies": list(policies),
        "rows": summary_rows,
    }
    return summary, played


def _evaluate_policy(
    run: str,
    seed: int,
    name: str,
    number: int,
    folder: PolicyFolder,
    prompts: Rows,
    options: TrainOptions,
    *,
    blank: bool,
) -> tuple[list[dict[str, Any]], dict[str, pa.Table]]:
    policy = load_policy(folder.path, options.policy.dtype, options.policy.attention)
    evaluation = options.evaluation
    sampled, greedy = options.evaluation_sampling, SamplingOptions(greedy=True)
    wanted = [(name, "sampled", sampled, evaluation.samples, False)]
    if evaluation.greedy:
        wanted.append((name, "greedy", greedy, 1, False))
    if blank and evaluation.blank_images:
        wanted.append((f"{name}_blank", "sampled", sampled, 1, True))
        if evaluation.greedy:
            wanted.append((f"{name}_blank", "greedy", greedy, 1, True))
    rows, trajectories = [], []
    with closing(build_engine(policy, options.rollout)) as engine:
        for row_name, mode, sampling, samples, hidden in wanted:
            engine.update_weights(None, int(folder.manifest.get("policy_version", 0)))
            episodes = play_prompts(
                f"{run}/{row_name}/{mode}",
                seed,
                options,
                prompts,
                policy,
                engine,
                sampling=sampling,
                samples=samples,
                iteration=number,
                blank=hidden,
            )
            records = [record_episode(episode, prompts[episode.group_index]) for episode in episodes]
            rows.append(summarise_episodes(records, policy=row_name, mode=mode))
            if not hidden:
                trajectories += episodes
    return rows, name_parts(number, trajectories, policy.table_context)


def _baseline_rows(prompts: Rows, options: TrainOptions, seed: int) -> list[dict[str, Any]]:
    teacher = options.warm_start.teacher
    players = {name: TeacherOptions.model_validate({"name": name}) for name in BASELINES}
    if options.warm_start.steps and not is_baseline(teacher):
        players[describe_teacher(teacher)] = teacher
        patient = patient_teacher(teacher)
        if patient is not None:
            players[describe_teacher(teacher) + PATIENT] = patient
    return [
        summarise_episodes(play_baseline(player, prompts, options, seed), policy=label, mode="-")
        for label, player in players.items()
    ]
