"""Policies before any work: what a run would start from is looked at before its data nodes run.

Only names, file lists and a configuration file are read, so a large policy costs no more than the tiny one.
"""

from __future__ import annotations

from pathlib import Path

from geo_sokoban_pipeline.folders import check_model_type, check_policy_files, find_policy_folder
from geo_sokoban_pipeline.hub import fetch_config
from geo_sokoban_pipeline.options.policy import PolicyOptions
from geo_sokoban_pipeline.options.project import ProjectParameters
from geo_sokoban_pipeline.preflight.fingerprints import TRAINING
from geo_sokoban_pipeline.storage import MANIFEST


def check_starting_policy(run: str, models: Path, parameters: ProjectParameters) -> None:
    """See that the policy of a training run is there, unless the run has stored its own copy.

    Args:
        run: namespace; only `train_*` is looked at.
        models: folder of the run id in 06_models.

    Raises:
        FileNotFoundError, ValueError: the folder is missing or holds no policy of a kind that is supported.
        PolicyUnavailableError: the hub has no such policy, or cannot be reached and nothing is cached.
    """
    if not run.startswith(TRAINING) or (models / "base_policy" / MANIFEST).is_file():
        return
    options: PolicyOptions = getattr(parameters, run).policy
    if options.path is None or options.source == "tiny":
        return
    if options.source == "hub":
        check_model_type(f"{run}.policy.path={options.path}", fetch_config(options.path, options.revision))
        return
    check_policy_files(find_policy_folder(options.path, f"{run}.policy"))
