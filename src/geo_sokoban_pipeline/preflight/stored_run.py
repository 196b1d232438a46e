"""What a run id holds already: free, in use, to be continued, finished, damaged, or made with other settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from geo_sokoban_pipeline.fingerprint import FingerprintError
from geo_sokoban_pipeline.preflight.checks import Check
from geo_sokoban_pipeline.preflight.fingerprints import check_stored_run, newest_checkpoints
from geo_sokoban_pipeline.preflight.stored_files import find_damage
from geo_sokoban_pipeline.preflight.subject import Subject
from geo_sokoban_pipeline.run_lock import find_holder
from geo_sokoban_pipeline.schemas import COMPLETE
from geo_sokoban_pipeline.storage import CorruptFolderError, read_json, read_manifest

_GROUP = "run"


def check_run(subject: Subject) -> list[Check]:
    """Findings about the run id that the command names."""
    holder = find_holder(subject.models)
    if holder is not None:
        return [Check(_GROUP, "lock", "failure", holder)]
    name = f"{subject.run}/{subject.parameters.run_id}"
    if subject.parameters.fresh:
        return [Check(_GROUP, name, "ok", "is cleared first (fresh=true)")]
    if not any((subject.models / stage).is_dir() for stage in ("base_policy", "policy", "checkpoints")):
        return [Check(_GROUP, name, "ok", "nothing is stored yet")]
    try:
        check_stored_run(subject.run, subject.models, subject.parameters)
    except (FingerprintError, CorruptFolderError) as error:
        return [Check(_GROUP, name, "failure", str(error))]
    damage = find_damage(subject.models, subject.outputs)
    if damage:
        return [Check(_GROUP, name, "failure", text) for text in damage]
    return [Check(_GROUP, name, "ok", _progress(subject))]


@dataclass(frozen=True)
class Stored:
    """What a run has stored and will not write again; nothing where it is cleared first.

    Attributes:
        iterations: that the run would not repeat.
        checkpoints: sealed ones.
        base_policy, policy: the policies before and after the warm start are there.
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
    """What the run id holds; sizes that cannot be read count as unknown, `check_run` names them."""
    if subject.parameters.fresh:
        return Stored()
    newest = newest_checkpoints(subject.models / "checkpoints")
    try:
        manifest = read_manifest(newest[-1], verify=False) if newest else None
    except CorruptFolderError:
        manifest = None
    return Stored(
        iterations=stored_iterations(subject.models),
        checkpoints=len(newest),
        base_policy=subject.base_policy is not None,
        policy=subject.learnt_policy is not None,
        checkpoint_bytes=None if manifest is None else sum(file["bytes"] for file in manifest["files"].values()),
        iteration_bytes=_iteration_bytes(subject.outputs),
    )


def stored_iterations(models: Path) -> int:
    """Iterations that a run would not repeat."""
    checkpoints = newest_checkpoints(models / "checkpoints")
    return int(checkpoints[-1].name.removeprefix("iter=")) + 1 if checkpoints else 0


def _iteration_bytes(outputs: Path) -> int | None:
    parts = list((outputs / "trajectories").glob("iter=*/part-*.parquet"))
    iterations = {part.parent for part in parts}
    return sum(part.stat().st_size for part in parts) // len(iterations) if parts else None


def _progress(subject: Subject) -> str:
    goal = subject.options.loop.iterations
    done = stored_iterations(subject.models)
    mark = subject.models / "checkpoints" / f"{COMPLETE}.json"
    if mark.is_file() and done >= goal:
        reached = read_json(mark).get("iterations")
        return f"finished after {reached} iterations: it is evaluated and reported again, nothing is trained"
    return f"{done} of {goal} iterations are stored: it continues from there"
