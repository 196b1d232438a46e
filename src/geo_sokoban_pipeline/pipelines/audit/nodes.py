"""Nodes of the audit: they hand stored data to the checks, print the table, and stop where there is a finding."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geo_sokoban_pipeline.config.grpo import SourceOptions
from geo_sokoban_pipeline.config.study import AuditOptions
from geo_sokoban_pipeline.envs.inspection import TABLES
from geo_sokoban_pipeline.preflight.stored import missing_checkpoints
from geo_sokoban_pipeline.runs.folders import MODELS, OUTPUTS, POLICIES, REPORTS, RunStore, SourceError
from geo_sokoban_pipeline.runs.policy_folder import PolicyFolder
from geo_sokoban_pipeline.runs.provenance import suggest_command
from geo_sokoban_pipeline.runs.storage import partition
from geo_sokoban_pipeline.training.runtime import collector_paused, freeze_survivors

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from geo_sokoban_pipeline.datasets.iterations import Checkpoint

    Parts = Mapping[str, Callable[[], pa.Table]]
    Rows = Sequence[Mapping[str, Any]]

logger = logging.getLogger(__name__)

_WITH_TRAINING = 256  # episodes of each entry that are compared at the end of a training: some seconds


def audit_stored(
    trajectories: Parts,
    eval_trajectories: Parts,
    held_out_trajectories: Parts,
    checkpoints: Mapping[str, Checkpoint],
    policy: PolicyFolder,
    runs: RunStore,
    run_id: str,
    options: AuditOptions,
    *,
    task: str,
) -> dict[str, Any]:
    """The findings about the stored run of `train_<task>`.

    Raises:
        SourceError: it has no checkpoint yet, so there is nothing to audit.
    """
    from geo_sokoban_pipeline.evaluation.audit import (
        RunRules,
        as_record,
        audit_edits,
        audit_entries,
        audit_forks,
        audit_splits,
        audit_stored_files,
        entries_of_run,
        print_audit,
    )
    from geo_sokoban_pipeline.policies.policy import load_encoding
    from geo_sokoban_pipeline.training.audit_scores import audit_scores

    run = f"train_{task}"
    if not checkpoints:
        raise SourceError(f"{run}/{run_id} has no checkpoint yet: {suggest_command(run, run_id)} makes one.")
    newest = checkpoints[max(checkpoints)]
    rules = RunRules.of(newest["manifest"])
    source = SourceOptions(run=run, run_id=run_id)
    folders = runs.folders(source)
    # Prompts of the run's own data, whatever the settings are by now.
    splits = {name: _read_rows(runs.prompt_table(source, name)) for name in TABLES.values()}
    stored = {name: folders.models / name for name in POLICIES if (folders.models / name).is_dir()}
    parts = (trajectories, eval_trajectories, held_out_trajectories)
    goes_on = not runs.is_complete(source)
    entries = entries_of_run(run, parts, splits, iterations=newest["iteration"] + 1, goes_on=goes_on)
    encoding = load_encoding(policy.path)
    freeze_survivors()  # libraries and prompts, which every collection would walk
    with collector_paused():
        checks = audit_entries(entries, encoding, rules)
    checks += audit_edits(folders.outputs, contract=False)
    checks += audit_splits(splits, rules, shared=_shares(runs.data_report(source) or {}))
    checks += audit_forks(runs.side_tables("fork", "turn_values"), folders.outputs)
    if options.versions and options.scored_share:
        versions = {checkpoint["iteration"] + 1: checkpoint["dir"] for checkpoint in checkpoints.values()}
        checks += audit_scores(entries, {0: policy.path, **versions}, rules, options)
    named = {checkpoint["iteration"]: checkpoint["dir"] for checkpoint in checkpoints.values()}
    named |= {
        number: folders.models / "checkpoints" / partition(number) for number in missing_checkpoints(folders.models)
    }
    checks += audit_stored_files(
        {**stored, **{folder.name: folder for _, folder in sorted(named.items())}},
        dict(zip((MODELS, OUTPUTS, REPORTS), folders.layers, strict=True)),
    )
    print_audit(f"Audit of {run}, run id {run_id}", checks)
    return {"run": run, "run_id": run_id, **as_record(checks), "iterations": newest["iteration"] + 1}


def audit_training(
    trajectories: Parts,
    eval_trajectories: Parts,
    held_out_trajectories: Parts,
    prompts: pd.DataFrame,
    validation_prompts: pd.DataFrame,
    eval_prompts: pd.DataFrame,
    data_report: dict[str, Any],
    checkpoints: Mapping[str, Checkpoint],
    policy: PolicyFolder,
    run_id: str,
    task: str,
) -> dict[str, Any]:
    """The short audit at the end of a training: no model, no files, a sample of the episodes; findings are warnings."""
    from geo_sokoban_pipeline.evaluation.audit import (
        RunRules,
        as_record,
        audit_entries,
        audit_splits,
        entries_of_run,
        warn_of_findings,
    )
    from geo_sokoban_pipeline.policies.policy import load_encoding

    run = f"train_{task}"
    newest = checkpoints[max(checkpoints)]
    rules = RunRules.of(newest["manifest"])
    frames = {"prompts": prompts, "validation_prompts": validation_prompts, "eval_prompts": eval_prompts}
    splits: dict[str, Rows | None] = {name: frame.to_dict("records") for name, frame in frames.items()}
    parts = (trajectories, eval_trajectories, held_out_trajectories)
    entries = entries_of_run(run, parts, splits, iterations=newest["iteration"] + 1)
    checks = audit_entries(entries, load_encoding(policy.path), rules, limit=_WITH_TRAINING)
    checks += audit_splits(splits, rules, shared=_shares(data_report))
    warn_of_findings(checks)
    return {"run": run, "run_id": run_id, **as_record(checks)}


def judge_stored(audit: dict[str, Any]) -> None:
    """Log the result.

    Raises:
        AuditError: there is a finding.
    """
    from geo_sokoban_pipeline.evaluation.audit import judge_audit

    again = suggest_command(audit["run"], audit["run_id"], "--tags=report")
    logger.info("%s, with the parameters of the training, puts this audit into the run's report", again)
    judge_audit(audit)
    logger.info("%s/%s: no findings", audit["run"], audit["run_id"])


def _read_rows(path: Path | None) -> Rows | None:
    from geo_sokoban_pipeline.datasets.tables import FrameDataset

    return None if path is None else list(FrameDataset(path=str(path)).load().to_dict("records"))


def _shares(data_report: Mapping[str, Any]) -> bool:
    """Whether splits share what should be apart, as where there is too little of it."""
    return any((data_report.get("overlaps") or {}).values())
