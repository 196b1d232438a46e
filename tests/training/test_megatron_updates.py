"""Updates on stored iterations of each task, each from the checkpoint before it as `update_*` takes them.

A layout of `fsdp` stands beside Megatron's: how far another order of summation alone carries an update.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.runs.storage import write_folder
from geo_sokoban_pipeline.training.backend import build_backend
from geo_sokoban_pipeline.training.backends.base import TrainBackend
from geo_sokoban_pipeline.training.checkpoint import CheckpointWriter
from geo_sokoban_pipeline.training.collecting import Collector, build_sampler
from geo_sokoban_pipeline.training.grpo_loop import scheduled_rate, update_policy
from geo_sokoban_pipeline.trajectories.types import Trajectory
from task_options import GeometryTinyOptions, conf_options
from training.four_ranks import FourRanks, megatron_of
from training.setup import SPLITTABLE, copied, settings, shaken

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]
LAYOUTS = ("four shards", "tensor 2, sequence", "tensor 2 x data 2")
CHANGES = {
    "grpo.advantage": "dr_grpo",
    "grpo.old_log_probs": "recompute",
    "grpo.importance": "truncated",
    "grpo.groups_per_step": 2,
    "grpo.groups": 3,
    "grpo.group_size": 2,
    "optimizer.matrices": "muon",
    "rollout.max_tokens_per_turn": 12,
}
LOSSES = {"sokoban": "ppo", "geo3k": "gspo", "geo3k_multi_turn": "gmpo"}
ITERATIONS = 2


@dataclass(frozen=True)
class Update:
    """Metrics of an update, and the weights after it."""

    row: dict[str, float]
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class StoredRun:
    """Iterations of a task that one process has rolled out and trained on.

    Attributes:
        policy: with which it began.
        episodes: by iteration.
        checkpoints: by iteration, before its update.
    """

    policy: Policy
    options: Any
    episodes: list[list[Trajectory]]
    checkpoints: list[Path]
    updates: list[Update]


def update(backend: TrainBackend, policy: Policy, options: Any, episodes: list[Trajectory], iteration: int) -> Update:
    row = update_policy(copy.deepcopy(episodes), policy, backend, options.grpo, options.optimizer, iteration, 0)
    return Update(row, {name: weight.detach().clone() for name, weight in backend.weight_source().read()})


@pytest.fixture(scope="module")
def stored(
    splittable: Policy,
    sokoban_rows: Callable[..., Any],
    geometry_rows: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], StoredRun]:
    """Factory of runs; an untrained policy never earns a reward, so its episodes get advantages of their own."""

    def play(task: str) -> StoredRun:
        options = settings(conf_options(task), CHANGES | {"grpo.loss": LOSSES[task]})
        tiny = GeometryTinyOptions.model_validate(SPLITTABLE)
        policy = splittable if task == "sokoban" else shaken(build_tiny_policy(tiny, seed=0))
        rows = sokoban_rows(6, max_solution=3) if task == "sokoban" else geometry_rows(6, task)
        run, place = StoredRun(policy, options, [], [], []), tmp_path_factory.mktemp(task)
        trained = copied(policy)
        backend = build_backend(trained, options.optimizer, options.rollout.sampling.temperature)
        engine = build_engine(trained, options.rollout)
        collector = Collector(f"train_{task}", 0, options, rows, trained, engine)
        rng = np.random.default_rng(0)
        for iteration in range(ITERATIONS):
            engine.update_weights(None, iteration)
            episodes, _ = collector.collect(iteration, build_sampler(rows, options, 0, None))
            assert len(episodes) == 6
            for episode in episodes:
                episode.advantage, episode.trained, episode.drop_reason = float(rng.normal()), True, None
            run.episodes.append(episodes)
            run.checkpoints.append(place / str(iteration))
            write_folder(run.checkpoints[-1], CheckpointWriter(backend, {}))
            run.updates.append(update(backend, trained, options, episodes, iteration))
        engine.close()
        return run

    return play


@pytest.mark.parametrize("task", LOSSES)
def test_updates_are_those_of_one_process(four_ranks: FourRanks, stored: Any, task: str) -> None:
    run: StoredRun = stored(task)
    temperature = run.options.rollout.sampling.temperature
    for layout in LAYOUTS:
        policy = copied(run.policy)
        with four_ranks.group(policy, layout) as workers:
            backend = build_backend(policy, run.options.optimizer, temperature, workers, megatron_of(layout))
            for iteration, expected in enumerate(run.updates):
                if iteration > 0:
                    backend.load_state(run.checkpoints[iteration])
                found = update(backend, policy, run.options, run.episodes[iteration], iteration)
                check_update(found, expected, scheduled_rate(run.options.optimizer, iteration), layout)


def check_update(found: Update, expected: Update, rate: float, layout: str) -> None:
    assert found.row.keys() == expected.row.keys() and expected.row["train/steps"] == 2.0
    # The second step is that of weights which differ by a share of the first one's learning rate.
    assert found.row["train/grad_norm"] == pytest.approx(expected.row["train/grad_norm"], rel=1e-5), layout
    assert found.row == pytest.approx(expected.row, rel=1e-6, abs=1e-6), layout
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=0, atol=0.05 * rate, msg=f"{layout}: {name}")
