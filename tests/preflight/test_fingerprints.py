"""Stored parameters against those of the command: what differs is listed, what changes no result is not."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest

from geo_sokoban_pipeline.envs.data_identity import identify_data
from geo_sokoban_pipeline.envs.sokoban.config import SokobanDataOptions
from geo_sokoban_pipeline.parameters import ProjectParameters
from geo_sokoban_pipeline.preflight.first_checks import check_starting_policy
from geo_sokoban_pipeline.preflight.stored import check_stored_run, stages
from geo_sokoban_pipeline.runs.fingerprint import FingerprintError, unflatten
from geo_sokoban_pipeline.runs.storage import CorruptFolderError
from geo_sokoban_pipeline.studies.plan import merge

RUN = "train_sokoban"
INPUTS = {"input.prompts": "abc", "input.policy": "def"}


# What is changed below, so that no default decides what a test expects.
GIVEN = {
    "seed": 0,
    "sokoban": {"boxes": 1, "seed": 0},
    RUN: {
        "optimizer": {"learning_rate": 0.0007},
        "rollout": {"max_turns": 10},
        "warm_start": {"steps": 1370},
        "policy": {"tiny": {"hidden": 64}},
        "grpo": {"gamma": 0.95},
    },
}


def parameters(**changes):
    return ProjectParameters.model_validate(merge(GIVEN, changes))


def store(models, given, checkpoints=(0, 9, 10), former=None):
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
    store(tmp_path, parameters())
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
    store(tmp_path, parameters())
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
    store(tmp_path, parameters(), former=FORMER)
    check_stored_run(RUN, tmp_path, parameters())
    store(tmp_path, parameters(), former=FORMER | {"optimizer.max_skipped": 9})
    check_stored_run(RUN, tmp_path, parameters())  # it only decides when a run stops
    store(tmp_path, parameters(), former=FORMER | {"optimizer.momentum": 0.5})
    with pytest.raises(FingerprintError, match=r"optimizer\.momentum: stored 0\.5, now \(absent\)"):
        check_stored_run(RUN, tmp_path, parameters())
    assert unflatten(FORMER | {"optimizer.clip": 1.0}) == {"optimizer": {"clip": 1.0}}


OWN = {
    "own.py": "import prices\nfrom inner import world\n\ndef reward(outcome, args): return prices.PRICE\n",
    "prices.py": "PRICE = 1\n",
    "inner/world.py": "def build_env(sample, args): ...\n",
    "inner/expert.py": "def build_teacher(name, patience, noise): ...\n",
    "play.py": "def rollout(*_): ...\n",
}


@pytest.mark.parametrize(
    ("edited", "stages_stored", "named"),
    [
        ("prices.py", "all", ["reward.function, code in prices.py"]),
        ("prices.py", "warm start", []),
        ("own.py", "all", ["reward.function, code in own.py"]),
        ("play.py", "all", ["rollout.function, code in play.py"]),
        ("play.py", "warm start", []),
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
        "warm_start": {"teacher": {"factory": f"{tmp_path}/own/inner/expert.py"}},
    }
    models, given = tmp_path / "models", parameters(train_sokoban=own)
    store(models, given, checkpoints=(0, 9, 10) if stages_stored == "all" else ())
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
    store(tmp_path, parameters())
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
        ({}, (), {RUN: {"grpo": {"gamma": 0.5}}}, None),
        ({}, (), {RUN: {"warm_start": {"steps": 1}}}, r"warm_start\.steps"),
        # With over-sampling, sizes decide which groups are aborted.
        (OVER, (0, 9, 10), SMALLER, r"rollout\.max_conversations: stored 512, now 8\nGive"),
    ],
)
def test_each_stage_is_compared_with_what_it_depends_on(tmp_path, given, checkpoints, changes, message):
    store(tmp_path, parameters(**given), checkpoints=checkpoints)
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
