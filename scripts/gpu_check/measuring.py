"""Timing: a rollout, and optimizer steps on sequences of one length, on a clock that waits for the device."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np
import torch
from PIL import Image

from geo_sokoban_pipeline.config.grpo import GrpoOptions, MegatronOptions, OptimizerOptions
from geo_sokoban_pipeline.config.rollout import EnvOptions, RewardOptions, RolloutOptions, SamplingOptions
from geo_sokoban_pipeline.envs.sokoban.config import SokobanDataOptions
from geo_sokoban_pipeline.envs.sokoban.data_steps import make_prompts, read_levels
from geo_sokoban_pipeline.envs.sokoban.task import ENV, REWARD, SOKOBAN
from geo_sokoban_pipeline.grpo.loss import GrpoObjective
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.policies.qwen3_vl import extend_positions
from geo_sokoban_pipeline.preflight.estimate import Load, forward_flops
from geo_sokoban_pipeline.preflight.memory import RankPlan, StepLoad, plan_rank
from geo_sokoban_pipeline.preflight.model import ModelShape
from geo_sokoban_pipeline.rollout.engines.base import Result as EngineResult
from geo_sokoban_pipeline.rollout.engines.transformers import TransformersEngine
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.rollout.rollout import rollout
from geo_sokoban_pipeline.training.backend import build_backend
from geo_sokoban_pipeline.training.batch import TrainSample
from geo_sokoban_pipeline.trajectories.types import Trajectory

_GROUP = 4
_RATE = 1e-6
Result = TypeVar("Result")


@dataclass(frozen=True)
class Work:
    """How much is done.

    Attributes:
        episodes, turns, tokens: of the rollout: episodes, responses of each, tokens of a response.
        updates: optimizer steps of each case.
        sequences, length: of a step: number, and tokens of each.
        batch_tokens: padded tokens of a micro-batch.
    """

    episodes: int
    turns: int
    tokens: int
    updates: int
    sequences: int
    length: int
    batch_tokens: int


@dataclass(frozen=True)
class Case:
    """A model and the options that bound the memory of its updates."""

    name: str
    gradient_checkpointing: bool
    offload: bool = False
    backend: Literal["fsdp", "megatron"] = "fsdp"

    @property
    def layout(self) -> MegatronOptions | None:
        """Of Megatron's ranks, here one; None with another backend."""
        return MegatronOptions() if self.backend == "megatron" else None

    def optimizer(self, work: Work) -> OptimizerOptions:
        """Options of its optimizer."""
        return OptimizerOptions(
            learning_rate=_RATE, max_tokens=work.batch_tokens, logit_chunk=2048, vision_patches=8192, clip=1.0,
            weight_decay=0.1, gradient_checkpointing=self.gradient_checkpointing, offload=self.offload,
            gradient_sync="micro_batch" if self.offload else "step",
        )  # fmt: skip


@dataclass(frozen=True)
class Played:
    """A rollout: its seconds, and tokens that were sampled in it."""

    seconds: float
    sampled: int


@dataclass(frozen=True)
class Figures:
    """What was measured of the updates of a case.

    Attributes:
        seconds: of each optimizer step.
        tokens, scored, images: of one step: tokens of the sequences, trained ones, images.
        step_flops: operations of one step, a backward pass counting as two forward passes.
        gradient_norm: of the last step; finite, or the step was none.
        peak_bytes: largest memory: of torch's allocator on a GPU, of the process on a CPU.
        log_prob_gap: mean absolute difference of log-probs before the first step from those of `fsdp` with products in
            float32.
    """

    seconds: list[float]
    tokens: int
    scored: int
    images: int
    step_flops: float
    gradient_norm: float
    peak_bytes: int
    log_prob_gap: float = 0.0


class FullResponses(TransformersEngine):
    """The engine, for policies that do not end their responses: one that has reached its limit counts as ended."""

    def poll(self) -> list[EngineResult]:
        """See `TransformersEngine`."""
        return [replace(result, finish_reason="stop") for result in super().poll()]


