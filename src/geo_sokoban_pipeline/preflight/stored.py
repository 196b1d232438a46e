"""State of a run id: free, in use, unfinished, finished, damaged, or stored with other settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.envs.data_identity import identify_data
from geo_sokoban_pipeline.envs.inspection import Check
from geo_sokoban_pipeline.parameters import ProjectParameters
from geo_sokoban_pipeline.preflight.checks import Subject
from geo_sokoban_pipeline.runs.fingerprint import (
    Fingerprint,
    FingerprintError,
    describe_differences,
    differences,
    loop_parameters,
    policy_parameters,
    warm_start_parameters,
)
from geo_sokoban_pipeline.runs.folders import RunFolders, read_metrics_row, sealed_checkpoints
from geo_sokoban_pipeline.runs.lock import find_holder
from geo_sokoban_pipeline.runs.provenance import read_commands
from geo_sokoban_pipeline.runs.storage import (
    COMPLETE_FILE,
    CorruptFolderError,
    find_json,
    find_other_sizes,
    held_bytes,
    iteration_of,
    read_manifest,
)

TRAINING = "train_"  # only runs of this kind are continued
_INPUTS = "input."  # names of a fingerprint that depend on the data

# Settings that must be equal for the results of a pipeline on a stored run to be comparable with the run itself.
_COMPARED = {
    "rollout": ("env.", "reward.", "rollout."),
    "update": ("grpo.", "optimizer.", "rollout.sampling."),
    "evaluate": ("env.", "reward.", "rollout.", "evaluation.sampling."),
}
# The engine changes no rule; an evaluation has its own sampling.
_NOT_COMPARED = {
    "rollout": ("rollout.engine", "rollout.server."),
    "update": (),
    "evaluate": ("rollout.engine", "rollout.server.", "rollout.sampling."),
}


def check_stored_run(run: str, models: Path, parameters: ProjectParameters) -> None:
    """Compare the parameters of this command with those of every stored stage of a run.

    Args:
        run: namespace; only `train_*` is checked.
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
        if manifest := read_manifest(folder, verify=False):
            stored = {k: v for k, v in manifest.get("fingerprint", {}).items() if not k.startswith(_INPUTS)}
            lines |= dict.fromkeys(differences(stored, current))
    if lines:
        raise FingerprintError(describe_differences(f"{run}: a run", sorted(lines)))


def other_settings(run: str, models: Path, options: TrainOptions) -> list[str]:
    """Settings of a pipeline on a stored run that differ from those of the run.

    Args:
        run: namespace of the pipeline, such as `evaluate_sokoban`.
        models: folder of the source's run id in 06_models.
        options: current `train_<task>`, from which the pipeline takes its settings.

    Returns:
        One line for each difference, sorted; empty for other pipelines.
    """
    kind = run.partition("_")[0]
    if kind not in _COMPARED:
        return []
    folders = [*_newest_checkpoint(models), models / "policy"]
    manifest = next(filter(None, (read_manifest(folder, verify=False) for folder in folders)), None)
    if manifest is None:
        return []
    stored, current = (
        {
            name: value
            for name, value in values.items()
            if name.startswith(_COMPARED[kind]) and not name.startswith(_NOT_COMPARED[kind])
        }
        for values in (manifest.get("fingerprint", {}), loop_parameters(options, 0, {}))
    )
    if "grpo.group_size" not in manifest.get("fingerprint", {}):  # a checkpoint of the loop has all settings
        current = {name: value for name, value in current.items() if name in stored}
    return differences(stored, current)


def stages(run: str, models: Path, parameters: ProjectParameters) -> list[tuple[Path, Fingerprint]]:
    """Folder and current parameters of each stage: starting policy, warm start, newest checkpoint."""
    options = getattr(parameters, run)
    data = identify_data(options.task, getattr(parameters, options.task)).fingerprint
    return [
        (models / "base_policy", policy_parameters(options.policy, parameters.seed)),
        (models / "policy", warm_start_parameters(options, parameters.seed, data)),
        *((folder, loop_parameters(options, parameters.seed, data)) for folder in _newest_checkpoint(models)),
    ]


def _newest_checkpoint(models: Path) -> list[Path]:
    """The newest sealed checkpoint alone; `[]` without one."""
    return list(sealed_checkpoints(models).values())[-1:]


# Damaged files, found by a quick look at the start and not by the report after hours.


_MARK = b"PAR1"  # a parquet file begins and ends with it


def find_damage(models: Path, outputs: Path) -> list[str]:
    """Damaged checkpoints, policies, metrics and trajectories of a run: one text each, with the way out.

    Args:
        models: folder of the run id in 06_models.
        outputs: folder of the run id in 07_model_output.
    """
    folders = [models / "base_policy", models / "policy", *_newest_checkpoint(models)]
    damaged = [text for folder in folders for text in find_damaged_files(folder)]
    return [*damaged, *find_damaged_rows(models, outputs)]


