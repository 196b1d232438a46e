"""What a pre-flight says of the launchers' variables that are set."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from geo_sokoban_pipeline.config.launcher_env import check_submit
from geo_sokoban_pipeline.preflight.machine import check_accelerator, check_variables


@pytest.mark.parametrize(
    ("name", "value", "state", "found"),
    [
        ("SLIME_SCRIPT_MODEL_NAME", "Qwen3-VL-2B-Instruct", "ok", "sets train_sokoban.policy.path"),
        ("SLIME_SCRIPT_MODEL_NAME", "Qwen3-VL-4B-Instruct", "warning", "changes nothing"),
        ("SLIME_SCRIPT_TRAIN_BACKEND", "FSDP", "ok", "sets train_sokoban.backend"),
        ("SLIME_SCRIPT_DATASET_NAME", "someone/rows", "ok", "not of this task"),
        ("SLIME_SCRIPT_SOKOBAN_DATA_ROOT", "/rows/", "ok", "sets sokoban.file.path"),
        ("SLIME_SCRIPT_SOKOBAN_DATA_ROOT", "/other", "warning", "sokoban.file.path is /rows/train.parquet"),
        ("SLIME_SCRIPT_SOKOBAN_DATASET_ID", "someone/levels", "warning", "sokoban.source is file"),
        ("SLIME_SCRIPT_NUM_GPUS", "512", "warning", "train_sokoban.rollout.engine is transformers"),
        ("SLIME_SCRIPT_EXTERNAL_RAY", "1", "warning", "train_sokoban.placement is local"),
        ("SLIME_SCRIPT_MODEL", "x", "warning", "no launcher knows"),
    ],
)
def test_a_row_per_variable(make_subject, name, value, state, found):
    policy = {"source": "hub", "path": "Qwen/Qwen3-VL-2B-Instruct"}
    rows = {"source": "file", "file": {"path": "/rows/train.parquet"}}
    subject = make_subject(train_sokoban={"policy": policy}, sokoban=rows)
    (check,) = check_variables(subject, {name: value})
    assert (check.name, check.state) == (name, state)
    assert found in check.found


@pytest.mark.parametrize(
    ("count", "found"),
    [(512, "512 asked for, from GPU 0 on; torch sees"), (2, "changes nothing, train_sokoban.rollout.server.count")],
)
def test_gpus_of_servers(make_subject, count, found):
    subject = make_subject(train_sokoban={"rollout": {"engine": "sglang", "server": {"count": count}}})
    (check,) = check_variables(subject, {"SLIME_SCRIPT_NUM_GPUS": "512"})
    assert check.state == "warning" and found in check.found


@pytest.mark.parametrize(
    ("value", "server", "state", "found"),
    [
        ("3", {"count": 2}, "ok", "1 ranks and servers on 2 GPUs of their own take 3"),
        ("1", {"count": 2}, "warning", "take 3"),
        ("1", {"count": 1, "colocated": True}, "ok", "1: 1 ranks take 1"),
        ("8", {"count": 1, "colocated": True}, "warning", "8: 1 ranks take 1"),
    ],
)
def test_gpus_of_a_cluster_are_those_of_ranks_and_servers(make_subject, value, server, state, found):
    own = {"placement": "ray", "processes": 1, "rollout": {"engine": "sglang", "server": server}}
    (check,) = check_variables(make_subject(train_sokoban=own), {"SLIME_SCRIPT_NUM_GPUS": value})
    assert check.state == state and found in check.found


def test_folders_of_the_user(make_subject, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    subject = make_subject(sokoban={"source": "file", "file": {"path": "/home/somebody/rows/train.parquet"}})
    (check,) = check_variables(subject, {"SLIME_SCRIPT_SOKOBAN_DATA_ROOT": "~/rows"})
    assert check.state == "ok"


@pytest.mark.parametrize(("value", "refused"), [("0", True), ("False", True), ("1", False), (None, False)])
def test_who_wants_to_prepare_only_does_not_train(value, refused):
    environment = {} if value is None else {"SLIME_SCRIPT_ENABLE_RAY_SUBMIT": value}
    with pytest.raises(ValueError, match="asks to prepare only") if refused else nullcontext():
        check_submit(environment)


def test_nothing_is_said_where_nothing_is_set(make_subject):
    assert check_variables(make_subject(), {"SLIME_SCRIPT_MODEL_NAME": "", "PATH": "/bin"}) == []


def test_a_gpu_that_is_asked_for_must_be_there():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert check_accelerator("cuda").state == "failure"
    assert check_accelerator("auto").state == "ok"
