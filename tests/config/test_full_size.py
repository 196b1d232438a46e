"""The environment `qwen3vl` of the configuration: launch values of the originals, and the launchers' variables."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from geo_sokoban_pipeline.config.base import ParameterError
from geo_sokoban_pipeline.config.launcher_env import (
    MODELS,
    PREFIX,
    VARIABLES,
    launch_value,
    sokoban_file,
    unknown_variables,
)
from geo_sokoban_pipeline.hooks.config_loader import ProjectConfigLoader
from geo_sokoban_pipeline.hooks.parameters import check_parameters
from geo_sokoban_pipeline.parameters import ProjectParameters
from geo_sokoban_pipeline.settings import CONFIG_LOADER_ARGS
from geo_sokoban_pipeline.tasks import TASKS

ROOT = Path(__file__).parents[2]
Load = Callable[..., ProjectParameters]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Parameters of `--env=qwen3vl` under the given variables and no others of the launchers."""

    def read(params: dict[str, Any] | None = None, **variables: str) -> ProjectParameters:
        for variable in VARIABLES:
            monkeypatch.delenv(variable.name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        loader = ProjectConfigLoader(
            conf_source=str(ROOT / "conf"), env="qwen3vl", runtime_params=params or {}, **CONFIG_LOADER_ARGS
        )
        return check_parameters(loader["parameters"], params or {})

    return read


def test_launch_values(load):
    """The table of the original launchers; lengths, batches and temperatures by task."""
    found = load()
    rows = {
        name: (
            run.loop.iterations, run.grpo.groups, run.grpo.group_size, run.rollout.max_turns,
            run.rollout.max_tokens_per_turn, run.rollout.max_response_tokens, run.rollout.max_context_tokens,
            run.rollout.sampling.temperature, run.rollout.sampling.top_p, run.loop.eval_interval,
            run.loop.eval_prompts, run.policy.path,
        )
        for name, run in ((name, getattr(found, f"train_{name}")) for name in TASKS)
    }  # fmt: skip
    assert rows == {
        "sokoban": (800, 4, 4, 20, 1536, None, 8192, 0.8, 0.9, 50, 64, "Qwen/Qwen3-VL-2B-Instruct"),
        "geo3k": (3000, 64, 8, 1, None, 4096, None, 0.8, 1.0, 20, None, "Qwen/Qwen3-VL-8B-Instruct"),
        "geo3k_multi_turn": (3000, 64, 8, 3, None, 4096, None, 1.0, 1.0, 20, 64, "Qwen/Qwen3-VL-2B-Instruct"),
    }


@pytest.mark.parametrize("task", TASKS)
def test_what_all_tasks_share(load, task):
    run = getattr(load(), f"train_{task}")
    optimizer, grpo, policy = run.optimizer, run.grpo, run.policy
    assert (optimizer.matrices, optimizer.learning_rate, optimizer.betas) == ("adamw", 1e-6, (0.9, 0.98))
    assert (optimizer.weight_decay, optimizer.eps, optimizer.clip) == (0.1, 1e-8, 1.0)
    assert (optimizer.warmup_iterations, optimizer.decay_fraction) == (0, 0.0)  # constant
    assert (grpo.credit, grpo.normalize, grpo.filter, grpo.reduction) == ("episode", "std", "none", "sample_mean")
    assert (grpo.clip_low, grpo.clip_high, grpo.kl_coefficient, grpo.entropy_coefficient) == (0.2, 0.28, 0.0, 0.0)
    assert (grpo.groups_per_step, grpo.passes, grpo.old_log_probs) == (None, 1, "recompute")
    assert (policy.source, policy.dtype, policy.compute, policy.device) == ("hub", "float32", "bfloat16", "auto")
    assert (run.warm_start.steps, run.prompts.order, run.backend) == (0, "shuffle", "fsdp")


def test_rewards_and_data(load):
    found = load()
    assert found.train_sokoban.env.args["rewards"] == {
        "blocked": -0.05, "moved": 0.01, "box_on": 1.0, "box_off": -0.5, "malformed": 0.0, "success_bonus": 5.0,
        "lost": 0.0,
    }  # fmt: skip
    assert found.train_sokoban.reward.args == {"aggregate": "mean", "distance_weight": 1.0}
    assert (found.sokoban.source, found.sokoban.hub.processed, found.sokoban.cell_px) == ("hub", True, 64)
    assert found.sokoban.hub.dataset == "VeraIsHere/sokoban_processed"
    assert found.geo3k.hub.dataset == "chenhegu/geo3k_imgurl"
    assert found.geo3k_multi_turn.hub.dataset == "VeraIsHere/geo3k_imgurl_processed"
    assert {found.geo3k.source, found.geo3k_multi_turn.source} == {"hub"}
    assert (found.geo3k.instruction, found.geo3k_multi_turn.instruction) == ("question", "tool")
    counts = [getattr(found, task).counts.model_dump() for task in TASKS]
    assert all(set(count.values()) == {None} for count in counts)
    assert found.train_geo3k_multi_turn.env.args["feedback"] == "full"


def test_variables_set_parameters(load, tmp_path):
    file = tmp_path / "rows.parquet"
    found = load(
        SLIME_SCRIPT_TRAIN_BACKEND="FSDP",
        SLIME_SCRIPT_MODEL_NAME="Qwen3-VL-4B-Thinking",
        SLIME_SCRIPT_DATASET_NAME="someone/rows",
        SLIME_SCRIPT_SOKOBAN_DATASET_ID="someone/boards",
        SLIME_SCRIPT_SOKOBAN_TRAIN_PATH=str(file),
    )
    for task in TASKS:
        run = getattr(found, f"train_{task}")
        assert (run.policy.path, run.backend) == ("Qwen/Qwen3-VL-4B-Thinking", "fsdp")
    assert (found.geo3k.hub.dataset, found.sokoban.hub.dataset) == ("someone/rows", "someone/boards")
    assert (found.sokoban.source, found.sokoban.file.path) == ("file", str(file))


def test_the_launchers_backend(load):
    """Their default of the task with one response; a layout of several processes is in conf/megatron."""
    run = load(SLIME_SCRIPT_TRAIN_BACKEND="megatron").train_geo3k
    assert (run.backend, run.megatron.tensor_parallel, run.processes) == ("megatron", 1, 1)


def test_the_command_line_comes_before(load):
    params = {"train_geo3k": {"policy": {"path": "me/mine"}, "optimizer": {"clip": 0.5}}}
    run = load(params, SLIME_SCRIPT_MODEL_NAME="Qwen3-VL-4B-Instruct").train_geo3k
    assert (run.policy.path, run.optimizer.clip, run.optimizer.learning_rate) == ("me/mine", 0.5, 1e-6)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SLIME_SCRIPT_TRAIN_BACKEND": "deepspeed"}, r'train_sokoban\.backend="deepspeed": input should be .*fsdp'),
        ({"SLIME_SCRIPT_MODEL_NAME": "Qwen3-VL-8B-Instuct"}, "none of .* Did you mean Qwen3-VL-8B-Instruct"),
        ({"SLIME_SCRIPT_MODEL_NAME": "Qwen2.5-VL-3B-Instruct"}, "is none of Qwen3-VL-2B-Instruct"),
    ],
)
def test_values_that_are_refused(load, variables, message):
    with pytest.raises(ParameterError, match=message):
        load(**variables)


