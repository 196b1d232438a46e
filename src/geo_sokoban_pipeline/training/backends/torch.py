"""The torch backend: micro-batches, gradients and the optimizer step on the policy's own model.

A step accumulates its gradients in the parameters, in this process or in a worker group; then the optimizer moves the
weights once. A step whose gradient norm is not finite changes neither weights nor moments.

Micro-batches hold samples of similar lengths, and logits are computed at trained positions only. Right padding needs no
mask, because causal attention never sees later tokens. Features of images accumulate the gradients of all micro-batches
before they pass on to the vision tower. Selections use `index_select`, whose backward pass is deterministic on several
threads, unlike that of `x[index]`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from geo_sokoban_pipeline.config.grpo import OptimizerOptions
from geo_sokoban_pipeline.grpo.batching import plan_micro_batches
from geo_sokoban_pipeline.grpo.loss import (
    EntropyUse,
    Objective,
    StepSize,
    score_states,
    token_log_probs,
    token_log_probs_and_entropy,
)
from geo_sokoban_pipeline.grpo.loss import entropy as token_entropy
from geo_sokoban_pipeline.policies.experts import published_weights, transpose_experts
from geo_sokoban_pipeline.policies.patches import EncodedImage
from geo_sokoban_pipeline.policies.policy import Policy, save_policy
from geo_sokoban_pipeline.policies.qwen3_vl import ImageFeatures, cut_images
from geo_sokoban_pipeline.runs.storage import read_json, write_json
from geo_sokoban_pipeline.training.backends.base import Batch, DivergedError
from geo_sokoban_pipeline.training.backends.optim import Optimizers
from geo_sokoban_pipeline.training.batch import TrainSample
from geo_sokoban_pipeline.training.demonstrations import Demonstrations, Demonstrator
from geo_sokoban_pipeline.training.sharding import shard_range, shard_samples
from geo_sokoban_pipeline.training.worker import Worker
from geo_sokoban_pipeline.training.worker_group import Part, WorkerGroup, sum_metrics

OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "trainer_state.json"


class TorchBackend:
    """`TrainBackend` that keeps weights and moments in this process.

    Args:
        policy: trained in place.
        options: optimizer and micro-batches.
        temperature: sampling temperature of the rollouts.
        workers: worker group that computes parts of the gradients and log-probs; None: this process computes all.

    Attributes:
        optimizers: what moves the weights.
    """

    def __init__(
        self, policy: Policy, options: OptimizerOptions, temperature: float = 1.0, workers: WorkerGroup | None = None
    ) -> None:
        self.policy = policy
        self.options = options
        self._workers = workers
        self._setting = PassSetting.of(options, temperature)
        self._pass = GradientPass(policy, self._setting)
        self._parameters = dict(policy.model.named_parameters())
        self._trained = {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}
        self.optimizers = Optimizers(self._trained, options)
        self._skipped = 0

    def log_probs(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """See `TrainBackend`."""
        if self._workers is None:
            return self._pass.log_probs(samples)
        own, *others = shard_samples(samples, self._workers.size)
        jobs = [LogProbs(part, self._setting) for part in others]
        scored: list[list[np.ndarray]] = self._workers.run(lambda: self._pass.log_probs(own), jobs)
        return [row for part in scored for row in part]

    def step(self, batch: Batch, objective: Objective, learning_rate: float) -> dict[str, float]:
        """See `TrainBackend`."""
        # Each branch leaves the gradients of the whole step in the parameters.
        if isinstance(batch, Demonstrations):
            metrics = self._sft_gradients(batch, objective)
        elif self._workers is None:
            metrics = self._pass.accumulate(batch, objective, StepSize.of(batch))
        else:
            metrics = self._sharded_gradients(batch, objective, self._workers)
        norm = float(torch.nn.utils.clip_grad_norm_(self._trained.values(), self.options.clip))
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
                parameter.copy_(transpose_experts(name, stored[name]))

    def _sharded_gradients(
        self, samples: Sequence[TrainSample], objective: Objective, workers: WorkerGroup
    ) -> dict[str, float]:
        """Gradients of samples, sharded over the processes; returns the objective's metrics."""
        size = StepSize.of(samples)
        own, *others = shard_samples(samples, workers.size)
        parts: list[Part] = workers.run(
            lambda: Part(self._pass.accumulate(own, objective, size)),
            [Gradients(part, objective, size, self._setting) for part in others],
        )
        workers.add_gradients(parts)
        return sum_metrics(parts)

    def _sft_gradients(self, batch: Demonstrations, objective: Objective) -> dict[str, float]:
        """Gradients of demonstrations; each process makes the ones it trains on. Returns the objective's metrics."""
        if self._workers is None:
            return accumulate_demonstrations(batch.numbers, batch.demonstrator, objective, self._pass).metrics
        own, *others = shard_range(batch.numbers, self._workers.size)
        parts: list[Part] = self._workers.run(
            lambda: accumulate_demonstrations(own, batch.demonstrator, objective, self._pass),
            [SftGradients(part, objective, self._setting) for part in others],
        )
        # Each part is a mean over its own tokens: the token count of the step is known only once all have answered.
        tokens = sum(part.tokens for part in parts)
        weights = [part.tokens / tokens for part in parts]
        self._workers.add_gradients(parts, weights)
        return sum_metrics(parts, weights)


