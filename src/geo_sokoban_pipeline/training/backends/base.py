"""The protocol of training backends, which turn samples and an objective into new weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from geo_sokoban_pipeline.grpo.loss import Objective
from geo_sokoban_pipeline.policies.weights import WeightSource
from geo_sokoban_pipeline.runs.storage import Files
from geo_sokoban_pipeline.training.batch import TrainSample
from geo_sokoban_pipeline.training.demonstrations import Demonstrations

Batch = Sequence[TrainSample] | Demonstrations

MOST_SKIPPED = 3  # optimizer steps in a row without a finite gradient norm, after which a run stops


class DivergedError(RuntimeError):
    """Several optimizer steps in a row had no finite gradient."""


class TrainBackend(Protocol):
    """The interface that SFT, GRPO, the pre-flight and the stored pipelines train with; `build_backend` makes one."""

    def log_probs(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """(M,) float32 log-probs of each sample's trained tokens, under temperature and banned ids, no gradient."""

    def base_log_probs(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """The same of the policy without its adapter."""

    def step(self, batch: Batch, objective: Objective, learning_rate: float) -> dict[str, float]:
        """One optimizer step on samples, or on demonstrations that each process makes itself.

        Returns:
            Metrics of the objective, `grad_norm`, and `skipped`: 1.0 if the norm was not finite and nothing changed.

        Raises:
            DivergedError: `MOST_SKIPPED` steps in a row had no finite gradient norm.
        """

    def iter_weights(self) -> Iterator[tuple[str, Any]]:
        """What `weight_source` reads, one tensor at a time."""

    def weight_source(self) -> WeightSource:
        """Weights by Hugging Face name, in the layout of published checkpoints; they can be read again."""

    def renew(self) -> None:
        """Give the policy's own model, which engines in this process sample with, the trained weights.

        An empty model (`load_empty`) gets them in the types in which an engine uses them.
        """

    def offload(self) -> None:
        """Move weights and moments to the memory of the CPU, until `onload`; they can be read, but not trained."""

    def onload(self) -> None:
        """Move weights and moments back to the device that computes."""

    def export(self, folder: Path) -> Files:
        """Write the policy as a Hugging Face folder; returns sizes and digests that were taken while writing."""

    def export_trained(self, folder: Path) -> Files:
        """As `export`; of a policy with an adapter that alone, in the format of peft, with the encoding."""

    def save_state(self, folder: Path) -> Files:
        """Write the training state other than the weights (optimizer moments by parameter name); see `export`."""

    def load_state(self, folder: Path) -> None:
        """Load weights and state from a folder that `export_trained` and `save_state` wrote, under any layout."""

    def close(self) -> None:
        """Free everything."""