def test_the_list_of_models():
    assert len(MODELS) == 10 and {"Qwen3-VL-30B-A3B-Thinking", "Qwen3-VL-235B-A22B-Instruct"} < set(MODELS)


def test_rows_of_sokoban_in_a_folder(tmp_path):
    folder = {"SLIME_SCRIPT_SOKOBAN_DATA_ROOT": str(tmp_path)}
    assert sokoban_file({}) is None and sokoban_file(folder) is None
    (tmp_path / "train.parquet").touch()
    assert sokoban_file(folder) == str(tmp_path / "train.parquet")
    assert sokoban_file({**folder, "SLIME_SCRIPT_SOKOBAN_TRAIN_PATH": "other.parquet"}) == "other.parquet"
    with pytest.raises(ValueError, match="only sokoban.source, sokoban.file.path and ray.address"):
        launch_value("geo3k.source")


def test_variables_that_nobody_knows():
    given = {"SLIME_SCRIPT_NUM_GPU": "1", "SLIME_SCRIPT_XYZ_QQQ_WWW": "1", "SLIME_SCRIPT_NUM_GPUS": "1", "HOME": "/"}
    assert unknown_variables(given)["SLIME_SCRIPT_NUM_GPU"] == "SLIME_SCRIPT_NUM_GPUS"
    assert set(unknown_variables(given)) == {"SLIME_SCRIPT_NUM_GPU", "SLIME_SCRIPT_XYZ_QQQ_WWW"}


def test_the_table_of_the_docs_names_every_variable():
    text = (ROOT / "docs" / "full_size.md").read_text(encoding="utf-8")
    tabled = set(re.findall(rf"^\| `({PREFIX}\w+)` \|", text, re.MULTILINE))
    assert tabled == {variable.name for variable in VARIABLES}
