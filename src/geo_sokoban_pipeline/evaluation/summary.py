"""Evaluation summary: policies and baselines side by side on the same held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.rollout import SamplingOptions
from geo_sokoban_pipeline.evaluation.baselines import play_baselines
from geo_sokoban_pipeline.evaluation.metrics import Disguise, read_ending
from geo_sokoban_pipeline.evaluation.rollouts import play_prompts
from geo_sokoban_pipeline.evaluation.scorers import scorer_of
from geo_sokoban_pipeline.policies.policy import load_as
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.runs.fingerprint import hash_rows
from geo_sokoban_pipeline.runs.policy_folder import PolicyFolder
from geo_sokoban_pipeline.trajectories.parquet import name_parts

Rows = Sequence[dict[str, Any]]


def evaluate_policies(
    run: str,
    seed: int,
    policies: Mapping[str, PolicyFolder],
    prompts: Rows,
    options: TrainOptions,
    *,
    training: Rows = (),
    baselines: bool = True,
    disguises: bool = True,
) -> tuple[dict[str, Any], dict[str, pa.Table]]:
    """Play the evaluation prompts with policies, pictures that tell nothing, and baselines.

    Args:
        policies: by the name of their row.
        training: prompts, from which baselines may learn what is frequent.
        baselines: players without a policy, too.
        disguises: the last policy also plays with pictures that tell nothing, where the options say so.

    Returns:
        The summary (see `docs/architecture.md`), and the policies' trajectories; the partitions `iter=00000/…` are the
        first policy's, `iter=00001/…` the second one's, and so on.
    """
    rows_to_play = list(prompts[: options.evaluation.prompts])
    summary_rows: list[dict[str, Any]] = []
    played: dict[str, pa.Table] = {}
    scorer = scorer_of(options.task)
    hidden = scorer.disguises(rows_to_play, options, seed) if disguises else []
    for number, (name, folder) in enumerate(policies.items()):
        plans = _plan_rows(name, rows_to_play, options, hidden if number == len(policies) - 1 else [])
        rows, parts = _evaluate_policy(run, seed, number, folder, plans, rows_to_play, options)
        summary_rows += rows
        played |= parts
    if baselines:
        summary_rows += play_baselines(rows_to_play, training, options, seed)
    summary = {
        "task": options.task,
        "run": run,
        "prompts": len(rows_to_play),
        "prompts_hash": hash_rows(rows_to_play),
        **scorer.describe(rows_to_play, options),
        "policies": list(policies),
        "rows": summary_rows,
    }
    return summary, played


@dataclass(frozen=True)
class _Plan:
    """One row to be played: who, how, what, and whether the pictures tell nothing."""

    name: str
    mode: str
    sampling: SamplingOptions
    samples: int
    prompts: Rows
    disguised: bool = False
    blank: bool = False


def _plan_rows(name: str, prompts: Rows, options: TrainOptions, disguises: Sequence[Disguise]) -> list[_Plan]:
    evaluation = options.evaluation
    modes = [("sampled", options.evaluation_sampling, evaluation.samples)]
    if evaluation.greedy:
        modes.append(("greedy", SamplingOptions(greedy=True), 1))
    plans = [_Plan(name, mode, sampling, samples, prompts) for mode, sampling, samples in modes]
    return plans + [
        _Plan(name + disguise.suffix, mode, sampling, 1, disguise.prompts, True, disguise.blank)
        for disguise in disguises
        for mode, sampling, _ in modes
    ]


def _evaluate_policy(
    run: str,
    seed: int,
    number: int,
    folder: PolicyFolder,
    plans: Sequence[_Plan],
    prompts: Rows,
    options: TrainOptions,
) -> tuple[list[dict[str, Any]], dict[str, pa.Table]]:
    """Rows of one policy, and its trajectories with true pictures."""
    policy = load_as(options.policy, folder.path)
    scorer = scorer_of(options.task)
    rows, trajectories = [], []
    with closing(build_engine(policy, options.rollout)) as engine:
        for plan in plans:
            engine.update_weights(None, int(folder.manifest.get("policy_version", 0)))
            episodes = play_prompts(
                f"{run}/{plan.name}/{plan.mode}",
                seed,
                options,
                plan.prompts,
                policy,
                engine,
                sampling=plan.sampling,
                samples=plan.samples,
                iteration=number,
                blank=plan.blank,
            )
            records = [scorer.record(read_ending(episode, prompts[episode.group_index])) for episode in episodes]
            rows.append(scorer.summarise(records, policy=plan.name, mode=plan.mode))
            if not plan.disguised:
                trajectories += episodes
    return rows, name_parts(number, trajectories, policy.table_context)
