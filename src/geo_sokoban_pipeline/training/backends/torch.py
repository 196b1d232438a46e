"""Backend of torch: an optimizer on the policy's own model, in one process, without torch.distributed.

A worker group may compute parts of the gradients; the step itself is taken here, once, on the weights that all share. A
step whose gradient norm is not finite changes neither weights nor moments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from geo_sokoban_pipeline.config.grpo import OptimizerOptions
from geo_sokoban_pipeline.grpo.loss import Objective, StepSize
from geo_sokoban_pipeline.policies.experts import published_weights, turn_experts
from geo_sokoban_pipeline.policies.policy import Policy, save_policy
from geo_sokoban_pipeline.runs.storage import read_json, write_json
from geo_sokoban_pipeline.training.backends.base import Batch, DivergedError
from geo_sokoban_pipeline.training.backends.gradients import GradientPass, PassSetting
from geo_sokoban_pipeline.training.backends.optim import Optimizers
from geo_sokoban_pipeline.training.batch import TrainSample
from geo_sokoban_pipeline.training.demonstrations import Demonstrations
from geo_sokoban_pipeline.training.sharding import cut_range, cut_samples
from geo_sokoban_pipeline.training.worker import Learn, Part, Score, SftGradients, accumulate_demonstrations
from geo_sokoban_pipeline.training.worker_group import WorkerGroup, sum_metrics

OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "trainer_state.json"


class TorchBackend:
    """`TrainBackend` whose weights and moments are in this process's hands.

    Args:
        policy: trained in place.
        options: optimizer and micro-batches.
        temperature: sampling temperature of the rollouts.
        worker group: processes that compute parts of the gradients and log-probs; None: this one computes them alone.

    Attributes:
        optimizers: what moves the weights.
    """

    def __init__(
        self, policy: Policy, options: OptimizerOptions, temperature: float = 1.0, workers: WorkerGroup | None = None
    ) -> None:
        self.policy = policy
        self.options = options
        self._workers = workers
        self._setting = PassSetting(temperature, options.max_tokens, options.logit_chunk)
        self._pass = GradientPass(policy, self._setting)
        self._parameters = dict(policy.model.named_parameters())
        self.optimizers = Optimizers(self._parameters, options)
        self._skipped = 0

    def log_probs(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """See `TrainBackend`."""
        if self._workers is None:
            return self._pass.log_probs(samples)
        own, *others = cut_samples(samples, self._workers.size)
        jobs = [Score(part, self._setting) for part in others]
        scored: list[list[np.ndarray]] = self._workers.work(lambda: self._pass.log_probs(own), jobs)
        return [row for part in scored for row in part]

    def step(self, batch: Batch, objective: Objective, learning_rate: float) -> dict[str, float]:
        """See `TrainBackend`."""
        # The gradients of the whole step come to lie in the parameters.
        if isinstance(batch, Demonstrations):
            metrics = self._demonstrated(batch, objective)
        elif self._workers is None:
            metrics = self._pass.accumulate(batch, objective, StepSize.of(batch))
        else:
            metrics = self._gradients_of_all(batch, objective, self._workers)
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
        save_policy(self.policy, folder, dict(self.iter_weights()))

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

    def _gradients_of_all(
        self, samples: Sequence[TrainSample], objective: Objective, workers: WorkerGroup
    ) -> dict[str, float]:
        """Gradients of samples, cut among the processes; returns the objective's metrics."""
        size = StepSize.of(samples)
        own, *others = cut_samples(samples, workers.size)
        parts: list[Part] = workers.work(
            lambda: Part(self._pass.accumulate(own, objective, size)),
            [Learn(part, objective, size, self._setting) for part in others],
        )
        workers.add_gradients(parts)
        return sum_metrics(parts)

    def _demonstrated(self, batch: Demonstrations, objective: Objective) -> dict[str, float]:
        """Gradients of demonstrations; each process makes those that it trains on."""
        if self._workers is None:
            return accumulate_demonstrations(batch.numbers, batch.demonstrator, objective, self._pass).metrics
        own, *others = cut_range(batch.numbers, self._workers.size)
        parts: list[Part] = self._workers.work(
            lambda: accumulate_demonstrations(own, batch.demonstrator, objective, self._pass),
            [SftGradients(part, objective, self._setting) for part in others],
        )
        # Each part is a mean over its own tokens; how many the others have is known at the end alone.
        tokens = sum(part.tokens for part in parts)
        shares = [part.tokens / tokens for part in parts]
        self._workers.add_gradients(parts, shares)
        return sum_metrics(parts, shares)
