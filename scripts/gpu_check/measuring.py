"""Timing: a rollout, and optimizer steps on sequences of one length, on a clock that waits for the device.

The record of a case is plain JSON. A case whose plan exceeds the memory of device or host is not run, and says so.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import transformers
from model import THIN, build_policy
from PIL import Image
from torch.profiler import ProfilerActivity, profile

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
_HOST_SHARE = 0.8  # of the host's memory: gradients are copied through ordinary memory beside it
_ATTENTION = re.compile(r"flash|fmha|attention|(?<!log_)softmax", re.IGNORECASE)
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
    """A rollout after a small one that warms up.

    Attributes:
        seconds: of the rollout.
        sampled: its tokens.
        warm_up: seconds of the small one.
        attention: kernels of its attention, the longest first.
    """

    seconds: float
    sampled: int
    warm_up: float = 0.0
    attention: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Figures:
    """What was measured of the updates of a case.

    Attributes:
        seconds: of each optimizer step.
        tokens, scored, images: of one step: tokens of the sequences, trained ones, images.
        step_flops: operations of one step, a backward pass counting as two forward passes.
        gradient_norm: of the last step; finite, or the step was none.
        peak_bytes: largest memory: of torch's allocator on a GPU, of the process on a CPU.
        reserved_bytes: that the allocator has taken from a GPU at most; 0 on a CPU.
        log_prob_gap: mean absolute difference of log-probs before the first step from those of `fsdp` with products in
            float32.
        attention: kernels of a further step's attention, the longest first.
    """

    seconds: list[float]
    tokens: int
    scored: int
    images: int
    step_flops: float
    gradient_norm: float
    peak_bytes: int
    reserved_bytes: int = 0
    log_prob_gap: float = 0.0
    attention: list[str] = field(default_factory=list)


class FullResponses(TransformersEngine):
    """The engine, for policies that do not end their responses: one that has reached its limit counts as ended."""

    def poll(self) -> list[EngineResult]:
        """See `TransformersEngine`."""
        return [replace(result, finish_reason="stop") for result in super().poll()]


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The record of a case: what it is, its figures or the reason why there are none, and the memory of its process."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    named = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads of torch"
    work = Work(
        options.episodes, options.turns, options.tokens, options.updates, options.sequences, options.length,
        options.batch_tokens,
    )  # fmt: skip
    small, large = (THIN, THIN) if options.thin else ("2B", options.large)
    case = {
        "plain": Case(small, gradient_checkpointing=False),
        "megatron": Case(small, gradient_checkpointing=True, backend="megatron"),  # one rank
        "offload": Case(large, gradient_checkpointing=True, offload=True),
    }.get(name, Case(small, gradient_checkpointing=True))
    record: dict[str, Any] = {
        "case": name, "device": named, "torch": torch.__version__, "transformers": transformers.__version__,
        "work": asdict(work), "options": asdict(case),
    }  # fmt: skip
    try:
        policy = build_policy(case.name, device, seed=0)
        record["parameters"] = sum(parameter.numel() for parameter in policy.model.parameters())
        if name == "rollout":
            record["played"] = asdict(play(policy, work))
        else:
            planned = plan(policy, case, work)
            record |= {"planned": planned.total, "planned_host": sum(planned.host.values())}
            refuse_too_large(device, **{name: record[name] for name in ("planned", "planned_host")})
            record["figures"] = asdict(train(policy, case, work))
    except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
        record["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    record["host_peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return record


def refuse_too_large(device: str, planned: int, planned_host: int) -> None:
    """Check that a plan fits.

    Raises:
        MemoryError: device or host are too small.
    """
    room = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else None
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if room is not None and planned > room:
        raise MemoryError(f"not run: planned {planned / 1e9:.1f} GB, the device has {room / 1e9:.1f} GB")
    if planned_host > _HOST_SHARE * host:
        raise MemoryError(f"not run: planned {planned_host / 1e9:.1f} GB of host memory, there are {host / 1e9:.1f} GB")


def play(policy: Policy, work: Work) -> Played:
    """One rollout by the engine, after a small one."""
    device, small = policy.model.device.type, replace(work, episodes=2, turns=min(work.turns, 2), tokens=4)
    warm_up, _ = _timed(device, lambda: _roll_out(policy, small))
    seconds, episodes = _timed(device, lambda: _roll_out(policy, work))
    sampled = sum(int(episode.loss_mask.sum()) for episode in episodes)
    return Played(seconds, sampled, warm_up, attention_kernels(device, lambda: _roll_out(policy, small)))


def attention_kernels(device: str, work: Callable[[], object]) -> list[str]:
    """Names of the kernels, on a CPU of the operations, that attention takes in some work; the longest first."""
    with profile(activities=[ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU]) as found:
        work()
        _wait(device)
    spent = {
        one.key: one.self_device_time_total if device == "cuda" else one.self_cpu_time_total
        for one in found.key_averages()
        if _ATTENTION.search(one.key)
    }
    return [name[:80] for name in sorted(spent, key=lambda name: -spent[name])[:3]]


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
        reserved = int(torch.cuda.max_memory_reserved()) if device == "cuda" else 0
        attention = attention_kernels(device, lambda: backend.step(samples, objective, _RATE))
    finally:
        backend.close()
    load = _load(samples)
    flops = 3 * forward_flops(policy.model.config, load)
    return Figures(
        seconds, int(load.tokens), int(load.scored), int(load.images), flops, norm, peak, reserved, gap, attention
    )


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
