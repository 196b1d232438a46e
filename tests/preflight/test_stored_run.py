"""States of a run id: free, held by a process, to be continued, finished, damaged, with its settings compared."""

from __future__ import annotations

import json
import shutil
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest

from geo_sokoban_pipeline.envs.data_identity import identify_data
from geo_sokoban_pipeline.envs.sokoban.config import SokobanDataOptions
from geo_sokoban_pipeline.parameters import ProjectParameters
from geo_sokoban_pipeline.preflight.checks import Subject
from geo_sokoban_pipeline.preflight.first_checks import check_starting_policy
from geo_sokoban_pipeline.preflight.stored import (
    Stored,
    check_run,
    check_stored_run,
    find_damage,
    find_damaged_rows,
    find_gaps,
    read_state,
    read_stored,
    stages,
)
from geo_sokoban_pipeline.runs.fingerprint import FingerprintError, unflatten
from geo_sokoban_pipeline.runs.folders import sealed_checkpoints
from geo_sokoban_pipeline.runs.lock import RunLock, find_holder
from geo_sokoban_pipeline.runs.storage import CorruptFolderError, read_manifest, write_folder
from geo_sokoban_pipeline.studies.plan import merge
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
    (subject.folders.models / "checkpoints" / "COMPLETE.json").write_text(json.dumps({"iterations": iterations}))


def checkpoint(subject: Subject, number: int) -> Path:
    return subject.folders.models / "checkpoints" / f"iter={number:05d}"


def fresh(subject: Subject) -> Subject:
    return Subject("sokoban", subject.parameters.model_copy(update={"fresh": True}), subject.data_root)


def store(subject: Subject, iterations: int = 3) -> None:
    """Files as a run leaves them: manifests, metrics, trajectories; the weights are a few bytes."""
    for k in range(iterations):
        write_folder(checkpoint(subject, k), fill({"kept": list(range(k + 1))}))
    for folder, fingerprint in stages(subject.run, subject.folders.models, subject.parameters):
        write_folder(folder, fill({"fingerprint": fingerprint, "kept": list(range(iterations))}))
    for k in range(iterations):
        rows = {f"{kind}/iter={k:05d}/part-000.parquet": PARQUET for kind in ("trajectories", "eval_trajectories")}
        for name, content in {**rows, f"metrics/iter={k:05d}.json": json.dumps({"iteration": k}).encode()}.items():
            path = subject.folders.outputs / name
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
    images = subject.folders.outputs / "images" / "ab"  # of iterations that retention has thinned
    images.mkdir(parents=True)
    (images / "abcd.png").write_bytes(bytes(3000))
    assert read_stored(subject).iteration_bytes == rows + 1000
    assert read_stored(fresh(subject)) == Stored()
    cut(checkpoint(subject, 2) / "manifest.json")
    assert read_stored(subject).checkpoint_bytes is None


def test_other_settings_are_listed(make_subject: Any) -> None:
    store(make_subject())
    changed = make_subject(train_sokoban={"grpo": {"advantage_args": {"gamma": 0.5}}})
    says(check_run(changed), "failure", "grpo.advantage_args.gamma: stored 0.95, now 0.5")
    replaced = "is replaced (fresh=true), and deleted once the new run has its first checkpoint"
    says(check_run(fresh(changed)), "ok", replaced)


def test_a_held_lock_names_its_holder(make_subject: Any) -> None:
    subject = make_subject()
    assert find_holder(subject.folders.models) is None
    with closing(RunLock(subject.folders.models)):
        says(check_run(subject), "failure", "is in use by process")
    assert find_holder(subject.folders.models) is None
    RunLock(subject.folders.models).close()  # the probe holds nothing


