"""What a pre-flight says of the launchers' variables that are set."""

from __future__ import annotations

import pytest

from geo_sokoban_pipeline.preflight.launch_variables import check_variables
from geo_sokoban_pipeline.preflight.machine import check_accelerator


@pytest.mark.parametrize(
    ("name", "value", "state", "found"),
    [
        ("SLIME_SCRIPT_MODEL_NAME", "Qwen3-VL-2B-Instruct", "ok", "sets train_sokoban.policy.path"),
        ("SLIME_SCRIPT_MODEL_NAME", "Qwen3-VL-4B-Instruct", "warning", "changes nothing"),
        ("SLIME_SCRIPT_TRAIN_BACKEND", "FSDP", "ok", "sets train_sokoban.backend"),
        ("SLIME_SCRIPT_DATASET_NAME", "someone/rows", "ok", "not of this task"),
        ("SLIME_SCRIPT_SOKOBAN_DATA_ROOT", "/rows/", "ok", "sets sokoban.file.path"),
        ("SLIME_SCRIPT_SOKOBAN_DATA_ROOT", "/other", "warning", "sokoban.file.path is /rows/train.parquet"),
        ("SLIME_SCRIPT_NUM_GPUS", "512", "warning", "512 asked for"),
        ("SLIME_SCRIPT_EXTERNAL_RAY", "1", "warning", "sets nothing"),
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


def test_nothing_is_said_where_nothing_is_set(make_subject):
    assert check_variables(make_subject(), {"SLIME_SCRIPT_MODEL_NAME": "", "PATH": "/bin"}) == []


def test_a_gpu_that_is_asked_for_must_be_there():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert check_accelerator("cuda").state == "failure"
    assert check_accelerator("auto").state == "ok"
