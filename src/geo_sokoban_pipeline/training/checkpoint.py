"""Checkpoint folders: a Hugging Face policy with optimizer moments, data cursor and fingerprint beside it, nothing
pickled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.grpo.sampler import PromptSampler
from geo_sokoban_pipeline.runs.fingerprint import Fingerprint, size_differences
from geo_sokoban_pipeline.signposts import reached
from geo_sokoban_pipeline.training.backends.base import TrainBackend

logger = logging.getLogger(__name__)
Writer = Callable[[Path], dict[str, Any]]


class CheckpointWriter:
    """Writes the state after an iteration into the folder it is called with.

    Attributes:
        entries: what the manifest records beside its files.
    """

    def __init__(self, backend: TrainBackend, entries: dict[str, Any]) -> None:
        self._backend = backend
        self.entries = entries

    def __call__(self, folder: Path) -> dict[str, Any]:
        """Fill the folder; returns the manifest's entries."""
        reached("before save")
        self._backend.export(folder)
        self._backend.save_state(folder)
        reached("inside save")
        return self.entries


def policy_and_trainer_writer(backend: TrainBackend, entries: dict[str, Any]) -> Writer:
    """Writer of a policy's folder with the optimizer state beside it, from which its training can go on."""

    def write(folder: Path) -> dict[str, Any]:
        backend.export(folder)
        backend.save_state(folder)
        return entries

    return write


def checkpoint_entries(
    iteration: int,
    fingerprint: dict[str, Any],
    sampler: PromptSampler,
    best: dict[str, Any] | None,
    workers: Mapping[str, int],
    validated: Mapping[str, Any],
) -> dict[str, Any]:
    """Entries of a checkpoint's manifest.

    Args:
        best: iteration and solve_rate of the best checkpoint on validation; None: none was validated.
        workers: numbers of `threads` and of `processes`.
        validated: the same, with the number of episodes, of the `start` of the loop and of the `newest` validation.
    """
    return {
        "iteration": iteration,
        "policy_version": iteration + 1,
        "fingerprint": fingerprint,
        "sampler": sampler.state(),
        "best": best,
        "validated": validated,
        **workers,
    }


def compare_workers(manifest: Mapping[str, Any], workers: Mapping[str, int]) -> None:
    """Warn where a stored state was computed by other numbers of `threads` or `processes` (empty: nothing is)."""
    for name, count in workers.items():
        before = manifest.get(name, 1)
        if manifest and before != count:
            logger.warning(
                "this run used %d %s before and uses %d now: it goes on, but not bit for bit as it would have",
                before,
                name,
                count,
            )


def compare_sizes(stored: Fingerprint, current: Fingerprint) -> None:
    """Warn where a run goes on with other sizes, such as of its micro-batches."""
    lines = size_differences(stored, current)
    if lines:
        logger.warning(
            "the run goes on with other sizes (%s): sums are added in another order, so that last bits may differ from "
            "here on",
            "; ".join(lines),
        )


def retained(saved: list[int], keep_last: int | None, best: int | None) -> list[int]:
    """Iterations of the checkpoints that stay: the newest `keep_last` (None: all) and the best one."""
    kept = set(saved if keep_last is None else saved[-keep_last:])
    if best is not None and best in saved:
        kept.add(best)
    return sorted(kept)