@pytest.mark.parametrize(
    ("name", "damage", "text"),
    [
        ("06_models/checkpoints/iter=00002/model.safetensors", cut, "(4 bytes, 7 recorded)"),
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
    path = (subject.folders.models if layer == "06_models" else subject.folders.outputs) / rest
    damage(path)
    says(check_run(subject), "failure", str(path), text)


def test_what_a_continued_run_makes_again_is_not_looked_at(make_subject: Any) -> None:
    subject = make_subject()
    store(subject)
    for kind in ("trajectories", "metrics"):
        (late,) = (subject.folders.outputs / kind).glob("iter=00002*")
        later = late.rename(late.with_name(late.name.replace("00002", "00007")))
        cut(later / "part-000.parquet" if later.is_dir() else later)
    assert find_damaged_rows(subject.folders.models, subject.folders.outputs) == []


def test_foreign_files_are_nobodys_damage(make_subject: Any) -> None:
    subject = make_subject()
    store(subject)
    for folder in (
        subject.folders.outputs / "trajectories",
        subject.folders.outputs / "metrics",
        subject.folders.models / "checkpoints",
    ):
        (folder / "notes.txt").write_text("mine")
        (folder / ".iter=00003.ab.tmp").mkdir()
        (folder / "iter=copy").mkdir()
        (folder / "iter=copy" / "manifest.json").write_text("{}")
        (folder / "iter=copy" / "part-000.parquet").write_text("mine")
    (subject.folders.outputs / "metrics" / "iter=old.json").write_text("mine")
    assert find_damage(subject.folders.models, subject.folders.outputs) == []
    assert [path.name for path in sealed_checkpoints(subject.folders.models).values()] == [
        f"iter={k:05d}" for k in range(3)
    ]
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
    found = find_gaps(subject.folders.models, subject.folders.outputs)
    assert len(found) == len(said) and all(part in text for part, text in zip(said, found, strict=True)), found
    with closing(RunLock(subject.folders.models)):  # while a command works on the run, all of this is normal
        assert find_gaps(subject.folders.models, subject.folders.outputs) == []


def test_what_retention_removed_is_no_gap_and_damage_between_others_is(make_subject: Any) -> None:
    subject = make_subject()
    store(subject, 4)
    complete(subject)
    newest = checkpoint(subject, 3)
    entries = {name: value for name, value in (read_manifest(newest) or {}).items() if name != "files"}
    write_folder(newest, fill({**entries, "kept": [1, 2, 3]}))
    shutil.rmtree(checkpoint(subject, 0))
    assert find_gaps(subject.folders.models, subject.folders.outputs) == []
    cut(checkpoint(subject, 1) / "model.safetensors")
    (found,) = find_gaps(subject.folders.models, subject.folders.outputs)
    assert found.startswith("checkpoint 1 is damaged: ") and "iter=00001" in found
    checks = check_run(make_subject(train_sokoban={"loop": {"iterations": 4}}))
    assert [check.state for check in checks] == ["ok", "warning"]


def test_the_state_of_a_run_in_a_list(make_subject: Any) -> None:
    subject = make_subject()
    folders = subject.folders
    store(subject, 4)

    def state() -> tuple[int | None, str]:
        found = read_state(folders)
        assert found.name == folders.name and found.size > 0
        return found.iterations, found.state

    assert state() == (4, "interrupted")
    complete(subject)
    assert state() == (4, "finished")
    with closing(RunLock(subject.folders.models)):
        assert state() == (4, "running")
    shutil.rmtree(checkpoint(subject, 3))
    assert state() == (3, "damaged")
    folders.set_aside()
    assert state() == (0, "set aside")


# Stored parameters against those of the command: what differs is listed, what changes no result is not.

RUN = "train_sokoban"
INPUTS = {"input.prompts": "abc", "input.policy": "def"}


# Options that are changed below, so that no default decides the outcome of a test.
GIVEN = {
    "seed": 0,
    "sokoban": {"boxes": 1, "seed": 0},
    RUN: {
        "optimizer": {"learning_rate": 0.0007},
        "rollout": {"max_turns": 10},
        "warm_start": {"steps": 1370},
        "policy": {"tiny": {"hidden": 64}},
        "grpo": {"advantage_args": {"gamma": 0.95}},
    },
}


def parameters(**changes):
    return ProjectParameters.model_validate(merge(GIVEN, changes))


def store_settings(models, given, checkpoints=(0, 9, 10), former=None):
    """Manifests as a run with these parameters leaves them; only the newest checkpoint is of these parameters."""
    for k in checkpoints:
        write(models / f"checkpoints/iter={k:05d}", {"from": "another time"})
    found = stages(RUN, models, given)
    assert [folder.name for folder, _ in found] == ["base_policy", "policy", "iter=00010"][: 2 + bool(checkpoints)]
    for folder, fingerprint in found:
        write(folder, {**fingerprint, **(former or {}), **INPUTS})


def write(folder, fingerprint):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps({"fingerprint": fingerprint, "files": {}}))


def data_id(**changes):
    return identify_data("sokoban", SokobanDataOptions(**changes)).id


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"run_id": "other"},
        {"tracking": {"enabled": False}},
        {RUN: {"loop": {"iterations": 999, "save_interval": 5, "keep_last": None}}},
        {RUN: {"evaluation": {"samples": 4}, "threads": 1}},
        {"evaluate_sokoban": {"source": {"checkpoint": "best"}}},
        {"sokoban": {"cell_px": 16}},  # given, but as it is by default
        {RUN: {"optimizer": {"max_tokens": 512, "logit_chunk": 64}}},
        {RUN: {"optimizer": {"vision_patches": 512, "gradient_checkpointing": True}}},
        {RUN: {"warm_start": {"max_tokens": 512}}},
        {RUN: {"rollout": {"max_conversations": 8, "prefill_tokens": 256, "reuse_cache": False, "draft_share": None}}},
        {RUN: {"rollout": {"max_failed_share": 0.5}}},
        {"sokoban": {"hub": {"dataset": "other/levels"}}},  # levels are generated
    ],
)
def test_what_changes_no_result(tmp_path, changes):
    store_settings(tmp_path, parameters())
    check_stored_run(RUN, tmp_path, parameters(**changes))


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({"seed": 7}, ["seed: stored 0, now 7"]),
        ({RUN: {"optimizer": {"learning_rate": 0.1}}}, ["optimizer.learning_rate: stored 0.0007, now 0.1"]),
        ({RUN: {"rollout": {"max_turns": 3}}}, ["rollout.max_turns: stored 10, now 3"]),
        ({RUN: {"warm_start": {"steps": 3}}}, ["warm_start.steps: stored 1370, now 3"]),
        ({RUN: {"env": {"args": {"cell_px": 8}}}}, ["env.args.cell_px: stored (absent), now 8"]),
        ({RUN: {"policy": {"tiny": {"hidden": 32}}}}, ["policy.tiny.hidden: stored 64, now 32"]),
        (
            {"sokoban": {"boxes": 2, "seed": 1}},
            [
                "data.boxes: stored 1, now 2",
                f"data.id: stored {data_id()}, now {data_id(boxes=2, seed=1)}",
                "data.seed: stored 0, now 1",
            ],
        ),
    ],
)
def test_differences_are_listed_once_with_the_ways_out(tmp_path, changes, lines):
    store_settings(tmp_path, parameters())
    changed = parameters(**changes)
    with pytest.raises(FingerprintError) as error:
        check_stored_run(RUN, tmp_path, changed)
    head, *shown, ways_out = str(error.value).splitlines()
    assert head.startswith("train_sokoban: a run of this run id already exists with different settings")
    assert [line.strip() for line in shown] == lines
    assert "run_id=<new>" in ways_out and "fresh=true" in ways_out


