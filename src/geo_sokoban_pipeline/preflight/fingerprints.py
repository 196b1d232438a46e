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
from geo_sokoban_pipeline.options.training import TrainOptions
from geo_sokoban_pipeline.storage import MANIFEST, read_manifest

TRAINING = "train_"  # only runs of this kind continue from what they have stored
_INPUTS = "input."  # names of a fingerprint that need the data themselves

# What decides, in each pipeline on stored runs, that the numbers can be compared with those of the run itself.
_COMPARED = {
    "rollout": ("env.", "reward.", "rollout."),
    "update": ("grpo.", "optimizer.", "rollout.sampling."),
    "evaluate": ("env.", "reward.", "rollout.", "evaluation.sampling."),
}
# Who samples changes no rule; an evaluation has a sampling of its own.
_NOT_COMPARED = {
    "rollout": ("rollout.engine", "rollout.server."),
    "update": (),
    "evaluate": ("rollout.engine", "rollout.server.", "rollout.sampling."),
}


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
        raise FingerprintError(describe_differences(f"{run}: a run", sorted(lines)))


def other_settings(run: str, models: Path, options: TrainOptions) -> list[str]:
    """Settings with which a pipeline plays or trains otherwise than the run it works on was trained.

    Args:
        run: namespace of the pipeline, such as `evaluate_sokoban`.
        models: folder of the source's run id in 06_models.
        options: what `train_<task>` says now, from which the pipeline takes its settings.

    Returns:
        One line for each setting that differs, sorted; nothing where they are equal, and for other pipelines.
    """
    kind = run.partition("_")[0]
    if kind not in _COMPARED:
        return []
    folders = [*newest_checkpoints(models / "checkpoints")[-1:], models / "policy"]
    manifest = next(filter(None, (read_manifest(folder, verify=False) for folder in folders)), None)
    if manifest is None:
        return []
    stored = manifest.get("fingerprint", {})
    current = loop_parameters(options, 0, {})

    def compared(values: Fingerprint) -> Fingerprint:
        return {
            name: value
            for name, value in values.items()
            if name.startswith(_COMPARED[kind]) and not name.startswith(_NOT_COMPARED[kind])
        }

    before = compared(stored)
    if "grpo.group_size" in stored:  # of the loop: all of it is known
        return differences(before, compared(current))
    return differences(before, {name: value for name, value in compared(current).items() if name in before})


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
