"""Nodes of a training run up to its loop: frames and folders in, folders and partitions out."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

from geo_sokoban_pipeline.config.base import ParameterError
from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.policy import PolicyOptions
from geo_sokoban_pipeline.console import refusing, track
from geo_sokoban_pipeline.envs.base import describe_expert
from geo_sokoban_pipeline.runs.fingerprint import (
    check_fingerprint,
    hash_files,
    hash_rows,
    policy_parameters,
    warm_start_parameters,
)
from geo_sokoban_pipeline.runs.policy_folder import FolderWriter, PolicyFolder, link_policy

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger(__name__)


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

    with refusing(ParameterError):
        look_at_prompts(rows, options, seed)
    if options.warm_start.steps == 0:
        yield link_policy(base.path, {"fingerprint": wanted, "history": []})
        return
    from geo_sokoban_pipeline.training.backends.base import DivergedError
    from geo_sokoban_pipeline.training.checkpoint import CheckpointWriter, layout_of, written_ahead
    from geo_sokoban_pipeline.training.runtime import prepare_process
    from geo_sokoban_pipeline.training.sft import run_sft
    from geo_sokoban_pipeline.training.worker_group import load_driver_policy, open_worker_group, restarting

    logger.info("warm start: %s", describe_expert(options.warm_start.teacher, rows))
    threads = prepare_process(options.threads)
    policy = load_driver_policy(options, base.path)
    for attempt in restarting(options, lambda: "nothing of the warm start is stored"):
        with attempt, open_worker_group(policy, options) as workers:
            try:
                history, backend = run_sft(policy, rows, held_out, options, seed, workers=workers)
            except DivergedError as error:
                section = f"train_{options.task}.warm_start"
                raise DivergedError(f"warm start: {error}. Lower {section}.learning_rate or {section}.clip.") from error
            layout = layout_of(options if workers is None else workers.options, threads)
            entries = {"fingerprint": wanted, "history": history, **layout}
            with written_ahead(CheckpointWriter(backend, entries), base.path.parent, workers) as writer:
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
