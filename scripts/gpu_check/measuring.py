"""Timing: one rollout by the engine, then optimizer steps on its episodes, on a clock that waits for the device."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from model import Load, forward_flops

from geo_sokoban_pipeline.config.grpo import GrpoOptions, OptimizerOptions
from geo_sokoban_pipeline.config.rollout import EnvOptions, RewardOptions, RolloutOptions, SamplingOptions
from geo_sokoban_pipeline.envs.sokoban.config import SokobanDataOptions
from geo_sokoban_pipeline.envs.sokoban.data_steps import make_prompts, read_levels
from geo_sokoban_pipeline.envs.sokoban.task import ENV, REWARD
from geo_sokoban_pipeline.grpo.loss import GrpoObjective
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.engines.base import Result as EngineResult
from geo_sokoban_pipeline.rollout.engines.transformers import TransformersEngine
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.rollout.rollout import rollout
from geo_sokoban_pipeline.training.backends.factory import build_backend
from geo_sokoban_pipeline.training.batch import TrainSample, build_sample
from geo_sokoban_pipeline.trajectories.types import Trajectory

_GROUP = 4
_RATE = 1e-6
Result = TypeVar("Result")


@dataclass(frozen=True)
class Work:
    """How much is done: episodes, responses of each, tokens of a response, optimizer steps, tokens of a micro-batch."""

    episodes: int
    turns: int
    tokens: int
    updates: int
    batch_tokens: int


@dataclass(frozen=True)
class Figures:
    """What was measured.

    Attributes:
        rollout_seconds, sampled: of the rollout, and tokens that were sampled in it.
        update_seconds: of each optimizer step.
        tokens, scored, images: of one step: tokens of the episodes, trained ones, images.
        step_flops: operations of one step, a backward pass counting as two forward passes.
        gradient_norm: of the last step; finite, or the step was none.
        peak_bytes: largest memory: of torch's allocator on a GPU, of the process on a CPU.
    """

    rollout_seconds: float
    sampled: int
    update_seconds: list[float]
    tokens: int
    scored: int
    images: int
    step_flops: float
    gradient_norm: float
    peak_bytes: int


class FullResponses(TransformersEngine):
    """The engine, for policies that do not end their responses: one that has reached its limit counts as ended."""

    def poll(self) -> list[EngineResult]:
        """See `TransformersEngine`."""
        return [replace(result, finish_reason="stop") for result in super().poll()]


def measure(policy: Policy, work: Work) -> Figures:
    """Roll out and train once.

    Raises:
        RuntimeError: an optimizer step had no finite gradient.
    """
    device = policy.model.device.type
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    rollout_seconds, episodes = _timed(device, lambda: _roll_out(policy, work))
    samples = [_with_advantage(build_sample(episode, policy), number) for number, episode in enumerate(episodes)]
    options = OptimizerOptions(
        learning_rate=_RATE, max_tokens=work.batch_tokens, logit_chunk=2048, clip=1.0, weight_decay=0.1
    )
    backend = build_backend(policy, options)
    objective = GrpoObjective(GrpoOptions(reduction="sample_mean", credit="episode", entropy_coefficient=0.0))
    seconds, norm = [], 0.0
    for _ in range(work.updates):
        spent, metrics = _timed(device, lambda: backend.step(samples, objective, _RATE))
        if metrics["skipped"]:
            raise RuntimeError("an optimizer step had no finite gradient")
        seconds.append(spent)
        norm = metrics["grad_norm"]
    load = _load(samples)
    return Figures(
        rollout_seconds=rollout_seconds,
        sampled=sum(int(episode.loss_mask.sum()) for episode in episodes),
        update_seconds=seconds,
        tokens=sum(load.lengths),
        scored=load.scored,
        images=len(load.patches),
        step_flops=3 * forward_flops(policy, load),
        gradient_norm=norm,
        peak_bytes=_peak_bytes(device),
    )


def _roll_out(policy: Policy, work: Work) -> list[Trajectory]:
    rows = _prompts(max(1, work.episodes // _GROUP))
    limits = RolloutOptions.model_validate({
        "max_turns": work.turns, "max_tokens_per_turn": work.tokens, "max_failed_share": 0.0, "draft_share": None,
    })  # fmt: skip
    env = EnvOptions(factory=ENV, args={"cell_px": 64, "observation_style": "full", "end_when_lost": False})
    reward, sampling = RewardOptions(function=REWARD), SamplingOptions(temperature=0.8)
    settings = RolloutSettings(env, reward, limits, sampling, 0, "sokoban")
    tasks = [
        EpisodeRequest(f"gpu/{number}", rows[number // _GROUP % len(rows)], number // _GROUP, number, number)
        for number in range(work.episodes)
    ]
    engine = FullResponses(policy, draft_share=None)
    try:
        return rollout(engine, policy, tasks, settings)
    finally:
        engine.close()


def _prompts(count: int) -> list[dict[str, object]]:
    counts = {"train": count, "validation": 1, "eval": 1}
    options = SokobanDataOptions.model_validate({"cell_px": 64, "instruction": "full", "counts": counts})
    levels, _, _ = read_levels(options)
    rows: list[dict[str, object]] = make_prompts(levels, options)[0].to_dict("records")
    return rows


def _with_advantage(sample: TrainSample, number: int) -> TrainSample:
    """The sample with an advantage of its own: random responses earn nothing that could be learnt from."""
    value = np.random.default_rng(number).standard_normal()
    sample.advantages[:] = value
    return sample


def _load(samples: list[TrainSample]) -> Load:
    images = {image.key: image for sample in samples for image in sample.images}
    patches = [int(np.prod(image.grid)) for image in images.values()]
    return Load([sample.length for sample in samples], sum(len(sample.targets) for sample in samples), patches)


def _timed(device: str, work: Callable[[], Result]) -> tuple[float, Result]:
    _wait(device)
    began = time.perf_counter()
    result = work()
    _wait(device)
    return time.perf_counter() - began, result


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _peak_bytes(device: str) -> int:
    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
