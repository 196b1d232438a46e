"""A worker: one rank of a run, in a process beside the driver, with a copy of the policy or its part of it.

A job is a picklable value that carries all its inputs. Between jobs a worker holds only its policy, its engine, its
backend and the demonstrator that `SetDemonstrations` gave it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.distributed.group import LOOPBACK, Group, Meeting, join_group
from geo_sokoban_pipeline.policies.policy import Policy, device_of, empty_model, freeze_parameters
from geo_sokoban_pipeline.rollout.engines.base import RolloutEngine
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.rollout.rollout import load_rollout_fn
from geo_sokoban_pipeline.training.demonstrations import Demonstrator
from geo_sokoban_pipeline.training.runtime import collect_garbage, freeze_survivors, prepare_process
from geo_sokoban_pipeline.trajectories.types import Trajectory


class Worker:
    """State of a rank's process, which every job receives.

    Attributes:
        policy: this rank's own.
        options: of the run.
        group: the ranks; None before `JoinGroup`.
        expert: makes demonstrations; None before `SetDemonstrations`.
        backend: this rank's part of the training backend; None before the driver builds one.
        scorer: this rank's part of a reference policy; None before the driver builds one.
        meeting: where the others find rank 0; None on other ranks, and where the driver is rank 0.
    """

    def __init__(self, policy: Policy, options: TrainOptions) -> None:
        self.policy, self.options = policy, options
        self.group: Group | None = None
        self.expert: Demonstrator | None = None
        self.backend: Any = None
        self.scorer: Any = None
        self.meeting: Meeting | None = None

    @cached_property
    def engine(self) -> RolloutEngine:
        """This process's own engine, built at its first use."""
        return build_engine(self.policy, self.options.rollout)


@dataclass(frozen=True)
class Blueprint:
    """What a rank builds its worker from; the weights come from rank 0 when it joins the group.

    Attributes:
        config: configuration of the model.
        generation_config: of the model.
        attention, dtype: those of the driver's model.
        threads: of torch.
        folder: of the policy; None: built in memory.
        is_empty: whether the policy has no weights, so that the rank reads its part from the folder.
    """

    config: Any
    generation_config: Any
    attention: str
    dtype: torch.dtype
    tokenizer: Any
    image_processor: Any
    options: TrainOptions
    threads: int
    folder: Path | None
    is_empty: bool

    @classmethod
    def of(cls, policy: Policy, options: TrainOptions) -> Blueprint:
        """Of the driver's policy, with as many threads as the driver has."""
        model = policy.model
        return cls(
            model.config,
            model.generation_config,
            model.config._attn_implementation,
            model.dtype,
            policy.tokenizer,
            policy.image_processor,
            options,
            torch.get_num_threads(),
            policy.folder,
            policy.is_empty,
        )

    def __call__(self) -> Worker:
        """Build the worker, in its process."""
        prepare_process(self.threads)
        worker = Worker(self.build_policy(), self.options)
        freeze_survivors()
        return worker

    def build_policy(self) -> Policy:
        """The worker's policy, without the driver's weights yet."""
        from transformers import AutoModelForImageTextToText

        if self.is_empty:
            model = empty_model(self.config, self.attention, self.dtype, self.generation_config)
        else:
            model = AutoModelForImageTextToText.from_config(
                self.config, attn_implementation=self.attention, dtype=self.dtype
            ).eval()
            model.generation_config = self.generation_config  # end tokens
        chosen = self.options.policy
        freeze_parameters(model, chosen.freeze)
        planned = device_of(chosen) if self.is_empty else None
        return Policy(model, self.tokenizer, self.image_processor, self.folder, chosen.compute, planned)


@dataclass(frozen=True)
class OpenMeeting:
    """Serve the store through which the ranks find each other, on rank 0; returns its port."""

    size: int
    host: str

    def __call__(self, worker: Worker) -> int:
        """Run in a worker."""
        worker.meeting = Meeting(self.size, self.host)
        return worker.meeting.port


@dataclass(frozen=True)
class JoinGroup:
    """Join the group of all ranks, and take over the weights of rank 0, unless its policy is empty.

    Attributes:
        host, port: of rank 0's store.
        address: of this rank's machine; None: all ranks are on one.
    """

    rank: int
    size: int
    port: int
    is_empty: bool
    device: str = "cpu"
    host: str = LOOPBACK
    address: str | None = None

    def __call__(self, worker: Worker) -> None:
        """Run in a worker."""
        if worker.meeting is not None:
            worker.group = worker.meeting.join(self.size, self.device, self.address)
        else:
            worker.group = join_group(self.rank, self.size, self.port, self.device, self.host, self.address)
        if not self.is_empty:
            worker.policy.model.to(self.device)
            worker.group.broadcast(model_tensors(worker.policy.model))


@dataclass(frozen=True)
class UpdateWeights:
    """Drop everything computed with earlier weights; the weights now have this version."""

    version: int

    def __call__(self, worker: Worker) -> None:
        """Run in a worker."""
        worker.engine.update_weights(None, self.version)
        collect_garbage(self.version)


@dataclass(frozen=True)
class Rollout:
    """Roll out episodes; returns their trajectories, in order."""

    tasks: Sequence[EpisodeRequest]
    settings: RolloutSettings

    def __call__(self, worker: Worker) -> list[Trajectory]:
        """Run in a worker."""
        rollout_fn = load_rollout_fn(self.settings.rollout)
        return rollout_fn(worker.engine, worker.policy, self.tasks, self.settings)


@dataclass(frozen=True)
class SetDemonstrations:
    """Give the worker a `Demonstrator` of these prompts; the steps of a warm start draw from it."""

    prompts: Sequence[dict[str, Any]]
    seed: int
    purpose: str

    def __call__(self, worker: Worker) -> None:
        """Run in a worker."""
        worker.expert = Demonstrator(self.prompts, worker.policy, worker.options, self.seed, self.purpose)


def model_tensors(model: Any) -> list[torch.Tensor]:
    """Parameters and buffers of a model, tied ones once, in an order that is the same on every rank."""
    return [*(parameter.data for parameter in model.parameters()), *model.buffers()]
