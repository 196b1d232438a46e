"""A worker: a process beside the driver that runs jobs on weights in shared memory.

A job is a picklable value that carries all its inputs. Between jobs a worker holds only its policy, its engine and the
demonstrator that `SetDemonstrations` gave it.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Any

import torch

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.policies.policy import Policy, freeze_parameters
from geo_sokoban_pipeline.rollout.engines.base import RolloutEngine
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.rollout.rollout import load_rollout_fn
from geo_sokoban_pipeline.training.demonstrations import Demonstrator
from geo_sokoban_pipeline.training.runtime import collect_garbage, freeze_survivors, prepare_process
from geo_sokoban_pipeline.training.shared_tensors import SharedTensors, adopt_tensors
from geo_sokoban_pipeline.trajectories.types import Trajectory


@dataclass(frozen=True)
class UpdateWeights:
    """Drop everything computed with earlier weights; the shared weights now have this version."""

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
    """Give the worker a `Demonstrator` of these prompts; later `SftGradients` jobs draw from it."""

    prompts: Sequence[dict[str, Any]]
    seed: int
    purpose: str

    def __call__(self, worker: Worker) -> None:
        """Run in a worker."""
        worker.expert = Demonstrator(self.prompts, worker.policy, worker.options, self.seed, self.purpose)


@dataclass(frozen=True)
class Blueprint:
    """What a worker builds its policy from.

    Attributes:
        config: configuration of the model.
        attention, dtype: those of the driver's model.
        weights: parameters and buffers, shared.
    """

    config: Any
    attention: str
    dtype: torch.dtype
    tokenizer: Any
    image_processor: Any
    weights: SharedTensors

    def build(self) -> Policy:
        """Build the policy; its model uses the shared weights in place."""
        from transformers import AutoModelForImageTextToText

        model = AutoModelForImageTextToText.from_config(
            self.config, attn_implementation=self.attention, dtype=self.dtype
        )
        adopt_tensors(model, self.weights)
        return Policy(model.eval(), self.tokenizer, self.image_processor)


class Worker:
    """State of a worker process, which every job receives.

    Attributes:
        policy: on the shared weights.
        options: of the run.
        expert: makes demonstrations; None before `SetDemonstrations`.
    """

    def __init__(self, policy: Policy, options: TrainOptions, gradients: SharedTensors) -> None:
        self.policy, self.options = policy, options
        self.expert: Demonstrator | None = None
        self._gradients = gradients.views()

    @cached_property
    def engine(self) -> RolloutEngine:
        """This process's own engine, built at its first use."""
        return build_engine(self.policy, self.options.rollout)

    def export_gradients(self) -> list[str]:
        """Move the parameters' gradients into the shared buffer; returns the names of those that have one."""
        names = []
        for name, parameter in self.policy.model.named_parameters():
            if parameter.grad is not None:
                self._gradients[name].copy_(parameter.grad)
                parameter.grad = None
                names.append(name)
        return names


Job = Callable[[Worker], Any]


@dataclass(frozen=True)
class Done:
    """A job's result, and the CPU-seconds of all jobs of this worker so far."""

    result: Any
    cpu_seconds: float


@dataclass(frozen=True)
class Failed:
    """The traceback of a failed job, as text."""

    text: str


def serve(
    pipe: Connection, blueprint: Blueprint, options: TrainOptions, gradients: SharedTensors, threads: int
) -> None:
    """A worker's main function: run the jobs that arrive on a pipe, send one answer each, return when it closes."""
    # Ctrl-C reaches every process of a terminal; only the driver handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        prepare_process(threads)
        policy = blueprint.build()
        policy.compute = options.policy.compute
        freeze_parameters(policy.model, options.policy.freeze)
        worker = Worker(policy, options, gradients)
        freeze_survivors()
        began = time.process_time()
        while True:
            job: Job = pipe.recv()
            answer: Done | Failed
            try:
                answer = Done(job(worker), time.process_time() - began)
            except Exception:  # the driver raises it again
                answer = Failed(traceback.format_exc())
            pipe.send(answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the driver has closed the pipe or ended
    except Exception:  # a policy that cannot be built, a result that cannot be sent
        pipe.send(Failed(traceback.format_exc()))
