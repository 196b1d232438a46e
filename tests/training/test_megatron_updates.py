"""Updates on stored iterations of each task, as `update_*` takes them, are those of one process without Megatron."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.training.backends.factory import build_backend
from geo_sokoban_pipeline.training.collecting import Collector, build_sampler
from geo_sokoban_pipeline.training.grpo_loop import scheduled_rate, update_policy
from geo_sokoban_pipeline.trajectories.types import Trajectory
from task_options import Geo3kMultiTurnTrainOptions, Geo3kTrainOptions, GeometryTinyOptions, TrainOptions
from training.four_ranks import FourRanks, megatron_of
from training.setup import SPLITTABLE, copied, settings, shaken

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TASKS = {"sokoban": TrainOptions, "geo3k": Geo3kTrainOptions, "geo3k_multi_turn": Geo3kMultiTurnTrainOptions}
LAYOUTS = ("tensor 2", "tensor 2, sequence", "tensor 2 x data 2")
CHANGES = {
    "grpo.credit": "episode",
    "grpo.baseline": "turn",
    "grpo.old_log_probs": "recompute",
    "grpo.importance_cap": 2.0,
    "grpo.groups_per_step": 2,
    "grpo.groups": 3,
    "grpo.group_size": 2,
    "optimizer.matrices": "muon",
    "rollout.max_tokens_per_turn": 12,
}
ITERATIONS = 3

Stored = tuple[Policy, Any, list[list[Trajectory]]]


@pytest.fixture(scope="module")
def stored(splittable: Policy, sokoban_rows: Callable[..., Any], geometry_rows: Callable[..., Any]) -> Any:
    """By task: a policy, options, and three iterations that it played; an untrained one never earns a reward, so its
    episodes get advantages of their own."""
    made: dict[str, Stored] = {}

    def find(task: str) -> Stored:
        if task not in made:
            text = (ROOT / f"conf/base/parameters/train_{task}.yml").read_text(encoding="utf-8")
            values = {**yaml.safe_load(text)[f"train_{task}"], "processes": 1}
            options = settings(TASKS[task].model_validate(values), CHANGES, TASKS[task])
            tiny = GeometryTinyOptions.model_validate(SPLITTABLE)
            policy = splittable if task == "sokoban" else shaken(build_tiny_policy(tiny, seed=0))
            rows = sokoban_rows(6, max_solution=3) if task == "sokoban" else geometry_rows(6, task)
            engine = build_engine(policy, options.rollout)
            collector = Collector(f"train_{task}", 0, options, rows, policy, engine)
            rng = np.random.default_rng(0)
            iterations = []
            for iteration in range(ITERATIONS):
                episodes, _ = collector.collect(iteration, build_sampler(rows, options, 0, None))
                for episode in episodes:
                    episode.advantage, episode.trained, episode.drop_reason = float(rng.normal()), True, None
                iterations.append(episodes)
            engine.close()
            made[task] = policy, options, iterations
        return made[task]

    return find


def train(four_ranks: FourRanks, found: Stored, layout: str) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    policy, options, iterations = found
    policy = copied(policy)
    grpo, optimizer = options.grpo, options.optimizer
    with four_ranks.group(policy, layout) as workers:
        backend = build_backend(policy, optimizer, options.rollout.sampling.temperature, workers, megatron_of(layout))
        rows = [
            update_policy(copy.deepcopy(episodes), policy, backend, grpo, optimizer, iteration, 0)
            for iteration, episodes in enumerate(iterations)
        ]
        return rows, {name: weight.detach().clone() for name, weight in backend.iter_weights()}


@pytest.mark.parametrize("task", list(TASKS))
def test_updates_are_those_of_one_process(four_ranks: FourRanks, stored: Any, task: str) -> None:
    found = stored(task)
    _, options, iterations = found
    assert all(len(episodes) == 6 for episodes in iterations)
    rate = max(scheduled_rate(options.optimizer, iteration) for iteration in range(ITERATIONS))
    expected, weights = train(four_ranks, found, "one process")
    for layout in LAYOUTS:
        rows, moved = train(four_ranks, found, layout)
        check_rows(rows, expected)
        for name, weight in weights.items():
            torch.testing.assert_close(moved[name], weight, rtol=0, atol=0.05 * rate, msg=f"{layout}: {name}")


def check_rows(rows: Sequence[dict[str, float]], expected: Sequence[dict[str, float]]) -> None:
    assert len(rows) == len(expected) == ITERATIONS
    for row, wanted in zip(rows, expected, strict=True):
        assert row.keys() == wanted.keys() and wanted["train/steps"] == 2.0
        assert row["train/grad_norm"] == pytest.approx(wanted["train/grad_norm"], rel=1e-5)
        assert row == pytest.approx(wanted, rel=1e-5, abs=1e-6)