def find_damaged_rows(models: Path, outputs: Path) -> list[str]:
    """Damaged committed metrics and trajectories, as in `find_damage`.

    Rows after the newest checkpoint are ignored: a continued run deletes them and computes them again.
    """
    last = stored_iterations(models) - 1
    return [*_damaged_metrics(outputs, last), *_damaged_trajectories(outputs, last)]


def find_gaps(models: Path, outputs: Path) -> list[str]:
    """Missing or damaged parts of a run that can still be read, one text each; empty while a command works on the run.

    Checkpoints that retention has removed (`loop.keep_last`, `keep_best`, `save_interval`) are no gap.

    Args:
        models: folder of the run id in 06_models.
        outputs: folder of the run id in 07_model_output.
    """
    if not models.is_dir() or not models.parent.name.startswith(TRAINING) or find_holder(models) is not None:
        return []
    newest = stored_iterations(models) - 1
    later = {
        number
        for path in [*(outputs / "metrics").glob("iter=*.json"), *(outputs / "trajectories").glob("iter=*")]
        if (number := iteration_of(path.name)) is not None and number > newest
    }
    found = [f"checkpoint {number} is missing: it was deleted" for number in missing_checkpoints(models)]
    for number, folder in list(sealed_checkpoints(models).items())[:-1]:
        found += [f"checkpoint {number} is damaged: {text}" for text in find_damaged_files(folder)]
    if later:
        last = "there is no checkpoint" if newest < 0 else f"the newest checkpoint is {newest}"
        cause = "later ones were deleted" if (models / "checkpoints" / COMPLETE_FILE).is_file() else (
            "the run was interrupted, or later ones were deleted"
        )  # fmt: skip
        found.append(f"episodes or metrics of iterations up to {max(later)} are stored, but {last}: {cause}")
    return found


def missing_checkpoints(models: Path) -> list[int]:
    """Iterations whose checkpoints were kept when the newest one was written, and are gone."""
    sealed = sealed_checkpoints(models)
    try:
        newest = read_manifest(sealed[max(sealed)], verify=False) if sealed else None
    except CorruptFolderError:  # `find_damage` names it
        return []
    return sorted(set((newest or {}).get("kept", ())) - set(sealed))


def find_damaged_files(folder: Path) -> list[str]:
    """Damaged files of a sealed folder, as in `find_damage`; compares sizes only."""
    try:
        manifest = read_manifest(folder, verify=False) or {"files": {}}
    except CorruptFolderError as error:
        return [str(error)]
    return find_other_sizes(folder, manifest["files"])


def _damaged_metrics(outputs: Path, last: int) -> Iterator[str]:
    for path in sorted((outputs / "metrics").glob("iter=*.json")):
        if (iteration := iteration_of(path.name)) is None or iteration > last:
            continue
        try:
            read_metrics_row(path)
        except CorruptFolderError as error:
            yield str(error)


def _damaged_trajectories(outputs: Path, last: int) -> Iterator[str]:
    # Version v is validated before checkpoint v − 1 is committed.
    for kind, newest in (("trajectories", last), ("eval_trajectories", last + 1 if last >= 0 else -1)):
        for path in sorted((outputs / kind).glob("iter=*/part-*.parquet")):
            iteration = iteration_of(path.parent.name)
            if iteration is not None and iteration <= newest and not _is_whole(path):
                yield f"{path} is truncated or not parquet. Restore it, or delete it to go on without its episodes."


def _is_whole(path: Path) -> bool:
    with path.open("rb") as file:
        first = file.read(len(_MARK))
        if path.stat().st_size < 3 * len(_MARK):
            return False
        file.seek(-len(_MARK), 2)
        return first == file.read() == _MARK


# The state of any run, for a list of all.


@dataclass(frozen=True)
class RunState:
    """A stored run in a list of runs.

    Attributes:
        name: namespace and run id.
        iterations: stored ones; None: it has none by its kind.
        size: bytes that deleting it frees.
        state: `running`, `set aside` (a run that `fresh=true` replaces waits for the new one's first result),
            `damaged`, `finished` or `interrupted`.
        note: who is at work, or what is damaged.
    """

    name: str
    iterations: int | None
    size: int
    state: Literal["running", "set aside", "damaged", "finished", "interrupted"]
    note: str = ""


