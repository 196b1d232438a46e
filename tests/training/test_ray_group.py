"""How many ranks a Ray cluster may give a run, and what follows for its servers; whose GPUs the driver leaves alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from geo_sokoban_pipeline.config.grpo import RolloutPipelineOptions
from geo_sokoban_pipeline.config.policy import PolicyOptions
from geo_sokoban_pipeline.config.rollout import RolloutOptions
from geo_sokoban_pipeline.evaluation import summary
from geo_sokoban_pipeline.pipelines.stored.nodes import collect_trajectories
from geo_sokoban_pipeline.policies import policy as policies
from geo_sokoban_pipeline.policies.policy import Policy, load_as
from geo_sokoban_pipeline.policies.preparing import policy_writer
from geo_sokoban_pipeline.rollout.engines.transformers import TransformersEngine
from geo_sokoban_pipeline.runs.policy_folder import PolicyFolder, write_policy
from geo_sokoban_pipeline.training import rollout_workers, sft, worker_group
from geo_sokoban_pipeline.training.worker_group import OwnCode, WorkerGroup, count_actors, sizes
from task_options import TrainOptions

pytestmark = pytest.mark.xdist_group("ranks")

COLOCATED = {"engine": "sglang", "server": {"count": 2, "tensor_parallel": 2, "colocated": True}}


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"processes": 3}, [(3, 1)]),
        ({"processes": 3, "ray": {"min_processes": 1}}, [(3, 1), (2, 1), (1, 1)]),
        ({"processes": 8, "ray": {"min_processes": 4}, "sharding": "hybrid", "replicas": 2}, [(8, 1), (6, 1), (4, 1)]),
        ({"processes": 5, "ray": {"min_processes": 2}, "rollout": COLOCATED}, [(5, 2), (4, 2), (2, 1)]),
    ],
)
def test_fewer_ranks_come_in_whole_units_with_servers_for_their_gpus(
    train_options: TrainOptions, options: dict[str, Any], found: list[tuple[int, int]]
) -> None:
    values = train_options.model_dump()
    options = {**options, "rollout": values["rollout"] | options.get("rollout", {})}
    made = TrainOptions.model_validate(values | {"placement": "ray", "threads": 1} | options)
    assert [(one.processes, one.rollout.server.count) for one in sizes(made)] == found


@pytest.mark.parametrize(
    ("rollout", "actors"),
    [
        ({}, 3),
        ({"workers": 2}, 5),
        ({"engine": "sglang", "server": {"count": 2}}, 5),
        ({"engine": "sglang", "server": {"count": 3, "colocated": True}}, 3),
        ({"engine": "sglang", "server": {"count": 2}, "workers": 1}, 6),
        ({"engine": "sglang", "server": {"mode": "attach", "urls": ["http://127.0.0.1:1"]}}, 3),
    ],
)
def test_a_cluster_has_place_for_all_that_runs_at_a_time(
    train_options: TrainOptions, rollout: dict[str, Any], actors: int
) -> None:
    values = train_options.model_dump()
    options = {"placement": "ray", "processes": 3, "threads": 1, "rollout": values["rollout"] | rollout}
    assert count_actors(TrainOptions.model_validate(values | options)) == actors


def test_own_files_have_names_of_their_own_in_the_ranks(train_options: TrainOptions, tmp_path: Path) -> None:
    given = {"env": "factory", "reward": "function", "rollout": "function"}
    changes = {}
    for section, name in given.items():
        (tmp_path / section).mkdir()
        (tmp_path / section / "own.py").write_text(f"# {section}")
        spec = f"{tmp_path / section / 'own.py'}:make"
        changes[section] = getattr(train_options, section).model_copy(update={name: spec})
    options = train_options.model_copy(update=changes)
    code = OwnCode.of(options)
    there = code.renamed(options)
    for section, name in given.items():
        path, _, attribute = getattr(getattr(there, section), name).partition(":")
        assert (code.files[path].decode(), attribute) == (f"# {section}", "make")
    assert (OwnCode.of(train_options).files, OwnCode.of(train_options).renamed(train_options)) == ({}, train_options)


class InPlaceOfServers(TransformersEngine):
    """An engine of this process where a run has servers."""

    restarts = 0


def one_rank(policy: Policy, options: TrainOptions) -> closing[WorkerGroup]:
    """A group of this process, as the only rank that found a place."""
    return closing(WorkerGroup(policy, options.with_processes(1)))


@pytest.fixture(scope="module")
def few(train_options: TrainOptions) -> TrainOptions:
    """Options of two ranks that may be one, each with a server on its GPU."""
    values = train_options.model_dump()
    values["rollout"] |= {"engine": "sglang", "server": {"count": 2, "colocated": True}, "max_turns": 2}
    values["warm_start"] |= {"steps": 1, "play_every": 1, "episodes_per_step": 1, "validation_episodes": 1}
    values["policy"]["device"] = "auto"
    values["grpo"] |= {"groups": 1, "group_size": 2}
    values["evaluation"] |= {"prompts": 1, "samples": 1}
    values["loop"] |= {"eval_prompts": 1}
    ray = {"placement": "ray", "processes": 2, "threads": 1, "ray": {"min_processes": 1}}
    return TrainOptions.model_validate(values | ray)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many servers each engine is to have; an engine of this process samples in their place."""
    found: list[int] = []

    def build(policy: Policy, options: RolloutOptions, launcher: Any) -> InPlaceOfServers:
        found.append(options.server.count)
        return InPlaceOfServers(policy)

    for module in (rollout_workers, sft, summary):
        monkeypatch.setattr(module, "build_engine", build)
    return found


@pytest.fixture
def folder(tiny_policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PolicyFolder:
    """A policy, on a machine where `policy.device=auto` would take a GPU."""
    made = write_policy(tmp_path / "policy", policy_writer(tiny_policy, {}))

    def device_of(options: PolicyOptions) -> str:
        return "cuda" if options.device == "auto" else options.device

    monkeypatch.setattr(policies, "device_of", device_of)
    with pytest.raises((AssertionError, RuntimeError), match="CUDA|NVIDIA"):
        load_as(PolicyOptions(device="auto"), made.path)
    return made


def test_a_warm_start_validates_with_the_servers_of_its_ranks(
    tiny_policy: Policy, few: TrainOptions, servers: list[int], sokoban_rows: Callable[..., Any]
) -> None:
    policy, rows = copy.deepcopy(tiny_policy), sokoban_rows(4, max_solution=3)
    with one_rank(policy, few) as workers:
        history, _ = sft.run_sft(policy, rows, rows[:1], few, 0, workers=workers)
    assert "sampled_solve_rate" in history[0] and servers == [1]


def test_stored_policies_are_rolled_out_by_the_servers_of_the_ranks_and_sent_from_the_cpu(
    folder: PolicyFolder,
    few: TrainOptions,
    servers: list[int],
    sokoban_rows: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_group, "open_worker_group", one_rank)
    options = RolloutPipelineOptions.model_validate({"source": {"run": "train_sokoban"}})
    rows = pd.DataFrame(sokoban_rows(4, max_solution=3))
    chunks = list(collect_trajectories(lambda: folder, lambda: (None, None), rows, options, few, 0))
    assert len(chunks) == 2 and servers == [1]


def test_evaluated_policies_are_sent_from_the_cpu(
    folder: PolicyFolder, few: TrainOptions, servers: list[int], sokoban_rows: Callable[..., Any]
) -> None:
    rows = sokoban_rows(2)
    found, _ = summary.evaluate_policies("run", 0, {"final": folder}, rows, few, baselines=False, ablations=False)
    assert found["policies"] == ["final"] and servers == [2]
