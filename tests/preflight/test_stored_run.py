"""What a run id holds: free, held by a process, to be continued, finished, damaged, of other settings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from geo_sokoban_pipeline.preflight.checks import Subject
from geo_sokoban_pipeline.preflight.stored import (
    Stored,
    check_run,
    find_damage,
    find_damaged_rows,
    find_gaps,
    read_state,
    read_stored,
    stages,
)
from geo_sokoban_pipeline.runs.folders import RunFolders, sealed_checkpoints
from geo_sokoban_pipeline.runs.lock import RunLock, find_holder
from geo_sokoban_pipeline.runs.storage import read_manifest, write_folder
from preflight.conftest import says

PARQUET = b"PAR1" + bytes(100) + b"PAR1"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def fill(entries: dict[str, Any]) -> Any:
    def write(folder: Path) -> dict[str, Any]:
        (folder / "model.safetensors").write_bytes(b"weights")
        return entries

    return write


def complete(subject: Subject, iterations: int = 4) -> None:
    (subject.models / "checkpoints" / "COMPLETE.json").write_text(json.dumps({"iterations": iterations}))


def checkpoint(subject: Subject, number: int) -> Path:
    return subject.models / "checkpoints" / f"iter={number:05d}"


def fresh(subject: Subject) -> Subject:
    return Subject("sokoban", subject.parameters.model_copy(update={"fresh": True}), subject.data_root)


def store(subject: Subject, iterations: int = 3) -> None:
    """Files as a run leaves them: manifests, metrics, trajectories; the weights are a few bytes."""
    for k in range(iterations):
        write_folder(checkpoint(subject, k), fill({"kept": list(range(k + 1))}))
    for folder, fingerprint in stages(subject.run, subject.models, subject.parameters):
        write_folder(folder, fill({"fingerprint": fingerprint, "kept": list(range(iterations))}))
    for k in range(iterations):
        rows = {f"{kind}/iter={k:05d}/part-000.parquet": PARQUET for kind in ("trajectories", "eval_trajectories")}
        for name, content in {**rows, f"metrics/iter={k:05d}.json": json.dumps({"iteration": k}).encode()}.items():
            path = subject.outputs / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def test_a_run_to_be_continued_and_a_finished_one(make_subject: Any) -> None:
    subject = make_subject()
    says(check_run(subject), "ok", "nothing is stored yet")
    store(subject)
    says(check_run(subject), "ok", "3 of 140 iterations are stored: it continues from there")
    complete(subject, 3)
    says(check_run(make_subject(train_sokoban={"loop": {"iterations": 3}})), "ok", "finished after 3 iterations")
    weights, rows = len(b"weights"), len(PARQUET)
    assert read_stored(subject) == Stored(3, 3, True, True, checkpoint_bytes=weights, iteration_bytes=rows)
    images = subject.outputs / "images" / "ab"  # of iterations that retention has thinned
    images.mkdir(parents=True)
    (images / "abcd.png").write_bytes(bytes(3000))
    assert read_stored(subject).iteration_bytes == rows + 1000
    assert read_stored(fresh(subject)) == Stored()
    cut(checkpoint(subject, 2) / "manifest.json")
    assert read_stored(subject).checkpoint_bytes is None


def test_other_settings_are_listed(make_subject: Any) -> None:
    store(make_subject())
    changed = make_subject(train_sokoban={"grpo": {"gamma": 0.5}})
    says(check_run(changed), "failure", "grpo.gamma: stored 0.95, now 0.5")
    replaced = "is replaced (fresh=true), and deleted once the new run has its first checkpoint"
    says(check_run(fresh(changed)), "ok", replaced)


def test_a_held_lock_names_its_holder(make_subject: Any) -> None:
    subject = make_subject()
    assert find_holder(subject.models) is None
    lock = RunLock(subject.models)
    says(check_run(subject), "failure", "is in use by process")
    lock.close()
    assert find_holder(subject.models) is None
    RunLock(subject.models).close()  # the probe holds nothing


@pytest.mark.parametrize(
    ("name", "damage", "text"),
    [
        ("06_models/checkpoints/iter=00002/model.safetensors", cut, "has 4 bytes, 7 bytes in"),
        ("06_models/policy/model.safetensors", Path.unlink, "is missing"),
        ("06_models/policy/manifest.json", cut, "is not readable JSON"),
        ("07_model_output/trajectories/iter=00000/part-000.parquet", cut, "is truncated or not parquet"),
        ("07_model_output/eval_trajectories/iter=00001/part-000.parquet", cut, "is truncated or not parquet"),
        ("07_model_output/metrics/iter=00001.json", cut, "is not readable JSON"),
        ("07_model_output/metrics/iter=00001.json", lambda path: path.write_text("[1]"), "holds a list, not a row"),
    ],
)
def test_damage_is_named(make_subject: Any, name: str, damage: Any, text: str) -> None:
    subject = make_subject()
    store(subject)
    layer, _, rest = name.partition("/")
    path = (subject.models if layer == "06_models" else subject.outputs) / rest
    damage(path)
    says(check_run(subject), "failure", str(path), text)


def test_what_a_continued_run_makes_again_is_not_looked_at(make_subject: Any) -> None:
    subject = make_subject()
    store(subject)
    for kind in ("trajectories", "metrics"):
        (late,) = (subject.outputs / kind).glob("iter=00002*")
        later = late.rename(late.with_name(late.name.replace("00002", "00007")))
        cut(later / "part-000.parquet" if later.is_dir() else later)
    assert find_damaged_rows(subject.models, subject.outputs) == []


def test_foreign_files_are_nobodys_damage(make_subject: Any) -> None:
    subject = make_subject()
    store(subject)
    for folder in (subject.outputs / "trajectories", subject.outputs / "metrics", subject.models / "checkpoints"):
        (folder / "notes.txt").write_text("mine")
        (folder / ".iter=00003.ab.tmp").mkdir()
        (folder / "iter=copy").mkdir()
        (folder / "iter=copy" / "manifest.json").write_text("{}")
        (folder / "iter=copy" / "part-000.parquet").write_text("mine")
    (subject.outputs / "metrics" / "iter=old.json").write_text("mine")
    assert find_damage(subject.models, subject.outputs) == []
    assert [path.name for path in sealed_checkpoints(subject.models).values()] == [f"iter={k:05d}" for k in range(3)]
    says(check_run(subject), "ok")


# Missing parts of a readable run


@pytest.mark.parametrize(
    ("deleted", "ended", "said"),
    [
        ([], True, []),
        ([3], True, ["iterations up to 3 are stored, but the newest checkpoint is 2: later ones were deleted"]),
        ([2, 3], True, ["iterations up to 3 are stored, but the newest checkpoint is 1: later"]),
        ([3], False, ["but the newest checkpoint is 2: the run was interrupted, or later ones were deleted"]),
        ([1], True, ["checkpoint 1 is missing"]),
        ([0, 2], True, ["checkpoint 0 is missing", "checkpoint 2 is missing"]),
        ([1, 3], True, ["checkpoint 1 is missing", "iterations up to 3"]),
        ([0, 1, 2, 3], True, ["iterations up to 3 are stored, but there is no checkpoint"]),
    ],
)
def test_deleted_checkpoints_are_named(make_subject: Any, deleted: list[int], ended: bool, said: list[str]) -> None:
    subject = make_subject()
    store(subject, 4)
    if ended:
        complete(subject)
    for number in deleted:
        shutil.rmtree(checkpoint(subject, number))
    found = find_gaps(subject.models, subject.outputs)
    assert len(found) == len(said) and all(part in text for part, text in zip(said, found, strict=True)), found
    lock = RunLock(subject.models)  # while a command works on the run, all of this is normal
    assert find_gaps(subject.models, subject.outputs) == []
    lock.close()


def test_what_retention_removed_is_no_gap_and_damage_between_others_is(make_subject: Any) -> None:
    subject = make_subject()
    store(subject, 4)
    complete(subject)
    newest = checkpoint(subject, 3)
    entries = {name: value for name, value in (read_manifest(newest) or {}).items() if name != "files"}
    write_folder(newest, fill({**entries, "kept": [1, 2, 3]}))
    shutil.rmtree(checkpoint(subject, 0))
    assert find_gaps(subject.models, subject.outputs) == []
    cut(checkpoint(subject, 1) / "model.safetensors")
    (found,) = find_gaps(subject.models, subject.outputs)
    assert found.startswith("checkpoint 1 is damaged: ") and "iter=00001" in found
    checks = check_run(make_subject(train_sokoban={"loop": {"iterations": 4}}))
    assert [check.state for check in checks] == ["ok", "warning"]


def test_the_state_of_a_run_in_a_list(make_subject: Any) -> None:
    subject = make_subject()
    folders = RunFolders(subject.models, subject.outputs, subject.reports)
    store(subject, 4)

    def state() -> tuple[int | None, str]:
        found = read_state(folders)
        assert found.name == folders.name and found.size > 0
        return found.iterations, found.state

    assert state() == (4, "interrupted")
    complete(subject)
    assert state() == (4, "finished")
    lock = RunLock(subject.models)
    assert state() == (4, "running")
    lock.close()
    shutil.rmtree(checkpoint(subject, 3))
    assert state() == (3, "damaged")
    folders.set_aside()
    assert state() == (0, "set aside")
