"""What a pre-flight says of variables that are set: the launchers' own, and the key of Weights & Biases."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from geo_sokoban_pipeline.config.launcher_env import check_submit
from geo_sokoban_pipeline.preflight import machine
from geo_sokoban_pipeline.preflight.machine import check_accelerator, check_variables
from preflight.conftest import says

HUB = {"train_sokoban": {"policy": {"source": "hub", "path": "Qwen/Qwen3-VL-2B-Instruct"}}}
ROWS = {"sokoban": {"source": "file", "file": {"path": "/rows/train.parquet"}}}
OF_USER = {"sokoban": {"source": "file", "file": {"path": "/home/somebody/rows/train.parquet"}}}


def servers(**server):
    return {"train_sokoban": {"rollout": {"engine": "sglang", "server": server}}}


def cluster(**server):
    own = {"placement": "ray", "processes": 1, "rollout": {"engine": "sglang", "server": server}}
    return {"train_sokoban": own}


@pytest.mark.parametrize(
    ("changes", "name", "value", "state", "found"),
    [
        (HUB, "SLIME_SCRIPT_MODEL_NAME", "Qwen3-VL-2B-Instruct", "ok", "sets train_sokoban.policy.path"),
        (HUB, "SLIME_SCRIPT_MODEL_NAME", "Qwen3-VL-4B-Instruct", "warning", "changes nothing"),
        ({}, "SLIME_SCRIPT_TRAIN_BACKEND", "FSDP", "ok", "sets train_sokoban.backend"),
        ({}, "SLIME_SCRIPT_DATASET_NAME", "someone/rows", "ok", "not of this task"),
        (ROWS, "SLIME_SCRIPT_SOKOBAN_DATA_ROOT", "/rows/", "ok", "sets sokoban.file.path"),
        (ROWS, "SLIME_SCRIPT_SOKOBAN_DATA_ROOT", "/other", "warning", "sokoban.file.path is /rows/train.parquet"),
        (OF_USER, "SLIME_SCRIPT_SOKOBAN_DATA_ROOT", "~/rows", "ok", "sets sokoban.file.path"),
        (ROWS, "SLIME_SCRIPT_SOKOBAN_DATASET_ID", "someone/levels", "warning", "sokoban.source is file"),
        ({}, "SLIME_SCRIPT_NUM_GPUS", "512", "warning", "train_sokoban.rollout.engine is transformers"),
        ({}, "SLIME_SCRIPT_EXTERNAL_RAY", "1", "warning", "train_sokoban.placement is local"),
        ({}, "SLIME_SCRIPT_MODEL", "x", "warning", "no launcher knows"),
        (servers(count=512), "SLIME_SCRIPT_NUM_GPUS", "512", "warning", "512 asked for, from GPU 0 on; torch sees"),
        (servers(count=2), "SLIME_SCRIPT_NUM_GPUS", "512", "warning", "changes nothing, train_sokoban.rollout.server"),
        # GPUs of a cluster are those of ranks and servers.
        (cluster(count=2), "SLIME_SCRIPT_NUM_GPUS", "3", "ok", "1 ranks and servers on 2 GPUs of their own take 3"),
        (cluster(count=2), "SLIME_SCRIPT_NUM_GPUS", "1", "warning", "take 3"),
        (cluster(count=1, colocated=True), "SLIME_SCRIPT_NUM_GPUS", "1", "ok", "1: 1 ranks take 1"),
        (cluster(count=1, colocated=True), "SLIME_SCRIPT_NUM_GPUS", "8", "warning", "8: 1 ranks take 1"),
    ],
)
def test_a_row_per_variable(make_subject, monkeypatch, changes, name, value, state, found):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert says(check_variables(make_subject(**changes), {name: value}), state, found).name == name


@pytest.mark.parametrize(
    ("version", "mode", "tracking", "state", "found"),
    [
        ("0.31.0", "", {}, "ok", "set: runs are tracked by Weights & Biases too (wandb 0.31.0, online)"),
        ("0.31.0", "offline", {}, "ok", "set: runs are tracked by Weights & Biases too (wandb 0.31.0, offline)"),
        (None, "", {}, "warning", "set, but the package wandb is not installed: runs are tracked by MLflow alone"),
        ("0.31.0", "", {"wandb": False}, "ok", "set but not used: tracking.wandb=false"),
        ("0.31.0", "", {"enabled": False}, "ok", "set but not used: tracking.enabled=false"),
    ],
)
def test_the_key_of_tracking(make_subject, monkeypatch, version, mode, tracking, state, found):
    monkeypatch.setattr(machine, "installed_version", lambda name: version if name == "wandb" else None)
    environment = {"WANDB_API_KEY": "secret", "WANDB_MODE": mode}
    check = says(check_variables(make_subject(tracking=tracking), environment), state, found)
    assert "secret" not in check.found + check.way_out


def test_nothing_is_said_where_nothing_is_set(make_subject):
    environment = {"SLIME_SCRIPT_MODEL_NAME": "", "PATH": "/bin", "WANDB_MODE": "offline"}
    assert check_variables(make_subject(), environment) == []


@pytest.mark.parametrize(("value", "refused"), [("0", True), ("False", True), ("1", False), (None, False)])
def test_who_wants_to_prepare_only_does_not_train(value, refused):
    environment = {} if value is None else {"SLIME_SCRIPT_ENABLE_RAY_SUBMIT": value}
    with pytest.raises(ValueError, match="asks to prepare only") if refused else nullcontext():
        check_submit(environment)


def test_a_gpu_that_is_asked_for_must_be_there():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert check_accelerator("cuda").state == "failure"
    assert check_accelerator("auto").state == "ok"
