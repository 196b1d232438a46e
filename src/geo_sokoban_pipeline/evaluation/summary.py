"""Evaluation summary: policies and baselines side by side on the same held-out prompts."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.rollout import SamplingOptions
from geo_sokoban_pipeline.evaluation.baselines import evaluate_baselines
from geo_sokoban_pipeline.evaluation.metrics import read_finished
from geo_sokoban_pipeline.evaluation.rollouts import rollout_prompts, summary_row
from geo_sokoban_pipeline.policies.policy import load_as
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.runs.fingerprint import hash_rows
from geo_sokoban_pipeline.runs.policy_folder import PolicyFolder
from geo_sokoban_pipeline.seeding import python_generator
from geo_sokoban_pipeline.tasks import task_of
from geo_sokoban_pipeline.trajectories.parquet import name_parts

if TYPE_CHECKING:
    from geo_sokoban_pipeline.rollout.engines.sglang.servers import Launcher

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
    task = task_of(options.task)
    ablated = image_ablations(chosen, options, seed) if ablations else []
    for number, (name, folder) in enumerate(policies.items()):
        plans = _plan_rows(name, chosen, options, ablated if number == len(policies) - 1 else [])
        rows, parts = _evaluate_policy(run, seed, number, folder, plans, chosen, options, launcher)
        summary_rows += rows
        tables |= parts
    if baselines:
        summary_rows += evaluate_baselines(chosen, training, options, seed)
    summary = {
        "task": options.task,
        "run": run,
        "prompts": len(chosen),
        "prompts_hash": hash_rows(chosen),
        **task.describe_prompts(chosen, options),
        "policies": list(policies),
        "rows": summary_rows,
    }
    return summary, tables


@dataclass(frozen=True)
class ImageAblation:
    """A way to take the information out of a policy's images.

    Attributes:
        suffix: appended to the policy's name in the summary row.
        blank: replace every image by a black one.
        prompts: prompts with their replaced images.
    """

    suffix: str
    blank: bool
    prompts: Rows


def image_ablations(prompts: Rows, options: TrainOptions, seed: int) -> list[ImageAblation]:
    """The ablations that the options ask for: blank images, and images of other prompts; none without images."""
    evaluation = options.evaluation
    if evaluation.image_ablations and prompts and all("images" in row and len(row["images"]) == 0 for row in prompts):
        logger.info("no evaluation with blank or shuffled images: the prompts have none")
        return []
    ablations = [ImageAblation("_blank", True, prompts)] if evaluation.blank_images else []
    if evaluation.shuffled_images:
        ablations.append(ImageAblation("_shuffled", False, shuffle_images(prompts, seed)))
    return ablations


def shuffle_images(prompts: Rows, seed: int) -> list[dict[str, Any]]:
    """Prompts with the images of another prompt that has equally many; a prompt without a partner keeps its own.

    Number and kind of the images stay, so only a policy that uses their content loses accuracy.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for index, row in enumerate(prompts):
        groups[len(row.get("images") or [])].append(index)
    shown = list(prompts)
    for order in groups.values():
        python_generator(seed, "shuffled images", len(order)).shuffle(order)
        for index, other in zip(order, order[1:] + order[:1], strict=True):
            shown[index] = {**prompts[index], "images": prompts[other].get("images")}
    return shown


@dataclass(frozen=True)
class _Plan:
    """One summary row to be made: name, sampling, prompts, and whether its images are ablated."""

    name: str
    mode: str
    sampling: SamplingOptions
    samples: int
    prompts: Rows
    ablated: bool = False
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
    launcher: Launcher | None,
) -> tuple[list[dict[str, Any]], dict[str, pa.Table]]:
    """Summary rows of one policy, and its trajectories without ablations."""
    policy = load_as(options.sent_policy if options.places_servers else options.policy, folder.path)
    task = task_of(options.task)
    rows, trajectories = [], []
    with closing(build_engine(policy, options.rollout, launcher)) as engine:
        for plan in plans:
            engine.update_weights(None, int(folder.manifest.get("policy_version", 0)))
            episodes = rollout_prompts(
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
            records = [task.record(read_finished(episode, prompts[episode.group_index])) for episode in episodes]
            rows.append(summary_row(task, records, policy=plan.name, mode=plan.mode))
            if not plan.ablated:
                trajectories += episodes
    return rows, name_parts(number, trajectories, policy.table_context)
