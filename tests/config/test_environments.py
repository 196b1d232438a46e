"""Environments of the configuration: each is valid, differs from others in what it is for, and reads the variables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from geo_sokoban_pipeline.config import ParameterError, validate_parameters
from geo_sokoban_pipeline.config.launcher_env import (
    MODELS,
    PREFIX,
    VARIABLES,
    launch_value,
    sokoban_file,
    unknown_variables,
)
from geo_sokoban_pipeline.envs.geo3k.answer_env import AnswerEnvOptions
from geo_sokoban_pipeline.envs.geo3k.config import Geo3kDataOptions, Geo3kMultiTurnDataOptions
from geo_sokoban_pipeline.envs.geo3k.env import build_env
from geo_sokoban_pipeline.hooks.config_loader import ProjectConfigLoader
from geo_sokoban_pipeline.hooks.parameters import check_parameters
from geo_sokoban_pipeline.parameters import ProjectParameters
from geo_sokoban_pipeline.rewards.geo3k import AnswerRewardOptions
from geo_sokoban_pipeline.settings import CONFIG_LOADER_ARGS
from geo_sokoban_pipeline.tasks import TASKS
from option_fields import value_at
from runs import ROOT

CONF = ROOT / "conf"
ENVIRONMENTS = sorted(path.name for path in CONF.iterdir() if (path / "parameters").is_dir())
Load = Callable[..., ProjectParameters]
HUB = "Qwen/Qwen3-VL"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Parameters of an environment under the given variables and no others of the launchers."""

    def read(env: str, params: dict[str, Any] | None = None, **variables: str) -> ProjectParameters:
        for variable in VARIABLES:
            monkeypatch.delenv(variable.name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        loader = ProjectConfigLoader(str(CONF), env=env, runtime_params=params or {}, **CONFIG_LOADER_ARGS)
        return check_parameters(loader["parameters"], params or {})

    return read


@pytest.mark.parametrize("env", ENVIRONMENTS)
def test_every_environment_is_valid(load: Load, env: str) -> None:
    load(env)


@pytest.mark.parametrize("task", TASKS)
def test_launch_values(load: Load, task: str) -> None:
    """The table of the original launchers; lengths, batches and temperatures by task."""
    names = (
        "loop.iterations", "grpo.groups", "grpo.group_size", "rollout.max_turns", "rollout.max_tokens_per_turn",
        "rollout.max_response_tokens", "rollout.max_context_tokens", "rollout.sampling.temperature",
        "rollout.sampling.top_p", "loop.eval_interval", "loop.eval_prompts", "policy.path",
    )  # fmt: skip
    rows = {
        "sokoban": (800, 4, 4, 20, 1536, None, 8192, 0.8, 0.9, 50, 64, f"{HUB}-2B-Instruct"),
        "geo3k": (3000, 64, 8, 1, None, 4096, None, 0.8, 1.0, 20, None, f"{HUB}-8B-Instruct"),
        "geo3k_multi_turn": (3000, 64, 8, 3, None, 4096, None, 1.0, 1.0, 20, 64, f"{HUB}-2B-Instruct"),
    }
    shared = {
        "optimizer.matrices": "adamw", "optimizer.learning_rate": 1e-6, "optimizer.betas": (0.9, 0.98),
        "optimizer.weight_decay": 0.1, "optimizer.eps": 1e-8, "optimizer.clip": 1.0,
        "optimizer.warmup_iterations": 0, "optimizer.decay_fraction": 0.0,  # constant
        "grpo.advantage": "grpo", "grpo.normalize": "none", "grpo.filter": "none", "grpo.reduction": "sample_mean",
        "grpo.loss_args.clip_low": 0.2, "grpo.loss_args.clip_high": 0.28,
        "grpo.kl_coefficient": 0.0, "grpo.entropy_coefficient": 0.0,
        "grpo.groups_per_step": None, "grpo.passes": 1, "grpo.old_log_probs": "recompute",
        "policy.source": "hub", "policy.dtype": "float32", "policy.compute": "bfloat16", "policy.device": "auto",
        "warm_start.steps": 0, "prompts.order": "shuffle", "backend": "fsdp",
    }  # fmt: skip
    run = getattr(load("qwen3vl"), f"train_{task}")
    for path, value in {**dict(zip(names, rows[task], strict=True)), **shared}.items():
        assert value_at(run, path) == value, path


GPUS = "train_sokoban.rollout.server"
ALL_ROWS = {"train": None, "validation": None, "eval": None}
MOVES = {"blocked": -0.05, "moved": 0.01, "box_on": 1.0, "box_off": -0.5, "malformed": 0.0, "success_bonus": 5.0}
MINE = {"train_geo3k": {"policy": {"path": "me/mine"}, "optimizer": {"clip": 0.5}}}
VALUES: list[tuple[str, dict[str, Any] | None, dict[str, str], dict[str, Any]]] = [
    (
        "qwen3vl",
        None,
        {},
        {
            "train_sokoban.env.args.rewards": {**MOVES, "lost": 0.0},
            "train_sokoban.reward.args": {"aggregate": "mean", "distance_weight": 1.0},
            "sokoban.source": "hub",
            "sokoban.hub.processed": True,
            "sokoban.cell_px": 64,
            "sokoban.hub.dataset": "VeraIsHere/sokoban_processed",
            "geo3k.hub.dataset": "chenhegu/geo3k_imgurl",
            "geo3k_multi_turn.hub.dataset": "VeraIsHere/geo3k_imgurl_processed",
            "geo3k.source": "hub",
            "geo3k_multi_turn.source": "hub",
            "geo3k.instruction": "question",
            "geo3k_multi_turn.instruction": "tool",
            "train_geo3k_multi_turn.env.args.feedback": "full",
            **{f"{task}.counts.{split}": None for task in TASKS for split in ALL_ROWS},
        },
    ),
    (
        "qwen3vl",
        None,
        {
            "SLIME_SCRIPT_TRAIN_BACKEND": "FSDP",
            "SLIME_SCRIPT_MODEL_NAME": "Qwen3-VL-4B-Thinking",
            "SLIME_SCRIPT_DATASET_NAME": "someone/rows",
            "SLIME_SCRIPT_SOKOBAN_DATASET_ID": "someone/boards",
            "SLIME_SCRIPT_SOKOBAN_TRAIN_PATH": "/data/rows.parquet",
        },
        {
            **{f"train_{task}.policy.path": f"{HUB}-4B-Thinking" for task in TASKS},
            **{f"train_{task}.backend": "fsdp" for task in TASKS},
            "geo3k.hub.dataset": "someone/rows",
            "sokoban.hub.dataset": "someone/boards",
            "sokoban.source": "file",
            "sokoban.file.path": "/data/rows.parquet",
        },
    ),
    (  # their default of the task with one response; a layout of several processes is in conf/megatron
        "qwen3vl",
        None,
        {"SLIME_SCRIPT_TRAIN_BACKEND": "megatron"},
        {"train_geo3k.backend": "megatron", "train_geo3k.megatron.tensor_parallel": 1, "train_geo3k.processes": 1},
    ),
    (  # the command line comes before
        "qwen3vl",
        MINE,
        {"SLIME_SCRIPT_MODEL_NAME": "Qwen3-VL-4B-Instruct"},
        {
            "train_geo3k.policy.path": "me/mine",
            "train_geo3k.optimizer.clip": 0.5,
            "train_geo3k.optimizer.learning_rate": 1e-6,
        },
    ),
    (  # servers as the originals launch them
        "qwen3vl",
        None,
        {
            "SLIME_SCRIPT_NUM_GPUS": "4",
            "SLIME_SCRIPT_MODEL_NAME": "Qwen3-VL-8B-Instruct",
            "GEO_SOKOBAN_SGLANG_MM_ATTENTION": "sdpa",
        },
        {
            "train_sokoban.policy.path": f"{HUB}-8B-Instruct",
            "train_sokoban.rollout.engine": "sglang",
            f"{GPUS}.count": 4,
            f"{GPUS}.tensor_parallel": 1,
            f"{GPUS}.first_gpu": 0,  # in turns with the trainer
            f"{GPUS}.colocated": True,
            f"{GPUS}.dtype": "bfloat16",
            f"{GPUS}.bucket_bytes": 512 << 20,
            f"{GPUS}.memory_fraction": 0.82,
            f"{GPUS}.attention_backend": "fa3",
            f"{GPUS}.mm_attention_backend": "sdpa",
            f"{GPUS}.cuda_graph_batch_sizes": (1, 2, 4, 8, *range(16, 257, 8)),
        },
    ),
    (
        "megatron",
        None,
        {},
        {
            "train_geo3k.backend": "megatron",
            "train_geo3k.megatron.tensor_parallel": 4,
            "train_geo3k.megatron.sequence_parallel": True,
            "train_geo3k.optimizer.max_tokens": 4096,
            "train_geo3k.optimizer.gradient_checkpointing": True,
            "train_geo3k.processes": 4,
            "train_geo3k.rollout.server.first_gpu": 4,
            "train_geo3k.rollout.server.count": 4,
        },
    ),
    ("megatron", None, {"SLIME_SCRIPT_TRAIN_BACKEND": "fsdp"}, {"train_geo3k.backend": "fsdp"}),
    (
        "cluster",
        None,
        {"SLIME_SCRIPT_NUM_GPUS": "16", "SLIME_SCRIPT_EXTERNAL_RAY": "1"},
        {
            "train_geo3k.placement": "ray",
            "train_geo3k.ray.address": "auto",
            "train_geo3k.processes": 16,
            "train_geo3k.sharding": "full",
            "train_geo3k.rollout.engine": "sglang",
            "train_geo3k.rollout.server.colocated": True,
            "train_geo3k.threads": 4,
            "train_geo3k.ray.cpus": 4,
            "train_geo3k.rollout.server.count": 16,
            "train_geo3k.rollout.server.tensor_parallel": 1,
            "train_geo3k.rollout.server.router": "none",
            # Eight ranks that share the weights of 8B need no memory of the CPU.
            "train_geo3k.optimizer.offload": False,
        },
    ),
    (
        "sglang_cpu",
        None,
        {},
        {"train_sokoban.rollout.engine": "sglang", f"{GPUS}.device": "cpu", "train_sokoban.processes": 1},
    ),
    (
        "slime_exact",
        None,
        {},
        {
            **{f"{task}.exclude_overlaps": "none" for task in ("geo3k", "geo3k_multi_turn")},
            **{f"{task}.repair_control_characters": False for task in ("geo3k", "geo3k_multi_turn")},
            **{f"{task}.transparency": "drop" for task in ("geo3k", "geo3k_multi_turn")},
            "train_geo3k.rollout.max_turns": 1,
            "train_geo3k.rollout.sampling.temperature": 0.8,
            "train_geo3k_multi_turn.rollout.max_turns": 3,
            "train_geo3k_multi_turn.rollout.max_response_tokens": 4096,
            "train_geo3k_multi_turn.rollout.max_context_tokens": None,
            "train_geo3k_multi_turn.rollout.effective_rules.turn_separator": False,
            "train_geo3k_multi_turn.rollout.effective_rules.budget_counts_prompt": True,
            "train_geo3k_multi_turn.rollout.effective_rules.budget_counts": "response",
            "train_geo3k_multi_turn.rollout.effective_rules.step_before_finish_check": False,
            "train_geo3k_multi_turn.rollout.effective_rules.truncate_at_max_turns": False,
            "train_geo3k_multi_turn.rollout.effective_rules.drop_overflowing_observation": False,
        },
    ),
]


@pytest.mark.parametrize(("env", "params", "variables", "expected"), VALUES)
def test_environments_and_variables_set_parameters(
    load: Load, env: str, params: dict[str, Any] | None, variables: dict[str, str], expected: dict[str, Any]
) -> None:
    found = load(env, params, **variables)
    assert {path: value_at(found, path) for path in expected} == expected


@pytest.mark.parametrize(
    ("env", "other", "tasks", "variables", "changed"),
    [
        ("sglang_cpu", "base", ("sokoban",), {}, {"processes", "rollout.engine", "rollout.server"}),
        (
            "megatron",
            "qwen3vl",
            TASKS,
            {},
            {"backend", "megatron", "processes", "threads", "optimizer", "rollout.server"},
        ),
        (
            "cluster",
            "qwen3vl",
            ("geo3k",),
            {"SLIME_SCRIPT_NUM_GPUS": "16", "SLIME_SCRIPT_EXTERNAL_RAY": "1"},
            {"placement", "ray", "processes", "threads", "sharding", "optimizer", "rollout.server"},
        ),
    ],
)
def test_an_environment_takes_the_rest_from_another(
    load: Load, env: str, other: str, tasks: Iterable[str], variables: dict[str, str], changed: set[str]
) -> None:
    ours, theirs = load(env, **variables), load(other, **variables)
    for task in tasks:
        one, two = (getattr(found, f"train_{task}").model_dump() for found in (ours, theirs))
        rollout, others = one.pop("rollout"), two.pop("rollout")
        found = {name for name in one if one[name] != two[name]}
        found |= {f"rollout.{name}" for name in rollout if rollout[name] != others[name]}
        assert found == changed, task
        assert getattr(ours, task) == getattr(theirs, task)


def test_servers_of_the_cluster_take_turns_with_its_ranks(load: Load) -> None:
    """16 GPUs in all."""
    run = load("cluster", SLIME_SCRIPT_NUM_GPUS="16").train_geo3k
    assert run.places_servers and run.rollout.takes_turns
    # A policy that is sent to servers in turns lies on none of their GPUs.
    sent = [found.sent_policy.device for found in (run, load("qwen3vl").train_geo3k, load("megatron").train_geo3k)]
    assert sent == ["cpu", "cpu", "auto"]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SLIME_SCRIPT_TRAIN_BACKEND": "deepspeed"}, r'train_sokoban\.backend="deepspeed": input should be .*fsdp'),
        ({"SLIME_SCRIPT_MODEL_NAME": "Qwen3-VL-8B-Instuct"}, "none of .* Did you mean Qwen3-VL-8B-Instruct"),
        ({"SLIME_SCRIPT_MODEL_NAME": "Qwen2.5-VL-3B-Instruct"}, "is none of Qwen3-VL-2B-Instruct"),
    ],
)
def test_values_that_are_refused(load: Load, variables: dict[str, str], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        load("qwen3vl", **variables)


def test_rows_of_sokoban_in_a_folder(tmp_path):
    folder = {"SLIME_SCRIPT_SOKOBAN_DATA_ROOT": str(tmp_path)}
    assert sokoban_file({}) is None and sokoban_file(folder) is None
    (tmp_path / "train.parquet").touch()
    assert sokoban_file(folder) == str(tmp_path / "train.parquet")
    assert sokoban_file({**folder, "SLIME_SCRIPT_SOKOBAN_TRAIN_PATH": "other.parquet"}) == "other.parquet"
    with pytest.raises(ValueError, match=r"geo3k\.source.*: only ray\.address, sokoban\.source, sokoban\.file"):
        launch_value("geo3k.source")


def test_variables_and_models_are_those_of_the_launchers_and_of_the_docs():
    given = {"SLIME_SCRIPT_NUM_GPU": "1", "SLIME_SCRIPT_XYZ_QQQ_WWW": "1", "SLIME_SCRIPT_NUM_GPUS": "1", "HOME": "/"}
    assert unknown_variables(given)["SLIME_SCRIPT_NUM_GPU"] == "SLIME_SCRIPT_NUM_GPUS"
    assert set(unknown_variables(given)) == {"SLIME_SCRIPT_NUM_GPU", "SLIME_SCRIPT_XYZ_QQQ_WWW"}
    assert len(MODELS) == 10 and {"Qwen3-VL-30B-A3B-Thinking", "Qwen3-VL-235B-A22B-Instruct"} < set(MODELS)
    text = (ROOT / "docs" / "full_size.md").read_text(encoding="utf-8")
    tabled = set(re.findall(rf"^\| `({PREFIX}\w+)` \|", text, re.MULTILINE))
    assert tabled == {variable.name for variable in VARIABLES}


def test_geometry_of_slime_exact(load: Load) -> None:
    found = load("slime_exact")
    for given, model in ((found.geo3k, Geo3kDataOptions), (found.geo3k_multi_turn, Geo3kMultiTurnDataOptions)):
        wanted = model.slime_exact(instruction="tool")
        assert wanted.instruction == "tool"
        for name in ("exclude_overlaps", "repair_control_characters", "transparency"):
            assert getattr(given, name) == getattr(wanted, name)
    env = build_env({"answer": "5"}, found.train_geo3k_multi_turn.env.args)
    assert env.options == type(env.options)(preset="slime_exact", max_turns=3)
    assert validate_parameters(found.train_geo3k.env.args, AnswerEnvOptions).grader == "slime_exact"
    for run in (found.train_geo3k, found.train_geo3k_multi_turn):
        reward, grpo = validate_parameters(run.reward.args, AnswerRewardOptions), run.grpo
        assert (reward.grader, reward.grade_scope) == ("slime_exact", "response")
        assert run.reward.function.endswith(".math_reward")
        assert (grpo.groups, grpo.group_size, grpo.advantage, grpo.normalize) == (64, 8, "grpo", "none")
        assert (grpo.filter, grpo.loss) == ("none", "ppo")
        assert (grpo.loss_args["clip_low"], grpo.loss_args["clip_high"]) == (0.2, 0.28)
        assert (grpo.entropy_coefficient, grpo.reduction) == (0.0, "sample_mean")
