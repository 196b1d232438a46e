"""Nodes of the training pipelines: frames and folders in, folders and partitions out; the rules are in the core."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from geo_sokoban_pipeline.config.base import ParameterError
from geo_sokoban_pipeline.config.grpo import EvaluationOptions, TrainOptions
from geo_sokoban_pipeline.config.policy import PolicyOptions
from geo_sokoban_pipeline.console import refuse
from geo_sokoban_pipeline.runs.fingerprint import (
    check_fingerprint,
    hash_files,
    hash_rows,
    policy_parameters,
    warm_start_parameters,
)
from geo_sokoban_pipeline.runs.policy_folder import FolderWriter, PolicyFolder, link_policy
from geo_sokoban_pipeline.runs.provenance import read_versions
from geo_sokoban_pipeline.tasks import task_of

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

logger = logging.getLogger(__name__)

Parts = dict[str, Callable[[], "pa.Table"]]


def prepare_policy(state: PolicyFolder | None, options: PolicyOptions, seed: int) -> PolicyFolder | FolderWriter:
    """The policy to start from: the stored one where its parameters are the same, else built, linked or fetched."""
    wanted = policy_parameters(options, seed)
    stored = _stored("the starting policy", state, wanted)
    if stored is not None:
        return stored
    from geo_sokoban_pipeline.policies.preparing import write_starting_policy

    return write_starting_policy(options, seed, {"fingerprint": wanted})


def warm_start(
    base: PolicyFolder,
    prompts: pd.DataFrame,
    validation_prompts: pd.DataFrame,
    state: PolicyFolder | None,
    options: TrainOptions,
    identity: dict[str, Any],
    seed: int,
) -> PolicyFolder | FolderWriter:
    """The policy after the warm start: the stored one where nothing it depends on has changed, else SFT.

    The optimizer state lies beside it, so that SFT can continue from here.
    """
    rows, held_out = read_rows(prompts), read_rows(validation_prompts)
    wanted = {
        **warm_start_parameters(options, seed, data_parameters(identity)),
        "input.prompts": hash_rows(rows),
        "input.validation_prompts": hash_rows(held_out),
        "input.base_policy": hash_files(base.manifest["files"]),
    }
    stored = _stored("the warm start", state, wanted)
    if stored is not None:
        return stored
    _look_at_prompts(rows, options, seed)
    if options.warm_start.steps == 0:
        return link_policy(base.path, {"fingerprint": wanted, "history": []})
    from geo_sokoban_pipeline.envs.base import describe_expert
    from geo_sokoban_pipeline.policies.policy import load_as
    from geo_sokoban_pipeline.training.backends.base import DivergedError
    from geo_sokoban_pipeline.training.checkpoint import CheckpointWriter
    from geo_sokoban_pipeline.training.runtime import prepare_process
    from geo_sokoban_pipeline.training.sft import run_sft

    logger.info("warm start: %s", describe_expert(options.warm_start.teacher, rows))
    threads = prepare_process(options.threads)
    policy = load_as(options.policy, base.path)
    try:
        history, backend = run_sft(policy, rows, held_out, options, seed)
    except DivergedError as error:
        section = f"train_{options.task}.warm_start"
        raise DivergedError(f"warm start: {error}. Lower {section}.learning_rate or {section}.clip.") from error
    entries = {"fingerprint": wanted, "history": history, "threads": threads, "processes": options.processes}
    return CheckpointWriter(backend, entries)


def train_grpo(
    policy: PolicyFolder,
    prompts: pd.DataFrame,
    validation_prompts: pd.DataFrame,
    resume: dict[str, Any],
    options: TrainOptions,
    identity: dict[str, Any],
    seed: int,
) -> Iterator[tuple[Any, ...]]:
    """The GRPO loop: what it yields is saved by Kedro before the loop continues."""
    from geo_sokoban_pipeline.training.grpo_loop import RunInputs, run_grpo

    inputs = RunInputs(
        run=f"train_{options.task}",
        seed=seed,
        options=options,
        data_options=data_parameters(identity),
        policy=policy,
        prompts=read_rows(prompts),
        validation_prompts=read_rows(validation_prompts),
    )
    # The node's own function must be a generator: Kedro collects what a wrapper merely returns.
    with closing(run_grpo(inputs, resume)) as chunks:
        for chunk in chunks:
            yield chunk
            release(chunk)


def select_policy(
    checkpoints: dict[str, Any], start: PolicyFolder, options: EvaluationOptions, task: str
) -> FolderWriter | PolicyFolder:
    """The final policy, without what only training needs: the newest checkpoint, or the best policy on validation.

    The best one may be the policy that GRPO started from.

    Raises:
        ParameterError: the best checkpoint is not stored.
    """
    from geo_sokoban_pipeline.runs.folders import START, best_iteration
    from geo_sokoban_pipeline.training.checkpoint import better_choice

    newest = checkpoints[max(checkpoints)]
    entries = {"started_from": hash_files(start.manifest["files"])}
    number = int(newest["iteration"])
    if options.checkpoint == "best":
        best = best_iteration(newest["manifest"])
        if best is None:
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
    better = better_choice(newest["manifest"], number, task_of(task))
    if better is not None:
        logger.warning(better)
    chosen = checkpoints[name]
    folder = PolicyFolder(chosen["dir"], chosen["manifest"])
    kept = {name: chosen["manifest"][name] for name in ("iteration", "policy_version", "sampler")}
    return link_policy(folder.path, {**kept, **entries, **({"better": better} if better else {})})


def evaluate_policies(
    policy: PolicyFolder,
    final_policy: PolicyFolder,
    prompts: pd.DataFrame,
    eval_prompts: pd.DataFrame,
    options: TrainOptions,
    identity: dict[str, Any],
    seed: int,
) -> tuple[dict[str, Any], dict[str, pa.Table]]:
    """Warm-start policy, final policy and baselines on the evaluation prompts."""
    from geo_sokoban_pipeline.evaluation.summary import evaluate_policies as evaluate
    from geo_sokoban_pipeline.training.runtime import prepare_process

    prepare_process(options.threads)
    policies = {"warm_start": policy, "final": final_policy}
    training = read_rows(prompts)
    run, played = f"train_{options.task}", read_rows(eval_prompts)
    summary, episodes = evaluate(run, seed, policies, played, options, training=training)
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
    commands: list[dict[str, Any]] | None,
    run_id: str,
    options: TrainOptions,
    data: dict[str, Any],
    seed: int,
) -> str:
    """The HTML page of a run."""
    from geo_sokoban_pipeline.reporting.episodes import read_token_texts
    from geo_sokoban_pipeline.reporting.report import ReportInputs, build_report

    run = f"train_{options.task}"
    inputs = ReportInputs(
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
        commands=commands or (),
    )
    return build_report(inputs)


def release(chunk: Sequence[Any]) -> None:
    """Empty the partitions that Kedro has just saved.

    Kedro deals the outputs of a generator to one stream each with `itertools.tee`, which frees its items in blocks of
    57: by itself a run would hold the episodes of so many iterations. A hook that wants to keep what
    `after_dataset_saved` shows it copies the dict.
    """
    for parts in chunk:
        if isinstance(parts, dict):
            parts.clear()


def data_parameters(identity: dict[str, Any]) -> dict[str, Any]:
    """What a fingerprint holds of a task's data: their id, and the settings that it stands for."""
    return {"id": identity["id"], **identity["settings"]}


def read_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of a prompts frame as plain values."""
    rows: list[dict[str, Any]] = frame.to_dict("records")
    return rows


def _look_at_prompts(rows: list[dict[str, Any]], options: TrainOptions, seed: int) -> None:
    from geo_sokoban_pipeline.preflight.first_checks import look_at_prompts

    try:
        look_at_prompts(rows, options, seed)
    except ParameterError as error:
        refuse(error)


def _stored(what: str, state: PolicyFolder | None, wanted: dict[str, Any]) -> PolicyFolder | None:
    """The stored policy if it was made with the wanted fingerprint, None if there is none."""
    if state is not None:
        check_fingerprint(what, state.manifest["fingerprint"], wanted)
    return state