# Options of an earlier version that are constants by now, with their values there.
FORMER = {
    "optimizer.decay_to": 0.1,
    "optimizer.matrix_rate": 2.0,
    "optimizer.max_skipped": 3,
    "optimizer.momentum": 0.95,
    "prompts.smoothing": 0.1,
    "warm_start.decay_to": 0.05,
    "warm_start.matrix_rate": 2.0,
    "warm_start.momentum": 0.95,
    "warm_start.teacher.solved_only": False,
}


def test_a_run_with_former_options_goes_on_where_they_had_the_values_of_today(tmp_path):
    store_settings(tmp_path, parameters(), former=FORMER)
    check_stored_run(RUN, tmp_path, parameters())
    store_settings(tmp_path, parameters(), former=FORMER | {"optimizer.max_skipped": 9})
    check_stored_run(RUN, tmp_path, parameters())  # it only decides when a run stops
    store_settings(tmp_path, parameters(), former=FORMER | {"optimizer.momentum": 0.5})
    with pytest.raises(FingerprintError, match=r"optimizer\.momentum: stored 0\.5, now \(absent\)"):
        check_stored_run(RUN, tmp_path, parameters())
    assert unflatten(FORMER | {"optimizer.clip": 1.0}) == {"optimizer": {"clip": 1.0}}


OWN = {
    "own.py": "import prices\nfrom inner import world\n\ndef reward(outcome, args): return prices.PRICE\n",
    "prices.py": "PRICE = 1\n",
    "inner/world.py": "def build_env(sample, args): ...\n",
    "inner/expert.py": "def build_teacher(name, patience, noise): ...\n",
    "play.py": "def rollout(*_): ...\n",
    "score.py": "import whitening\n\ndef advantage(episodes, args): ...\n",
    "whitening.py": "",
    "bounds.py": "def loss(batch, args): ...\ndef importance(batch, args): ...\n",
}


