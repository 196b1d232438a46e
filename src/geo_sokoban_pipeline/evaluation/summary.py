"""Evaluation summary: policies and baselines side by side on the same held-out prompts."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.rollout import SamplingOptions
from geo_sokoban_pipeline.evaluation.baselines import play_baselines
from geo_sokoban_pipeline.evaluation.metrics import read_ending
from geo_sokoban_pipeline.evaluation.rollouts import play_prompts, summary_row
from geo_sokoban_pipeline.policies.policy import load_as
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.runs.fingerprint import hash_rows
from geo_sokoban_pipeline.runs.policy_folder import PolicyFolder
from geo_sokoban_pipeline.seeding import python_generator
from geo_sokoban_pipeline.tasks import task_of
from geo_sokoban_pipeline.trajectories.parquet import name_parts

logger = logging.getLogger(__name__)
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
    """Play the evaluation prompts with policies, images that tell nothing, and baselines.

    Args:
        policies: by the name of their row.
        training: prompts, from which baselines may learn what is frequent.
        baselines: players without a policy, too.
        disguises: the last policy also plays with images that tell nothing, where the options say so.

    Returns:
        The summary (see `docs/architecture.md`), and the policies' trajectories; the partitions `iter=00000/…` are the
        first policy's, `iter=00001/…` the second one's, and so on.
    """
    rows_to_play = list(prompts[: options.evaluation.prompts])
    summary_rows: list[dict[str, Any]] = []
    played: dict[str, pa.Table] = {}
    task = task_of(options.task)
    hidden = image_ablations(rows_to_play, options, seed) if disguises else []
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
        **task.describe_prompts(rows_to_play, options),
        "policies": list(policies),
        "rows": summary_rows,
    }
    return summary, played


@dataclass(frozen=True)
class ImageAblation:
    """A way to show a policy images that tell it nothing.

    Attributes:
        suffix: of the name of its row in the summary.
        blank: black images.
        prompts: as they are then played.
    """

    suffix: str
    blank: bool
    prompts: Rows


def image_ablations(prompts: Rows, options: TrainOptions, seed: int) -> list[ImageAblation]:
    """Blank images and other prompts' images, where the options say so and there are images."""
    evaluation = options.evaluation
    if evaluation.disguises and prompts and all("images" in row and len(row["images"]) == 0 for row in prompts):
        logger.info("no evaluation with blank or shuffled images: the prompts have none")
        return []
    ablations = [ImageAblation("_blank", True, prompts)] if evaluation.blank_images else []
    if evaluation.shuffled_images:
        ablations.append(ImageAblation("_shuffled", False, shuffle_images(prompts, seed)))
    return ablations


def shuffle_images(prompts: Rows, seed: int) -> list[dict[str, Any]]:
    """Prompts with the images of another prompt, which has as many of them; a lone one keeps its own.

    The images are the same in number and kind, so a policy that does without them loses nothing.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for index, row in enumerate(prompts):
        groups[len(row.get("images") or [])].append(index)
    shown = list(prompts)
    for members in groups.values():
        order = list(members)
        python_generator(seed, "shuffled images", len(order)).shuffle(order)
        for index, other in zip(order, order[1:] + order[:1], strict=True):
            shown[index] = {**prompts[index], "images": prompts[other].get("images")}
    return shown


@dataclass(frozen=True)
class _Plan:
    """One row to be played: who, how, what, and whether the images tell nothing."""

    name: str
    mode: str
    sampling: SamplingOptions
    samples: int
    prompts: Rows
    disguised: bool = False
    blank: bool = False


def _plan_rows(name: str, prompts: Rows, options: TrainOptions, ablations: Sequence[ImageAblation]) -> list[_Plan]:
    evaluation = options.evaluation
    modes = [("sampled", options.evaluation_sampling, evaluation.samples)]
    if evaluation.greedy:
        modes.append(("greedy", SamplingOptions(greedy=True), 1))
    plans = [_Plan(name, mode, sampling, samples, prompts) for mode, sampling, samples in modes]
    return plans + [
        _Plan(name + ablation.suffix, mode, sampling, 1, ablation.prompts, True, ablation.blank)
        for ablation in ablations
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
    """Rows of one policy, and its trajectories with true images."""
    policy = load_as(options.policy, folder.path)
    task = task_of(options.task)
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
            records = [task.record(read_ending(episode, prompts[episode.group_index])) for episode in episodes]
            rows.append(summary_row(task, records, policy=plan.name, mode=plan.mode))
            if not plan.disguised:
                trajectories += episodes
    return rows, name_parts(number, trajectories, policy.table_context)
