"""Backend `fsdp` at world size 1: an optimizer on the policy's own model, without torch.distributed.

A crew may compute parts of the gradients; the step itself is taken here, once, on the weights that all share. A step
whose gradient norm is not finite changes neither weights nor moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from geo_sokoban_pipeline.config.grpo import OptimizerOptions, TrainOptions
from geo_sokoban_pipeline.grpo.loss import Objective, StepSize
from geo_sokoban_pipeline.policies.experts import published_weights, turn_experts
from geo_sokoban_pipeline.policies.policy import Policy, load_as, save_policy
from geo_sokoban_pipeline.runs.policy_folder import PolicyFolder
from geo_sokoban_pipeline.runs.storage import read_json, write_json
from geo_sokoban_pipeline.training.backends.gradients import GradientPass, PassSetting
from geo_sokoban_pipeline.training.backends.optim import Optimizers
from geo_sokoban_pipeline.training.batch import TrainSample
from geo_sokoban_pipeline.training.sharding import cut_samples
from geo_sokoban_pipeline.training.worker import Learn, Part, Score
from geo_sokoban_pipeline.training.worker_group import Crew, sum_metrics

OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "trainer_state.json"


class DivergedError(RuntimeError):
    """Several optimizer steps in a row had no finite gradient."""


class FsdpBackend:
    """`TrainBackend` whose weights and moments are in this process's hands.

    Args:
        policy: trained in place.
        options: optimizer and micro-batches.
        temperature: sampling temperature of the rollouts.
        crew: processes that compute parts of the gradients and log-probs; None: this one computes them alone.

    Attributes:
        optimizers: what moves the weights.
    """

    def __init__(
        self, policy: Policy, options: OptimizerOptions, temperature: float = 1.0, crew: Crew | None = None
    ) -> None:
        self.policy = policy
        self.options = options
        self.crew = crew
        self.setting = PassSetting(temperature, options.max_tokens, options.logit_chunk)
        self.gradient_pass = GradientPass(policy, self.setting)
        self._parameters = dict(policy.model.named_parameters())
        self.optimizers = Optimizers(self._parameters, options)
        self._skipped = 0

    def log_probs(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """See `TrainBackend`."""
        if self.crew is None:
            return self.gradient_pass.log_probs(samples)
        own, *others = cut_samples(samples, self.crew.size)
        jobs = [Score(part, self.setting) for part in others]
        scored: list[list[np.ndarray]] = self.crew.work(lambda: self.gradient_pass.log_probs(own), jobs)
        return [row for part in scored for row in part]

    def step(self, samples: Sequence[TrainSample], objective: Objective, learning_rate: float) -> dict[str, float]:
        """See `TrainBackend`.

        Raises:
            DivergedError: `max_skipped` steps in a row had no finite gradient norm.
        """
        return self.move(self._gradients(samples, objective), learning_rate)

    def move(self, metrics: dict[str, float], learning_rate: float) -> dict[str, float]:
        """One optimizer step along the gradients that lie in the parameters; `metrics` with those of the step.

        Raises:
            DivergedError: see `step`.
        """
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), self.options.clip))
        if math.isfinite(norm):
            self.optimizers.step(learning_rate)
            self._skipped = 0
        else:
            self._skipped += 1
        self.optimizers.clear_gradients()
        if self._skipped >= self.options.max_skipped:
            raise DivergedError(
                f"{self._skipped} optimizer steps in a row had no finite gradient (norm {norm}), "
                f"optimizer.max_skipped={self.options.max_skipped} allowed"
            )
        return {**metrics, "grad_norm": norm, "skipped": float(self._skipped > 0)}

    def iter_weights(self) -> Iterator[tuple[str, Any]]:
        """See `TrainBackend`."""
        for name, parameter in published_weights(self.policy.model):
            yield name, parameter.detach()

    def export(self, folder: Path) -> None:
        """See `TrainBackend`."""
        save_policy(self.policy, folder)

    def save_state(self, folder: Path) -> None:
        """See `TrainBackend`."""
        tensors, steps = self.optimizers.state()
        save_file(tensors, folder / OPTIMIZER_FILE)
        write_json(folder / STATE_FILE, {"optimizer_steps": steps, "skipped_in_a_row": self._skipped})

    def load_state(self, folder: Path) -> None:
        """See `TrainBackend`."""
        self._load_weights(folder)
        numbers = read_json(folder / STATE_FILE)
        self._skipped = int(numbers["skipped_in_a_row"])
        self.optimizers.load_state(load_file(folder / OPTIMIZER_FILE), int(numbers["optimizer_steps"]))

    def close(self) -> None:
        """See `TrainBackend`."""
        self.optimizers.clear_state()

    def _load_weights(self, folder: Path) -> None:
        stored: dict[str, torch.Tensor] = {}
        for path in sorted(folder.glob("model*.safetensors")):
            stored |= load_file(path)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(turn_experts(name, stored[name]))

    def _gradients(self, samples: Sequence[TrainSample], objective: Objective) -> dict[str, float]:
        """Leave the gradients of a step in the parameters; returns the objective's metrics."""
        size = StepSize.of(samples)
        if self.crew is None:
            return self.gradient_pass.accumulate(samples, objective, size)
        own, *others = cut_samples(samples, self.crew.size)
        parts: list[Part] = self.crew.work(
            lambda: Part(self.gradient_pass.accumulate(own, objective, size)),
            [Learn(part, objective, size, self.setting) for part in others],
        )
        self.crew.add_gradients(parts)
        return sum_metrics(parts)


def build_scorer(folder: PolicyFolder, options: TrainOptions) -> Callable[[Sequence[TrainSample]], list[np.ndarray]]:
    """Log-probs of a policy that is not trained, for the KL term."""
    policy = load_as(options.policy, folder.path)
    return FsdpBackend(policy, options.optimizer, options.rollout.sampling.temperature).log_probs