@pytest.mark.parametrize(
    ("edited", "stages_stored", "named"),
    [
        ("prices.py", "all", ["reward.function, code in prices.py"]),
        ("prices.py", "warm start", []),
        ("own.py", "all", ["reward.function, code in own.py"]),
        ("play.py", "all", ["rollout.function, code in play.py"]),
        ("play.py", "warm start", []),
        ("whitening.py", "all", ["grpo.advantage, code in whitening.py"]),
        ("bounds.py", "all", ["grpo.importance, code in bounds.py", "grpo.loss, code in bounds.py"]),
        ("bounds.py", "warm start", []),
        ("inner/expert.py", "warm start", ["warm_start.teacher.factory, code in expert.py"]),
        ("inner/expert.py", "starting policy", []),
        # The environment is also imported by the reward.
        ("inner/world.py", "all", ["env.factory, code in world.py", "reward.function, code in inner/world.py"]),
        ("inner/world.py", "warm start", ["env.factory, code in world.py"]),
        ("inner/world.py", "starting policy", []),
        ("unused.py", "all", []),
    ],
)
def test_edited_own_code_is_another_setting(tmp_path, edited, stages_stored, named):
    for name, text in OWN.items():
        path = tmp_path / "own" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    own = {
        "env": {"factory": f"{tmp_path}/own/inner/world.py"},
        "reward": {"function": f"{tmp_path}/own/own.py"},
        "rollout": {"function": f"{tmp_path}/own/play.py"},
        "grpo": {
            "advantage": f"{tmp_path}/own/score.py",
            "loss": f"{tmp_path}/own/bounds.py",
            "importance": f"{tmp_path}/own/bounds.py:importance",
            "old_log_probs": "recompute",
        },
        "warm_start": {"teacher": {"factory": f"{tmp_path}/own/inner/expert.py"}},
    }
    models, given = tmp_path / "models", parameters(train_sokoban=own)
    store_settings(models, given, checkpoints=(0, 9, 10) if stages_stored == "all" else ())
    if stages_stored == "starting policy":
        (models / "policy" / "manifest.json").unlink()
    check_stored_run(RUN, models, given)
    with (tmp_path / "own" / edited).open("a") as file:
        file.write("# edited\n")
    if not named:
        check_stored_run(RUN, models, given)
        return
    with pytest.raises(FingerprintError) as error:
        check_stored_run(RUN, models, given)
    _, *lines, ways_out = str(error.value).splitlines()
    assert [line.partition(": stored ")[0].strip() for line in lines] == named
    assert "run_id=<new>" in ways_out and "fresh=true" in ways_out


def test_only_training_runs_continue_and_a_new_one_has_nothing_to_compare(tmp_path):
    check_stored_run(RUN, tmp_path / "new", parameters(seed=3))
    store_settings(tmp_path, parameters())
    check_stored_run("update_sokoban", tmp_path, parameters(seed=3))
    (tmp_path / "policy" / "manifest.json").write_text("{")
    with pytest.raises(CorruptFolderError, match=r"policy/manifest\.json"):
        check_stored_run(RUN, tmp_path, parameters())


OVER = {RUN: {"rollout": {"over_sampling": 2.0}}}
SMALLER = {RUN: {"rollout": {"over_sampling": 2.0, "max_conversations": 8}, "optimizer": {"max_tokens": 512}}}


@pytest.mark.parametrize(
    ("given", "checkpoints", "changes", "message"),
    [
        # A run that was killed before its first checkpoint may still get other settings of the loop, but no others.
        ({}, (), {RUN: {"grpo": {"advantage_args": {"gamma": 0.5}}}}, None),
        ({}, (), {RUN: {"warm_start": {"steps": 1}}}, r"warm_start\.steps"),
        # With over-sampling, sizes decide which groups are aborted.
        (OVER, (0, 9, 10), SMALLER, r"rollout\.max_conversations: stored 512, now 8\nGive"),
    ],
)
def test_each_stage_is_compared_with_what_it_depends_on(tmp_path, given, checkpoints, changes, message):
    store_settings(tmp_path, parameters(**given), checkpoints=checkpoints)
    with nullcontext() if message is None else pytest.raises(FingerprintError, match=message):
        check_stored_run(RUN, tmp_path, parameters(**changes))


@pytest.mark.parametrize(
    ("path", "message"),
    [("nowhere/at/all", "train_sokoban.policy.path=nowhere/at/all"), (".", "no config.json")],
)
def test_starting_policy(tmp_path, monkeypatch, path, message):
    monkeypatch.chdir(tmp_path)
    given = parameters(train_sokoban={"policy": {"source": "folder", "path": path}})
    with pytest.raises(FileNotFoundError, match=message):
        check_starting_policy(RUN, tmp_path, given)
    check_starting_policy("evaluate_sokoban", tmp_path, given)
    # A run that has its copy does not look for the original again.
    write(tmp_path / "base_policy", {})
    check_starting_policy(RUN, tmp_path, given)
