"""This project's side: one step is what an iteration of the loop is, from drawing prompts to the changed weights.

The update trains all episodes in one optimizer step, with one advantage per episode, as TRL does. The trajectories are
checked against the contract and written as parquet inside the clock, as Kedro does it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks.peer.env import REWARD_ARGS
from benchmarks.peer.setting import (
    Setting,
    StepReport,
    copy_weights,
    describe_episodes,
    describe_running,
    largest_change,
)

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.datasets import TrajectoriesDataset
from geo_sokoban_pipeline.envs.sokoban.task import SOKOBAN
from geo_sokoban_pipeline.policies.policy import Policy, load_policy
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.training.backend import build_backend
from geo_sokoban_pipeline.training.backends.torch import TorchBackend
from geo_sokoban_pipeline.training.collecting import Collector, build_sampler
from geo_sokoban_pipeline.training.grpo_loop import update_policy
from geo_sokoban_pipeline.trajectories.parquet import name_parts
from geo_sokoban_pipeline.trajectories.schema import TrajectoryContract
from geo_sokoban_pipeline.trajectories.types import Trajectory

Rows = list[dict[str, Any]]


def make_options(setting: Setting, reuse_cache: bool = True) -> TrainOptions:
    """The project's options for a setting; all others are the defaults."""
    return SOKOBAN.train_config.model_validate(
        {
            "env": {"factory": "benchmarks.peer.env.build_env", "args": {"turns": setting.turns}},
            "reward": {"args": REWARD_ARGS},
            "rollout": {
                "max_turns": setting.turns,
                "max_tokens_per_turn": setting.max_new_tokens,
                "sampling": {"temperature": setting.temperature},
                "reuse_cache": reuse_cache,
            },
            "grpo": {
                "groups": setting.groups,
                "group_size": setting.group_size,
                "advantage": "grpo",
                "normalize": "none",
                "filter": "none",
                "groups_per_step": None,
                "loss_args": {"clip_low": setting.clip, "clip_high": setting.clip},
                "entropy_coefficient": 0.0,
            },
            "optimizer": {
                "learning_rate": setting.learning_rate,
                "betas": setting.betas,
                "clip": setting.gradient_norm,
                "warmup_iterations": 0,
                "decay_fraction": 0.0,
            },
            "prompts": {"order": "shuffle"},
            "threads": setting.threads,
        }
    )


def draw_all(setting: Setting, rows: Rows) -> Rows:
    """The rows of all steps, in the order of this project's sampler."""
    sampler = build_sampler(rows, make_options(setting), 0, None)
    return [rows[index] for step in range(setting.steps) for index in sampler.draw(step, setting.groups)]


def run_ours(
    setting: Setting,
    rows: Rows,
    wait: Callable[[], bool],
    tell: Callable[[StepReport], None],
    *,
    reuse_cache: bool = True,
) -> None:
    """Do one step whenever `wait` returns True, and report it.

    Args:
        reuse_cache: keep the key-value cache of a conversation between turns.
    """
    options = make_options(setting, reuse_cache)
    policy = load_policy(setting.policy, options.policy.dtype, options.policy.attention)
    backend = build_backend(policy, options.optimizer, options.rollout.sampling.temperature)
    assert isinstance(backend, TorchBackend)  # it has the optimizers that the report names
    engine = build_engine(policy, options.rollout)
    sampler = build_sampler(rows, options, 0, None)
    collector = Collector("bench_peer", 0, options, rows, policy, engine)
    vision = policy.model.model.visual
    contract = TrajectoryContract()
    with tempfile.TemporaryDirectory() as folder:
        stored = TrajectoriesDataset(folder)
        for iteration in range(setting.steps):
            if not wait():
                break
            before = copy_weights(vision)
            clock, began = time.perf_counter(), time.process_time()
            engine.update_weights(None, iteration)
            trajectories, _ = collector.collect(iteration, sampler)
            collected = time.process_time()
            metrics = update_policy(trajectories, policy, backend, options.grpo, options.optimizer, iteration, 0)
            updated = time.process_time()
            stored.save(contract.validate(name_parts(iteration, trajectories, policy.table_context)))
            clock_ended, ended = time.perf_counter(), time.process_time()
            times: dict[str, Any] = {
                "wall": clock_ended - clock,
                "cpu": ended - began,
                "generation": collected - began,
                "processing": None,
                "update": updated - collected,
                "writing": ended - updated,
            }
            moved = largest_change(before, vision)
            running = describe_running(policy.model, *backend.optimizers.in_force)
            tell(StepReport(**times, vision_moved=moved, running=running, **_describe(trajectories, metrics, policy)))


def _describe(trajectories: list[Trajectory], metrics: dict[str, float], policy: Policy) -> dict[str, Any]:
    """Fields of a report that follow from the episodes and the update's metrics."""
    return {
        "levels": [episode.task_id for episode in trajectories],
        "images": sum(len(episode.images) for episode in trajectories),
        "trained_episodes": sum(episode.trained for episode in trajectories),
        "optimizer_steps": int(metrics["train/steps"] - metrics["train/skipped"]),
        "notes": {"log_prob_gap": metrics["train/train_rollout_logprob_abs_diff"]},
        **describe_episodes(
            [episode.token_ids for episode in trajectories],
            [episode.loss_mask for episode in trajectories],
            policy.codec.image_pad_id,
        ),
    }
