"""Nodes of the control: settings and stored runs in, a policy and its evaluation out; the rules are in the core."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.study import ControlOptions
from geo_sokoban_pipeline.envs.base import Task
from geo_sokoban_pipeline.pipelines.train.nodes import data_parameters, read_rows
from geo_sokoban_pipeline.runs.fingerprint import check_fingerprint, hash_files, hash_rows, warm_start_parameters
from geo_sokoban_pipeline.runs.policy_folder import FolderWriter, PolicyFolder
from geo_sokoban_pipeline.tasks import task_of
from geo_sokoban_pipeline.training.runtime import prepare_process

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger(__name__)


def plan_control(
    began: Callable[[], PolicyFolder],
    trained: Callable[[], tuple[list[dict[str, Any]], bool]],
    episodes: Callable[[], list[Path]],
    prompts: pd.DataFrame,
    validation_prompts: pd.DataFrame,
    stored: dict[str, Any] | None,
    control: ControlOptions,
    options: TrainOptions,
    identity: dict[str, Any],
    seed: int,
) -> dict[str, Any]:
    """The CPU-seconds that the control may spend, and their inputs: the stored ones where nothing has changed."""
    from geo_sokoban_pipeline.training.sft import (
        check_source,
        control_options,
        grpo_cpu_seconds,
        plan_budget,
        time_steps,
    )

    start, (metrics, complete), rows = began(), trained(), read_rows(prompts)
    wanted = {
        **warm_start_parameters(options, seed, data_parameters(identity)),
        "input.prompts": hash_rows(rows),
        "input.validation_prompts": hash_rows(read_rows(validation_prompts)),
    }
    check_source(start, metrics, options.loop.iterations, complete=complete, wanted=wanted)
    drawn = _prompts(episodes, control, rows, task_of(options.task))
    fingerprint = {
        **wanted,
        "control.imitate": control.imitate,
        "control.share": control.share,
        "input.grpo_cpu_seconds": grpo_cpu_seconds(metrics),
        "input.levels": hash_rows(drawn),
        "input.policy": hash_files(start.manifest["files"]),
    }
    if stored is not None:
        check_fingerprint("the control", stored["fingerprint"], fingerprint)
        return stored
    prepare_process(options.threads)
    own = control_options(options, control)
    cost = time_steps(start, drawn, own, seed)
    budget = plan_budget(start, metrics, own.warm_start.episodes_per_step, control.share, cost)
    logger.info("control: %d steps for the %.1f CPU-seconds of GRPO", budget.steps, budget.grpo_cpu_seconds)
    return {"fingerprint": fingerprint, "budget": asdict(budget)}


def continue_sft(
    began: Callable[[], PolicyFolder],
    episodes: Callable[[], list[Path]],
    prompts: pd.DataFrame,
    validation_prompts: pd.DataFrame,
    state: PolicyFolder | None,
    planned: dict[str, Any],
    control: ControlOptions,
    options: TrainOptions,
    seed: int,
) -> Iterator[PolicyFolder | FolderWriter]:
    """The source run's warm start, continued for GRPO's CPU-seconds: the stored one where nothing has changed.

    A generator: Kedro saves what it yields while the ranks still hold their parts of the state.
    """
    from geo_sokoban_pipeline.training.checkpoint import CheckpointWriter, layout_of, written_ahead
    from geo_sokoban_pipeline.training.sft import Budget, continue_warm_start, control_options
    from geo_sokoban_pipeline.training.worker_group import load_driver_policy, open_worker_group, restarting

    wanted = {**planned["fingerprint"], "control.steps": planned["budget"]["steps"]}
    if state is not None:
        check_fingerprint("the control", state.manifest["fingerprint"], wanted)
        yield state
        return
    options, start = control_options(options, control), began()
    threads = prepare_process(options.threads)
    policy = load_driver_policy(options, start.path, seed)
    rows = _prompts(episodes, control, read_rows(prompts), task_of(options.task))
    held_out = read_rows(validation_prompts)
    budget = Budget(**planned["budget"])
    for attempt in restarting(options, lambda: "nothing of the control is stored"):
        with attempt, open_worker_group(policy, options) as workers:
            history, backend = continue_warm_start(policy, start.path, rows, held_out, options, seed, budget, workers)
            entries = {
                "fingerprint": wanted,
                "budget": planned["budget"],
                "cpu_seconds": history[-1]["cpu_seconds"],
                "history": history,
                **layout_of(options if workers is None else workers.options, threads),
            }
            filler = CheckpointWriter(backend, entries, merges=policy.adapter is not None)
            with written_ahead(filler, start.path.parent, workers) as writer:
                yield writer


def evaluate_control(
    policy: PolicyFolder,
    eval_prompts: pd.DataFrame,
    control: ControlOptions,
    options: TrainOptions,
    identity: dict[str, Any],
    seed: int,
) -> dict[str, Any]:
    """The control on the evaluation prompts, in the way of the run's own policies."""
    from geo_sokoban_pipeline.evaluation.summary import evaluate_policies
    from geo_sokoban_pipeline.training.worker_group import servers_alone

    prepare_process(options.threads)
    with servers_alone(options) as (fitting, launcher):
        summary, _ = evaluate_policies(
            f"control_{options.task}",
            seed,
            {f"control_{control.imitate}": policy},
            read_rows(eval_prompts),
            fitting,
            baselines=False,
            ablations=False,
            launcher=launcher,
        )
    return {**summary, "data_id": identity["id"], "source": control.source.model_dump()}


def _prompts(
    episodes: Callable[[], list[Path]], control: ControlOptions, rows: list[dict[str, Any]], task: Task
) -> list[dict[str, Any]]:
    from geo_sokoban_pipeline.training.sft import drawn_prompts, repeat_prompts

    if control.imitate == "teacher":
        return rows
    return repeat_prompts(rows, drawn_prompts(episodes()), task)
