"""Settings of the environments: each loads, is valid, and differs from `base` in what it is for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from geo_sokoban_pipeline.config.base import validate_parameters
from geo_sokoban_pipeline.hooks.config_loader import ProjectConfigLoader
from geo_sokoban_pipeline.parameters import ProjectParameters
from geo_sokoban_pipeline.settings import CONFIG_LOADER_ARGS

CONF = Path(__file__).parents[1] / "conf"


def load(env: str) -> ProjectParameters:
    loader = ProjectConfigLoader(str(CONF), env=env, **CONFIG_LOADER_ARGS)
    return validate_parameters(dict(loader["parameters"]), ProjectParameters)


@pytest.mark.parametrize("env", sorted(path.name for path in CONF.iterdir() if (path / "parameters").is_dir()))
def test_every_environment_is_valid(env: str) -> None:
    load(env)


def test_the_server_on_a_cpu_takes_the_rest_from_base() -> None:
    ours, base = load("sglang_cpu").train_sokoban, load("base").train_sokoban
    assert (ours.rollout.engine, ours.rollout.server.device, ours.processes) == ("sglang", "cpu", 1)
    assert (ours.grpo, ours.policy, ours.warm_start) == (base.grpo, base.policy, base.warm_start)
    assert ours.rollout.max_turns == base.rollout.max_turns


def test_megatron_has_the_originals_layout_and_all_else_of_qwen3vl(monkeypatch: Any) -> None:
    monkeypatch.delenv("SLIME_SCRIPT_TRAIN_BACKEND", raising=False)
    ours, other = load("megatron"), load("qwen3vl")
    run, server = ours.train_geo3k, ours.train_geo3k.rollout.server
    assert (run.backend, run.megatron.tensor_parallel, run.megatron.sequence_parallel) == ("megatron", 4, True)
    assert (run.optimizer.max_tokens, run.optimizer.gradient_checkpointing) == (4096, True)
    assert (run.processes, server.first_gpu, server.count) == (4, 4, 4)
    changed = {"backend", "megatron", "processes", "threads", "optimizer", "rollout"}
    for task in ("sokoban", "geo3k", "geo3k_multi_turn"):
        one, two = (getattr(found, f"train_{task}").model_dump() for found in (ours, other))
        assert {name for name in one if one[name] != two[name]} == changed
        assert {name for name in one["rollout"] if one["rollout"][name] != two["rollout"][name]} == {"server"}
        assert getattr(ours, task) == getattr(other, task)
    monkeypatch.setenv("SLIME_SCRIPT_TRAIN_BACKEND", "fsdp")
    assert load("megatron").train_geo3k.backend == "fsdp"


def test_qwen3vl_launches_servers_as_the_originals_do(monkeypatch: Any) -> None:
    monkeypatch.setenv("SLIME_SCRIPT_NUM_GPUS", "4")
    monkeypatch.setenv("SLIME_SCRIPT_MODEL_NAME", "Qwen3-VL-8B-Instruct")
    monkeypatch.setenv("GEO_SOKOBAN_SGLANG_MM_ATTENTION", "sdpa")
    options = load("qwen3vl").train_sokoban
    server = options.rollout.server
    assert (options.policy.path, server.count, server.tensor_parallel) == ("Qwen/Qwen3-VL-8B-Instruct", 4, 1)
    assert server.first_gpu == 1  # the first one trains
    assert (options.rollout.engine, server.dtype, server.bucket_bytes) == ("sglang", "bfloat16", 512 << 20)
    assert (server.memory_fraction, server.attention_backend, server.mm_attention_backend) == (0.85, "fa3", "sdpa")
    assert server.cuda_graph_batch_sizes == (1, 2, 4, 8, *range(16, 257, 8))


def test_the_cluster_takes_the_rest_from_qwen3vl(monkeypatch: Any) -> None:
    monkeypatch.setenv("SLIME_SCRIPT_NUM_GPUS", "16")
    monkeypatch.setenv("SLIME_SCRIPT_EXTERNAL_RAY", "1")
    ours, other = load("cluster").train_geo3k, load("qwen3vl").train_geo3k
    assert (ours.placement, ours.ray.address, ours.processes, ours.sharding) == ("ray", "auto", 16, "full")
    assert (ours.rollout.engine, ours.threads, ours.ray.cpus) == ("transformers", 4, 4)
    assert (ours.grpo, ours.policy, ours.loop) == (other.grpo, other.policy, other.loop)
    # With servers, these take turns with the ranks: 16 GPUs in all.
    server = ours.rollout.server
    with_servers = ours.model_validate(
        {**ours.model_dump(), "rollout": {**ours.rollout.model_dump(), "engine": "sglang"}}
    )
    assert with_servers.places_servers and with_servers.rollout.takes_turns
    assert (server.count, server.tensor_parallel, server.router) == (16, 1, "none")
    # Eight ranks that share the weights of 8B need no memory of the CPU.
    assert ours.optimizer == other.optimizer.model_copy(update={"offload": False})
    assert (ours.rollout.sampling, other.placement, other.processes) == (other.rollout.sampling, "local", 1)
