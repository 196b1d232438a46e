"""The protocol of training backends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from geo_sokoban_pipeline.grpo.loss import Objective
from geo_sokoban_pipeline.training.batch import TrainSample


class TrainBackend(Protocol):
    """What the loop needs of a trainer."""

    def log_probs(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """(M,) float32 log-probs of each sample's trained tokens, under temperature and banned ids, no gradient."""

    def step(self, samples: Sequence[TrainSample], objective: Objective, learning_rate: float) -> dict[str, float]:
        """One optimizer step; metrics of the objective and `grad_norm`. Without a finite norm nothing changes."""

    def iter_weights(self) -> Iterator[tuple[str, Any]]:
        """Weights by Hugging Face name, in the layout of published checkpoints, one tensor at a time."""

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder."""

    def save_state(self, folder: Path) -> None:
        """Write what training needs beside the weights (optimizer moments by parameter name)."""

    def load_state(self, folder: Path) -> None:
        """Take weights and state from a folder that `export` and `save_state` wrote."""

    def close(self) -> None:
        """Free everything."""
