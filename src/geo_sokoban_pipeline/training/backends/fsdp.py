"""Backend `fsdp` at world size 1: AdamW on the policy's own model, in this process, without torch.distributed.

One optimizer step encodes each distinct picture once: the micro-batches leave their gradients in the picture
features, and one vision pass at the end carries them on. A step whose gradient norm is not finite changes neither
weights nor moments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from geo_sokoban_pipeline.options.training import OptimizerOptions
from geo_sokoban_pipeline.policies.policy import Policy, save_policy
from geo_sokoban_pipeline.policies.vision import ImageFeatures
from geo_sokoban_pipeline.storage import read_json, write_json
from geo_sokoban_pipeline.training.backends.forward import TrainForward
from geo_sokoban_pipeline.training.objectives import Objective
from geo_sokoban_pipeline.training.samples import TrainSample

OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "trainer_state.json"
_MOMENTS = ("exp_avg", "exp_avg_sq")


class DivergedError(RuntimeError):
    """Several optimizer steps in a row had no finite gradient."""


class FsdpBackend:
    """`TrainBackend` of one process.

    Args:
        policy: trained in place.
        options: AdamW and micro-batches.
        temperature: sampling temperature of the rollouts.
    """

    def __init__(self, policy: Policy, options: OptimizerOptions, temperature: float = 1.0) -> None:
        self.policy = policy
        self.options = options
        self.forward = TrainForward(policy, temperature, options.max_tokens, options.logit_chunk)
        self._parameters = dict(policy.model.named_parameters())
        self._optimizer = torch.optim.AdamW(
            list(self._parameters.values()),
            lr=options.learning_rate,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
            fused=True,
        )
        self._skipped = 0

    @torch.no_grad()
    def log_probs(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """See `TrainBackend`."""
        features = self.forward.encode(samples)
        rows: list[np.ndarray] = [np.empty(0, np.float32)] * len(samples)
        for batch in self.forward.plan(samples):
            members = [samples[index] for index in batch]
            values, _, _ = self.forward.log_probs(members, features, entropy=False)
            for row, index in enumerate(batch):
                rows[index] = values[row, : len(samples[index].targets)].float().cpu().numpy()
        return rows

    def step(self, samples: Sequence[TrainSample], objective: Objective, learning_rate: float) -> dict[str, float]:
        """See `TrainBackend`.

        Raises:
            DivergedError: `max_skipped` steps in a row had no finite gradient norm.
        """
        objective.begin(samples)
        metrics = self._accumulate(samples, objective)
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), self.options.clip))
        if math.isfinite(norm):
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
            self._skipped = 0
        else:
            self._skipped += 1
        self._optimizer.zero_grad(set_to_none=True)
        if self._skipped >= self.options.max_skipped:
            raise DivergedError(
                f"{self._skipped} optimizer steps in a row had no finite gradient (norm {norm}), "
                f"optimizer.max_skipped={self.options.max_skipped} allowed"
            )
        return {**metrics, "grad_norm": norm, "skipped": float(self._skipped > 0)}

    def iter_weights(self) -> Iterator[tuple[str, Any]]:
        """See `TrainBackend`."""
        for name, parameter in self._parameters.items():
            yield name, parameter.detach()

    def export(self, folder: Path) -> None:
        """See `TrainBackend`."""
        save_policy(self.policy, folder)

    def save_state(self, folder: Path) -> None:
        """See `TrainBackend`."""
        tensors: dict[str, torch.Tensor] = {}
        steps = 0
        for name, parameter in self._parameters.items():
            state = self._optimizer.state.get(parameter)
            if state:
                steps = int(state["step"])
                tensors |= {f"{moment}.{name}": state[moment].contiguous() for moment in _MOMENTS}
        save_file(tensors, folder / OPTIMIZER_FILE)
        write_json(folder / STATE_FILE, {"optimizer_steps": steps, "skipped_in_a_row": self._skipped})

    def load_state(self, folder: Path) -> None:
        """See `TrainBackend`."""
        self._load_weights(folder)
        moments = load_file(folder / OPTIMIZER_FILE)
        numbers = read_json(folder / STATE_FILE)
        self._skipped = int(numbers["skipped_in_a_row"])
        self._optimizer.state.clear()
        for name, parameter in self._parameters.items():
            if f"{_MOMENTS[0]}.{name}" in moments:
                state = {moment: moments[f"{moment}.{name}"].to(parameter.device) for moment in _MOMENTS}
                step = torch.tensor(float(numbers["optimizer_steps"]), device=parameter.device)
                self._optimizer.state[parameter] = {"step": step, **state}

    def close(self) -> None:
        """See `TrainBackend`."""
        self._optimizer.state.clear()

    def _load_weights(self, folder: Path) -> None:
        stored: dict[str, torch.Tensor] = {}
        for path in sorted(folder.glob("model*.safetensors")):
            stored |= load_file(path)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(stored[name])

    def _accumulate(self, samples: Sequence[TrainSample], objective: Objective) -> dict[str, float]:
        features = self.forward.encode(samples)
        leaves = None if features is None else _leaves(features)
        totals: dict[str, float] = {}
        for batch in self.forward.plan(samples):
            members = [samples[index] for index in batch]
            log_probs, entropy, mask = self.forward.log_probs(members, leaves, entropy=objective.needs_entropy)
            part = objective(members, log_probs, entropy, mask)
            part.loss.backward()
            for name, value in part.metrics.items():
                totals[name] = totals.get(name, 0.0) + value
        if features is not None and leaves is not None:
            _carry_gradients(features, leaves)
        return totals


def _leaves(features: ImageFeatures) -> ImageFeatures:
    """The same features cut off from the vision tower, collecting gradients of their own."""
    return ImageFeatures(
        features.embeddings.detach().requires_grad_(),
        [layer.detach().requires_grad_() for layer in features.deepstack],
        features.offsets,
        features.counts,
    )


def _carry_gradients(features: ImageFeatures, leaves: ImageFeatures) -> None:
    pairs = [
        (tensor, leaf.grad)
        for tensor, leaf in zip(
            [features.embeddings, *features.deepstack], [leaves.embeddings, *leaves.deepstack], strict=True
        )
        if tensor.requires_grad and leaf.grad is not None
    ]
    if pairs:
        torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