def read_state(folders: RunFolders) -> RunState:
    """The state of a run; sizes of files are compared, their contents are not read."""
    run = folders.models.parent.name
    iterations: int | None = None
    if run.startswith((TRAINING, "update_")):
        iterations = stored_iterations(folders.models)
    elif (folders.outputs / "trajectories").is_dir():
        iterations = sum(1 for _ in (folders.outputs / "trajectories").glob("iter=*"))
    make = partial(RunState, folders.name, iterations, held_bytes(folders.layers))
    if (holder := find_holder(folders.models)) is not None:
        return make("running", holder)
    try:
        if folders.can_restore:
            return make("set aside")
    except CorruptFolderError as error:
        return make("damaged", str(error))
    damage, gaps = (find(folders.models, folders.outputs) for find in (find_damage, find_gaps))
    commands = read_commands(folders.outputs)
    if run.startswith(TRAINING):
        ended = (folders.models / "checkpoints" / COMPLETE_FILE).is_file()
    else:
        ended = not commands or commands[-1]["outcome"] == "finished"
    if damage or missing_checkpoints(folders.models) or (ended and gaps):
        return make("damaged", [*damage, *gaps][0])
    return make("finished" if ended else "interrupted", *gaps[:1])


# The finding about the run id, and the sizes of its stored files.


_GROUP = "run"


def check_run(subject: Subject) -> list[Check]:
    """Findings about the run id that the command names."""
    if (holder := find_holder(subject.folders.models)) is not None:
        return [Check(_GROUP, "lock", "failure", holder)]
    name = f"{subject.run}/{subject.parameters.run_id}"
    if subject.parameters.fresh:
        return [
            Check(_GROUP, name, "ok", "is replaced (fresh=true), and deleted once the new run has its first checkpoint")
        ]
    if not any((subject.folders.models / stage).is_dir() for stage in ("base_policy", "policy", "checkpoints")):
        return [Check(_GROUP, name, "ok", "nothing is stored yet")]
    try:
        check_stored_run(subject.run, subject.folders.models, subject.parameters)
    except (FingerprintError, CorruptFolderError) as error:
        return [Check(_GROUP, name, "failure", str(error))]
    if damage := find_damage(subject.folders.models, subject.folders.outputs):
        return [Check(_GROUP, name, "failure", text) for text in damage]
    gaps = [Check(_GROUP, name, "warning", text) for text in find_gaps(subject.folders.models, subject.folders.outputs)]
    return [Check(_GROUP, name, "ok", _progress(subject)), *gaps]


@dataclass(frozen=True)
class Stored:
    """Stored parts of a run, which it does not write again; empty if `fresh` replaces them.

    Attributes:
        iterations: number of committed iterations.
        checkpoints: number of sealed checkpoints.
        base_policy, policy: whether the policies before and after the warm start are stored.
        checkpoint_bytes: of the newest checkpoint; None without one.
        iteration_bytes: mean of a stored iteration's trajectories; None without any.
    """

    iterations: int = 0
    checkpoints: int = 0
    base_policy: bool = False
    policy: bool = False
    checkpoint_bytes: int | None = None
    iteration_bytes: int | None = None


def read_stored(subject: Subject) -> Stored:
    """Stored parts of the run id; sizes that cannot be read are None, and `check_run` reports them."""
    if subject.parameters.fresh:
        return Stored()
    checkpoints = list(sealed_checkpoints(subject.folders.models).values())
    try:
        manifest = read_manifest(checkpoints[-1], verify=False) if checkpoints else None
    except CorruptFolderError:
        manifest = None
    return Stored(
        iterations=stored_iterations(subject.folders.models),
        checkpoints=len(checkpoints),
        base_policy=subject.base_policy is not None,
        policy=subject.learnt_policy is not None,
        checkpoint_bytes=None if manifest is None else sum(file["bytes"] for file in manifest["files"].values()),
        iteration_bytes=_iteration_bytes(subject.folders.outputs),
    )


def stored_iterations(models: Path) -> int:
    """Number of committed iterations."""
    return max(sealed_checkpoints(models), default=-1) + 1


def _iteration_bytes(outputs: Path) -> int | None:
    """Mean over the stored iterations; images that retention keeps once per run count too."""
    parts = list((outputs / "trajectories").glob("iter=*/part-*.parquet"))
    iterations = {part.parent for part in parts}
    files = [*parts, *(outputs / "images").rglob("*.png")]
    return sum(file.stat().st_size for file in files) // len(iterations) if parts else None


def _progress(subject: Subject) -> str:
    goal, done = subject.options.loop.iterations, stored_iterations(subject.folders.models)
    if (mark := find_json(subject.folders.models / "checkpoints" / COMPLETE_FILE)) and done >= goal:
        reached = mark.get("iterations")
        return f"finished after {reached} iterations: it is evaluated and reported again, nothing is trained"
    return f"{done} of {goal} iterations are stored: it continues from there"
