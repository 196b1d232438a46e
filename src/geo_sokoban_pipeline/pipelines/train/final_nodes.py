"""Nodes of a training run after its loop: the final policy, its evaluation, the report."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from geo_sokoban_pipeline import formats
from geo_sokoban_pipeline.config.base import ParameterError
from geo_sokoban_pipeline.config.grpo import EvaluationOptions, TrainOptions
from geo_sokoban_pipeline.console import refuse
from geo_sokoban_pipeline.pipelines.train.nodes import read_rows
from geo_sokoban_pipeline.runs.fingerprint import hash_files
from geo_sokoban_pipeline.runs.folders import START, best_iteration
from geo_sokoban_pipeline.runs.policy_folder import FolderWriter, PolicyFolder, link_policy
from geo_sokoban_pipeline.runs.provenance import read_versions, summarise_commands
from geo_sokoban_pipeline.tasks import task_of

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

logger = logging.getLogger(__name__)

Parts = dict[str, Callable[[], "pa.Table"]]


def select_policy(
    checkpoints: dict[str, Any], start: PolicyFolder, options: EvaluationOptions, task: str
) -> FolderWriter | PolicyFolder:
    """The final policy, without what only training needs: the newest checkpoint, or the best policy on validation.

    The best one may be the policy that GRPO started from.

    Raises:
        ParameterError: the best checkpoint is not stored.
    """
    from geo_sokoban_pipeline.training.checkpoint import better_choice

    newest = checkpoints[max(checkpoints)]
    entries = {"started_from": hash_files(start.manifest["files"])}
    number = int(newest["iteration"])
    if options.checkpoint == "best":
        if (best := best_iteration(newest["manifest"])) is None:
            logger.warning("evaluation.checkpoint=best: no saved policy was validated, so the newest one is taken")
        number = number if best is None else best
    if number == START:
        logger.warning(
            "evaluation.checkpoint=best: no checkpoint solves more validation prompts than the policy that GRPO "
            "started from, so this one is the final policy"
        )
        return link_policy(start.path, {**entries, "iteration": START, "policy_version": 0})
    name = f"iter={number:05d}"
    if name not in checkpoints:  # trained without loop.keep_best, or somebody has deleted it
        listed = ", ".join(str(checkpoint["iteration"]) for checkpoint in checkpoints.values())
        refuse(
            ParameterError(
                f"train_{task}.evaluation.checkpoint=best: the checkpoint of iteration {number} solved most "
                f"validation prompts, but it is not stored; stored are {listed}. Give evaluation.checkpoint=final to "
                "end with the newest one, or train a run with loop.keep_best=true."
            )
        )
    logger.info("final policy: checkpoint of iteration %d", number)
    if (better := better_choice(newest["manifest"], number, task_of(task))) is not None:
        logger.warning(better)
        entries["better"] = better
    chosen = checkpoints[name]
    kept = {name: chosen["manifest"][name] for name in ("iteration", "policy_version", "sampler")}
    return link_policy(chosen["dir"], {**kept, **entries})


def evaluate_policies(
    policy: PolicyFolder,
    final_policy: PolicyFolder,
    prompts: pd.DataFrame,
    eval_prompts: pd.DataFrame,
    options: TrainOptions,
    identity: dict[str, Any],
    seed: int,
) -> tuple[dict[str, Any], dict[str, pa.Table]]:
    """Policy before GRPO, final policy and baselines on the evaluation prompts."""
    from geo_sokoban_pipeline.evaluation.summary import evaluate_policies as evaluate
    from geo_sokoban_pipeline.training.runtime import prepare_process
    from geo_sokoban_pipeline.training.worker_group import servers_alone

    prepare_process(options.threads)
    policies = {"warm_start" if options.warm_start.steps else formats.START: policy, "final": final_policy}
    training = read_rows(prompts)
    run, held_out = f"train_{options.task}", read_rows(eval_prompts)
    with servers_alone(options) as (fitting, launcher):
        summary, episodes = evaluate(run, seed, policies, held_out, fitting, training=training, launcher=launcher)
    if better := final_policy.manifest.get("better"):
        summary["better"] = better
    return {**summary, "data_id": identity["id"]}, episodes


def write_report(
    metrics: list[dict[str, Any]],
    summary: dict[str, Any],
    policy: PolicyFolder,
    held_out: Parts,
    trained: Parts,
    validations: Parts,
    data_report: dict[str, Any],
    episodes: pa.Table,
    audit: dict[str, Any],
    audited: dict[str, Any] | None,
    commands: list[dict[str, Any]] | None,
    browsed: dict[str, Any] | None,
    run_id: str,
    options: TrainOptions,
    data: dict[str, Any],
    seed: int,
) -> str:
    """The HTML page of a run; it links to the run's site where there is one."""
    from geo_sokoban_pipeline.reporting.episodes import read_token_texts
    from geo_sokoban_pipeline.reporting.report import ReportInputs, build_report

    run, shown = f"train_{options.task}", (browsed or {}).get("runs", ())
    return build_report(
        ReportInputs(
            task=options.task,
            run=run,
            run_id=run_id,
            metrics=metrics,
            summary=summary,
            warm_start=policy.manifest.get("history", []),
            held_out=held_out,
            trained=trained,
            data_report=data_report,
            parameters={"seed": seed, options.task: data, run: options.model_dump(mode="json")},
            versions=read_versions(),
            token_texts=read_token_texts(policy.path),
            validations=validations,
            time=summarise_commands(commands or ()),
            index=episodes,
            audit=audit,
            whole_audit=audited,
            site=f"../../browse_{options.task}/{run_id}/site" if f"{run}/{run_id}" in shown else None,
        )
    )