@dataclass(frozen=True)
class PassSetting:
    """Settings of a forward pass over training samples.

    Attributes:
        temperature: sampling temperature of the rollouts; divides the logits as in sampling.
        max_tokens: padded tokens of a micro-batch.
        logit_chunk: trained positions whose logits are held at once.
        vision_patches: patches that pass the vision tower with one graph. None: all of the samples.
        gradient_checkpointing: keep the inputs of layers alone for the backward pass.
    """

    temperature: float
    max_tokens: int
    logit_chunk: int
    vision_patches: int | None = None
    gradient_checkpointing: bool = False

    @classmethod
    def of(cls, options: OptimizerOptions, temperature: float) -> PassSetting:
        """Settings from optimizer options."""
        return cls(
            temperature,
            options.max_tokens,
            options.logit_chunk,
            options.vision_patches,
            options.gradient_checkpointing,
        )


class GradientPass:
    """Computes log-probs of trained tokens, and accumulates gradients of an objective in the policy's parameters."""

    def __init__(self, policy: Policy, setting: PassSetting) -> None:
        self.policy, self.setting = policy, setting
        dropout = getattr(policy.model.config.text_config, "attention_dropout", 0.0)
        if dropout:
            raise ValueError(
                f"attention_dropout={dropout} in the model's config.json: equal runs would drop other values, and so "
                "would the two passes of gradient checkpointing. Set it to 0.0 there."
            )
        self._device = policy.model.device
        self._banned = torch.from_numpy(policy.banned_ids).to(self._device)
        self._trains_vision = any(parameter.requires_grad for parameter in policy.network.vision.parameters())

    @torch.no_grad()
    def log_probs(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """(M,) float32 log-probs of each sample's trained tokens."""
        features = self._encode(self._images(samples))
        rows: list[np.ndarray] = [np.empty(0, np.float32)] * len(samples)
        for batch in self._plan(samples):
            members = [samples[index] for index in batch]
            values, _, _ = self._score(members, features, entropy="none")
            for row, index in enumerate(batch):
                rows[index] = values[row, : len(samples[index].targets)].float().cpu().numpy()
        return rows

    def accumulate(self, samples: Sequence[TrainSample], objective: Objective, step: StepSize) -> dict[str, float]:
        """Add the gradients of some samples of a step; returns the objective's metrics, summed over micro-batches."""
        network = self.policy.network.train()
        try:
            parts = self._images(samples)
            # One pass of the tower keeps its graph until the micro-batches are through. The graphs of several would
            # take too much memory together: each pass is made again, when the gradients of its features are known.
            whole = len(parts) == 1
            with torch.set_grad_enabled(whole):
                features = self._encode(parts)
            shown = features
            if features is not None and self._trains_vision:
                # Detached from the tower, they accumulate the gradients of all micro-batches.
                shown = replace(features, tables=[table.detach().requires_grad_() for table in features.tables])
            totals: dict[str, float] = {}
            for batch in self._plan(samples):
                members = [samples[index] for index in batch]
                scored = self._score(members, shown, entropy=objective.entropy)
                part = objective(members, *scored, step)
                part.loss.backward()
                for name, value in part.metrics.items():
                    totals[name] = totals.get(name, 0.0) + value
            if shown is not None and self._trains_vision:
                encoded = [features] if whole else (self._encode([part]) for part in parts)
                _train_tower(encoded, [table.grad for table in shown.tables])
            return totals
        finally:
            network.eval()

    def _plan(self, samples: Sequence[TrainSample]) -> list[list[int]]:
        return plan_micro_batches([sample.length for sample in samples], self.setting.max_tokens)

    def _images(self, samples: Sequence[TrainSample]) -> list[list[EncodedImage]]:
        """The distinct images of samples, in parts that pass the vision tower together; none without images."""
        images = {image.key: image for sample in samples for image in sample.images}
        return cut_images(list(images.values()), self.setting.vision_patches) if images else []

    def _encode(self, parts: Sequence[Sequence[EncodedImage]]) -> ImageFeatures | None:
        """Features of images; None without images."""
        if not parts:
            return None
        checkpointing = self._checkpoints()
        with self.policy.computing():
            return ImageFeatures.join([self.policy.network.encode(part, checkpointing=checkpointing) for part in parts])

    def _checkpoints(self) -> bool:
        """Whether layers of the pass that is about to begin are run again in a backward pass."""
        return self.setting.gradient_checkpointing and torch.is_grad_enabled()

    def _score(
        self, samples: Sequence[TrainSample], features: ImageFeatures | None, *, entropy: EntropyUse
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T) log-probs, entropies (zeros if not asked for) and bool mask of trained tokens, packed to the left."""
        counts = [len(sample.targets) for sample in samples]
        width, count = max(sample.length for sample in samples), max(counts)
        ids = np.zeros((len(samples), width), np.int64)
        positions = np.zeros((3, len(samples), width), np.int64)
        wanted = np.empty((len(samples), count), np.int64)
        for row, sample in enumerate(samples):
            # States that predict the trained tokens; a shorter row is filled with its first one.
            wanted[row] = sample.targets[0] - 1
            wanted[row, : len(sample.targets)] = sample.targets - 1
            ids[row, : sample.length] = sample.input_ids
            positions[:, row, : sample.length] = sample.positions
        places = np.concatenate([np.arange(own) + row * count for row, own in enumerate(counts)])
        target = torch.from_numpy(places).to(self._device)
        labels = torch.from_numpy(np.concatenate([sample.labels for sample in samples])).to(self._device)

        def read_out(states: Tensor, head: nn.Module) -> tuple[Tensor, Tensor]:
            return self._read_out(states.flatten(0, 1).index_select(0, target), labels, head, entropy)

        keys = [image.key for sample in samples for image in sample.images]
        shown = {}
        if keys and features is not None:
            rows = torch.from_numpy(features.rows(keys)).to(self._device)
            shown = {"features": features.tables, "rows": rows}
        with self.policy.computing():
            values, entropies = self.policy.network(
                torch.from_numpy(ids).to(self._device),
                torch.from_numpy(positions).to(self._device),
                wanted=torch.from_numpy(wanted).to(self._device),
                head=read_out,
                checkpointing=self._checkpoints(),
                **shown,
            )
        empty = values.new_zeros(len(samples) * count)
        mask = torch.zeros_like(empty, dtype=torch.bool).index_fill(0, target, True)
        packed = empty.index_copy(0, target, values), empty.index_copy(0, target, entropies), mask
        shape = (len(samples), count)
        return packed[0].view(shape), packed[1].view(shape), packed[2].view(shape)

    def _read_out(self, states: Tensor, labels: Tensor, head: nn.Module, use: EntropyUse) -> tuple[Tensor, Tensor]:
        """(M,) log-probs of the labels and entropies after (M, hidden) states."""
        chunk, banned = self.setting.logit_chunk, self._banned
        temperature = self.setting.temperature
        # `score_states` holds two copies of a chunk's logits, the code below six of all logits: it is cheaper in memory
        # where these are at most a third of a chunk.
        if 3 * len(states) > chunk:
            weight: Tensor = head.weight
            return score_states(
                states, weight, labels, chunk=chunk, temperature=temperature, banned_ids=banned, entropy=use
            )
        # Nothing is computed twice here.
        logits = head(states)
        if use == "trained":
            return token_log_probs_and_entropy(logits, labels, temperature=temperature, banned_ids=banned)
        values = token_log_probs(logits, labels, temperature=temperature, banned_ids=banned)
        with torch.no_grad():
            return values, torch.zeros_like(values) if use == "none" else token_entropy(logits, banned_ids=banned)


def _train_tower(parts: Iterable[ImageFeatures | None], gradients: Sequence[Tensor | None]) -> None:
    """One backward pass through the vision tower per part of the features, given the gradients of all of them."""
    first = 0
    for features in parts:
        assert features is not None
        end = first + len(features.tables[0])
        pairs = [
            (table, gradient[first:end])
            for table, gradient in zip(features.tables, gradients, strict=True)
            if table.requires_grad and gradient is not None
        ]
        if pairs:
            torch.autograd.backward([table for table, _ in pairs], [gradient for _, gradient in pairs])
        first = end


@dataclass(frozen=True)
class LogProbs:
    """Log-probs of the samples' trained tokens."""

    samples: Sequence[TrainSample]
    setting: PassSetting

    def __call__(self, worker: Worker) -> list[np.ndarray]:
        """Run in a worker."""
        return GradientPass(worker.policy, self.setting).log_probs(self.samples)


@dataclass(frozen=True)
class Gradients:
    """Gradients of some samples of a step, left in the worker's shared buffer."""

    samples: Sequence[TrainSample]
    objective: Objective
    step: StepSize
    setting: PassSetting

    def __call__(self, worker: Worker) -> Part:
        """Run in a worker."""
        metrics = GradientPass(worker.policy, self.setting).accumulate(self.samples, self.objective, self.step)
        return Part(metrics, names=tuple(worker.export_gradients()))


@dataclass(frozen=True)
class SftGradients:
    """Gradients of numbered demonstrations, as a mean over their own tokens; needs `SetDemonstrations` before."""

    numbers: range
    objective: Objective
    setting: PassSetting

    def __call__(self, worker: Worker) -> Part:
        """Run in a worker."""
        assert worker.expert is not None
        part = accumulate_demonstrations(
            self.numbers, worker.expert, self.objective, GradientPass(worker.policy, self.setting)
        )
        return Part(part.metrics, part.tokens, tuple(worker.export_gradients()))


def accumulate_demonstrations(
    numbers: range, expert: Demonstrator, objective: Objective, gradients: GradientPass
) -> Part:
    """Make demonstrations and accumulate their gradients in the parameters, as a mean over their own tokens."""
    samples = [expert.demonstrate(number) for number in numbers]
    size = StepSize.of(samples)
    return Part(gradients.accumulate(samples, objective, size), size.tokens)
