"""Nodes of the audit: they hand stored data to the checks, print the table, and stop where there is a finding."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from geo_sokoban_pipeline.console import print_table, refuse
from geo_sokoban_pipeline.runs.folders import RunFolders, SourceError

if TYPE_CHECKING:
    import pyarrow as pa

    from geo_sokoban_pipeline.datasets.iterations import Checkpoint
    from geo_sokoban_pipeline.runs.folders import RunStore
    from geo_sokoban_pipeline.runs.policy_folder import PolicyFolder

    Parts = Mapping[str, Callable[[], pa.Table]]

logger = logging.getLogger(__name__)

_COLOURS = {"ok": "green", "failure": "bold red"}
_SHOWN = 3  # findings of a check in the table; the stored audit has all


def audit_stored(
    trajectories: Parts,
    eval_trajectories: Parts,
    held_out_trajectories: Parts,
    checkpoints: Mapping[str, Checkpoint],
    policy: PolicyFolder,
    runs: RunStore,
    run_id: str,
    *,
    task: str,
) -> dict[str, Any]:
    """The findings about the stored run of `train_<task>`.

    Raises:
        SourceError: it has no checkpoint yet, so there is nothing to audit.
    """
    from geo_sokoban_pipeline.evaluation.audit import audit_run
    from geo_sokoban_pipeline.policies.policy import load_encoding

    run = f"train_{task}"
    if not checkpoints:
        refuse(SourceError(f"{run}/{run_id} has no checkpoint yet: kedro run --pipelines={run} makes one."))
    # The rules that the run was made with, whatever the parameters say by now.
    rules = checkpoints[max(checkpoints)]["manifest"]["fingerprint"]
    entries = {
        "trajectories": trajectories,
        "eval_trajectories": eval_trajectories,
        "held_out_trajectories": held_out_trajectories,
    }
    folders = RunFolders.of(runs.root, run, run_id)
    audit = audit_run(
        {f"{run}.{name}": parts for name, parts in entries.items()},
        load_encoding(policy.path).codec,
        {name: checkpoint["dir"] for name, checkpoint in checkpoints.items()},
        {folder.parent.parent.name: folder for folder in (folders.models, folders.outputs, folders.reports)},
        turn_separator=rules["rollout.preset"] != "slime_exact" and rules["rollout.rules.turn_separator"],
    )
    rows = [
        (
            check["check"],
            check["subject"],
            str(check["checked"]),
            "failure" if check["findings"] else "ok",
            "\n".join(check["findings"][:_SHOWN]),
        )
        for check in audit["checks"]
    ]
    print_table(f"Audit of {run}, run id {run_id}", ("check", "of", "checked", "state", "found"), rows, _COLOURS)
    return {"run": run, "run_id": run_id, **audit}


def judge_stored(audit: dict[str, Any]) -> None:
    """Log the outcome; a finding ends the command with exit code 1."""
    from geo_sokoban_pipeline.evaluation.audit import AuditError, judge_audit

    try:
        judge_audit(audit)
    except AuditError as error:
        refuse(error)
    logger.info("%s/%s: no findings", audit["run"], audit["run_id"])
