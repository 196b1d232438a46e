"""Nodes of a training run, in their order: frames and folders in, folders, partitions and a page out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

from geo_sokoban_pipeline import formats
from geo_sokoban_pipeline.config.base import ParameterError
from geo_sokoban_pipeline.config.grpo import EvaluationOptions, TrainOptions
from geo_sokoban_pipeline.config.policy import PolicyOptions
from geo_sokoban_pipeline.console import track
from geo_sokoban_pipeline.envs.base import describe_expert
from geo_sokoban_pipeline.runs.fingerprint import (
    check_fingerprint,
    hash_files,
    hash_rows,
    policy_parameters,
    warm_start_parameters,
)
from geo_sokoban_pipeline.runs.folders import START, best_iteration
from geo_sokoban_pipeline.runs.policy_folder import FolderWriter, PolicyFolder, link_policy
from geo_sokoban_pipeline.runs.provenance import read_versions, summarise_commands
from geo_sokoban_pipeline.runs.storage import partition
from geo_sokoban_pipeline.tasks import task_of
from geo_sokoban_pipeline.training.runtime import prepare_process

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

logger = logging.getLogger(__name__)

Parts = dict[str, Callable[[], "pa.Table"]]


def prepare_policy(state: PolicyFolder | None, options: PolicyOptions, seed: int) -> PolicyFolder | FolderWriter:
    """The policy to start from: the stored one where its parameters are the same, else built, linked or fetched."""
    wanted = policy_parameters(options, seed)
    if state is not None:
        check_fingerprint("the starting policy", state.manifest["fingerprint"], wanted)
        return state
    with track("prepare the policy, steps", 2, keep=False) as progress:
        from geo_sokoban_pipeline.policies.preparing import write_starting_policy

        progress.advance(note="torch and transformers are loaded")
        writer = write_starting_policy(options, seed, {"fingerprint": wanted})
        progress.advance(note=f"the policy of policy.source={options.source} is loaded")
    return writer


def warm_start(
    base: PolicyFolder,
    prompts: pd.DataFrame,
    validation_prompts: pd.DataFrame,
    state: PolicyFolder | None,
    options: TrainOptions,
    identity: dict[str, Any],
    seed: int,
) -> Iterator[PolicyFolder | FolderWriter]:
    """The policy after the warm start: the stored one where nothing it depends on has changed, else SFT.

    The optimizer state lies beside it, so that SFT can continue from here. A generator: Kedro saves what it yields
    while the ranks still hold their parts of the state.
    """
    rows, held_out = read_rows(prompts), read_rows(validation_prompts)
    wanted = {
        **warm_start_parameters(options, seed, data_parameters(identity)),
        "input.prompts": hash_rows(rows),
        "input.validation_prompts": hash_rows(held_out),
        "input.base_policy": hash_files(base.manifest["files"]),
    }
    if state is not None:
        check_fingerprint("the warm start", state.manifest["fingerprint"], wanted)
        yield state
        return
    from geo_sokoban_pipeline.preflight.first_checks import look_at_prompts

    look_at_prompts(rows, options, seed)
    if options.warm_start.steps == 0:
        yield link_policy(base.path, {"fingerprint": wanted, "history": []})
        return
    from geo_sokoban_pipeline.training.backends.base import DivergedError
    from geo_sokoban_pipeline.training.checkpoint import CheckpointWriter, layout_of, written_ahead
    from geo_sokoban_pipeline.training.sft import run_sft
    from geo_sokoban_pipeline.training.worker_group import load_driver_policy, open_worker_group, restarting

    logger.info("warm start: %s", describe_expert(options.warm_start.teacher, rows))
    threads = prepare_process(options.threads)
    policy = load_driver_policy(options, base.path, seed)
    for attempt in restarting(options, lambda: "nothing of the warm start is stored"):
        with attempt, open_worker_group(policy, options) as workers:
            try:
                history, backend = run_sft(policy, rows, held_out, options, seed, workers=workers)
            except DivergedError as error:
                section = f"train_{options.task}.warm_start"
                raise DivergedError(f"warm start: {error}. Lower {section}.learning_rate or {section}.clip.") from error
            layout = layout_of(options if workers is None else workers.options, threads)
            entries = {"fingerprint": wanted, "history": history, **layout}
            # The loop begins with an adapter of its own, whose base this is.
            filler = CheckpointWriter(backend, entries, merges=policy.adapter is not None)
            with written_ahead(filler, base.path.parent, workers) as writer:
                yield writer


def train_grpo(
    policy: PolicyFolder,
    prompts: pd.DataFrame,
    validation_prompts: pd.DataFrame,
    resume: dict[str, Any],
    options: TrainOptions,
    identity: dict[str, Any],
    seed: int,
) -> Iterator[tuple[Any, ...]]:
    """The GRPO loop: Kedro saves each result before the loop continues."""
    from geo_sokoban_pipeline.datasets.iterations import read_resume_state
    from geo_sokoban_pipeline.training.checkpoint import newest_checkpoint
    from geo_sokoban_pipeline.training.grpo_loop import RunInputs, run_grpo
    from geo_sokoban_pipeline.training.worker_group import restarting

    newest = partial(newest_checkpoint, resume["folder"])
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
    for attempt in restarting(options, newest):
        with attempt as lost:
            state = read_resume_state(resume["folder"]) if lost else resume
            with closing(run_grpo(inputs, state, lost)) as chunks:
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
    from geo_sokoban_pipeline.policies.lora import share_policy
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
    name = partition(number)
    if name not in checkpoints:  # trained without loop.keep_best, or somebody has deleted it
        listed = ", ".join(str(checkpoint["iteration"]) for checkpoint in checkpoints.values())
        raise ParameterError(
            f"train_{task}.evaluation.checkpoint=best: the checkpoint of iteration {number} solved most validation "
            f"prompts, but it is not stored; stored are {listed}. Give evaluation.checkpoint=final to end with the "
            "newest one, or train a run with loop.keep_best=true."
        )
    logger.info("final policy: checkpoint of iteration %d", number)
    if (better := better_choice(newest["manifest"], number, task_of(task))) is not None:
        logger.warning(better)
        entries["better"] = better
    chosen = checkpoints[name]
    kept = {name: chosen["manifest"][name] for name in ("iteration", "policy_version", "sampler")}
    return share_policy(chosen["dir"], {**kept, **entries})


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
    """A fingerprint's entries about a task's data: their id, and the settings that it stands for."""
    return {"id": identity["id"], **identity["settings"]}


def read_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of a prompts frame as plain values."""
    return list(frame.to_dict("records"))