def play(policy: Policy, work: Work) -> Played:
    """One rollout by the engine."""
    seconds, episodes = _timed(policy.model.device.type, lambda: _roll_out(policy, work))
    return Played(seconds, sum(int(episode.loss_mask.sum()) for episode in episodes))


def train(policy: Policy, case: Case, work: Work) -> Figures:
    """The updates of a case.

    Raises:
        RuntimeError: an optimizer step had no finite gradient.
    """
    device = policy.model.device.type
    samples = [_sequence(policy, work.length, number) for number in range(work.sequences)]
    exact = build_backend(replace(policy, compute=None), Case(case.name, True).optimizer(work)).log_probs(samples)
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    backend = build_backend(policy, case.optimizer(work), megatron=case.layout)
    scored = backend.log_probs(samples)
    gap = float(np.abs(np.concatenate(scored) - np.concatenate(exact)).mean())
    objective = GrpoObjective(GrpoOptions(reduction="sample_mean", advantage="grpo", entropy_coefficient=0.0))
    seconds, norm = [], 0.0
    try:
        for _ in range(work.updates):
            spent, metrics = _timed(device, lambda: backend.step(samples, objective, _RATE))
            if metrics["skipped"]:
                raise RuntimeError("an optimizer step had no finite gradient")
            seconds.append(spent)
            norm = metrics["grad_norm"]
        peak = _peak_bytes(device)
    finally:
        backend.close()
    load = _load(samples)
    flops = 3 * forward_flops(policy.model.config, load)
    return Figures(seconds, int(load.tokens), int(load.scored), int(load.images), flops, norm, peak, gap)


def plan(policy: Policy, case: Case, work: Work) -> RankPlan:
    """What the pre-flight plans for the updates of a case."""
    options = SOKOBAN.train_config.model_validate({
        "policy": {"compute": policy.compute}, "optimizer": case.optimizer(work).model_dump(),
        "warm_start": {"steps": 0}, "backend": case.backend,
    })  # fmt: skip
    load = _load([_sequence(policy, work.length, number) for number in range(work.sequences)])
    rows = max(1, work.batch_tokens // work.length)
    patches = int(load.images * load.patches)
    merged = patches // policy.model.config.vision_config.spatial_merge_size**2
    step = StepLoad(
        tokens=rows * work.length,
        passes=-(-work.sequences // rows),
        patches=patches,
        largest=int(load.patches),
        image_tokens=merged,
    )
    shape = ModelShape.of(options.policy, policy.model.config)
    found = plan_rank(options, shape, step, on_gpu=policy.model.device.type == "cuda")
    if case.offload or case.backend == "megatron":
        # A run reads the weights from a folder. Here the policy that rolled out stays where it is, in its own type.
        found.held["weights of the engine"] = shape.value_bytes * shape.parameters
    return found


def _sequence(policy: Policy, length: int, number: int) -> TrainSample:
    """A sequence with one image, of whose random tokens the second half is trained."""
    rng = np.random.default_rng(number)
    image = policy.reader.read(Image.fromarray(rng.integers(0, 256, (384, 384, 3), np.uint8)))
    pads = int(np.prod(image.grid)) // policy.model.config.vision_config.spatial_merge_size**2
    ids = rng.integers(0, 200, length)
    ids[1 : 1 + pads] = policy.codec.image_pad_id
    positions, _ = extend_positions(ids, [image.grid], policy.codec.image_pad_id, 2)
    targets = np.arange(max(1 + pads, length // 2), length)
    values = {
        name: np.full(len(targets), -1, np.float32) for name in ("old_log_probs", "rollout_log_probs", "ref_log_probs")
    }
    advantages = np.full(len(targets), rng.standard_normal(), np.float32)
    return TrainSample(ids, positions, targets, ids[targets], [image], advantages=advantages, **values)


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


def _load(samples: list[TrainSample]) -> Load:
    grids = {image.key: image.grid for sample in samples for image in sample.images}
    (patches,) = {int(np.prod(grid)) for grid in grids.values()}  # the images are of one size
    pieces = [(sample.length, 0) for sample in samples]
    return Load(pieces, sum(len(sample.targets) for sample in samples), patches, len(grids))


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
