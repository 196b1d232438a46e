"""Fingerprints before any work: a run continues only with the parameters it was made with.

The nodes compare inputs too, but by then the data nodes have run. So the part of each stored fingerprint that
parameters alone decide is compared here, from manifests, before the first node.
"""

from __future__ import annotations

from pathlib import Path

from geo_sokoban_pipeline.envs.identity import identify_data
from geo_sokoban_pipeline.fingerprint import (
    Fingerprint,
    FingerprintError,
    describe_differences,
    differences,
    loop_parameters,
    policy_parameters,
    warm_start_parameters,
)
from geo_sokoban_pipeline.options.project import ProjectParameters
from geo_sokoban_pipeline.storage import MANIFEST, read_manifest

TRAINING = "train_"  # only runs of this kind continue from what they have stored
_INPUTS = "input."  # names of a fingerprint that need the data themselves


def check_stored_run(run: str, models: Path, parameters: ProjectParameters) -> None:
    """Compare the parameters of this command with those of every stored stage of a run.

    Args:
        run: namespace; only `train_*` is looked at.
        models: folder of the run id in 06_models.
        parameters: all parameters of the command.

    Raises:
        FingerprintError: with the list of differences and the two ways out.
        CorruptFolderError: a manifest is not readable; the message names it.
    """
    if not run.startswith(TRAINING):
        return
    lines: dict[str, None] = {}
    for folder, current in stages(run, models, parameters):
        manifest = read_manifest(folder, verify=False)
        if manifest is not None:
            stored = {k: v for k, v in manifest.get("fingerprint", {}).items() if not k.startswith(_INPUTS)}
            lines |= dict.fromkeys(differences(stored, current))
    if lines:
        raise FingerprintError(describe_differences(f"{run}: what is stored", sorted(lines)))


def stages(run: str, models: Path, parameters: ProjectParameters) -> list[tuple[Path, Fingerprint]]:
    """Folder and current parameters of each stage: starting policy, warm start, newest checkpoint."""
    options = getattr(parameters, run)
    data = identify_data(options.task, getattr(parameters, options.task)).fingerprint
    found = [
        (models / "base_policy", policy_parameters(options.policy, parameters.seed)),
        (models / "policy", warm_start_parameters(options, parameters.seed, data)),
    ]
    newest = newest_checkpoints(models / "checkpoints")[-1:]
    return [*found, *((folder, loop_parameters(options, parameters.seed, data)) for folder in newest)]


def newest_checkpoints(folder: Path) -> list[Path]:
    """Sealed checkpoint folders, the newest last; what else lies in the folder is not ours."""
    sealed = (path.parent for path in folder.glob(f"iter=*/{MANIFEST}"))
    ours = (path for path in sealed if path.name.removeprefix("iter=").isdigit())
    return sorted(ours, key=lambda path: int(path.name.removeprefix("iter=")))
