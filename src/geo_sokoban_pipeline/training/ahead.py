"""Rollouts beside the training (`loop.max_staleness: 1`): iteration k + 1 is collected while iteration k is trained.

Iteration k is always rolled out with version k - 1 of the weights (the first two with version 0), whatever the timing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.grpo.sampler import PromptSampler
from geo_sokoban_pipeline.rollout.engines.base import WeightSource
from geo_sokoban_pipeline.training.collecting import Collector
from geo_sokoban_pipeline.trajectories.types import Trajectory


@dataclass
class Collected:
    """An iteration's scored episodes.

    Attributes:
        trajectories: groups in order, dropped ones included.
        metrics: `rollout/…`, `perf/…`.
        sampler: state of the sampler after it.
    """

    trajectories: list[Trajectory]
    metrics: dict[str, float | None]
    sampler: dict[str, Any]


class AheadCollector:
    """Collects iteration k + 1 in a thread, with the weights that iteration k began with, while k is trained.

    Weights come from committed checkpoints, so a continued run collects an iteration in flight again with the same
    ones, and a server that comes back gets them however far the training is.

    Args:
        sampler: advanced by the collector alone.
        folder_of: folder of the policy of a version.
        pool: of one thread; it outlives the engine, whose end stops what is in flight.
    """

    def __init__(
        self, collector: Collector, sampler: PromptSampler, folder_of: Callable[[int], Path], pool: Executor
    ) -> None:
        self._collector, self._sampler = collector, sampler
        self._folder_of, self._pool = folder_of, pool
        self._pending: Future[Collected] | None = None
        self._loaded: int | None = None  # version of the engine's weights

    @staticmethod
    def version_of(iteration: int) -> int:
        """Version of the weights that roll out an iteration: the one that the iteration before it began with."""
        return max(iteration - 1, 0)

    def take(self, iteration: int, *, is_last: bool) -> Collected:
        """Wait for an iteration; the next one begins at once, unless this is the last."""
        began = time.perf_counter()
        if self._pending is None:  # of a loop that begins or continues
            self._begin(iteration)
        assert self._pending is not None
        found, self._pending = self._pending.result(), None
        waited = time.perf_counter() - began
        seconds = max(found.metrics["perf/rollout_time"] or 0.0, 1e-9)
        found.metrics |= {
            "perf/wait_time": waited,
            "perf/overlap": max(0.0, 1.0 - waited / seconds),
            "rollout/staleness": float(iteration - self.version_of(iteration)),
        }
        if not is_last:
            self._begin(iteration + 1)
        return found

    def wait(self) -> None:
        """Return when nothing is in flight; the engine may then get other weights until `take`.

        Raises:
            Exception: of a rollout that failed.
        """
        if self._pending is not None:
            self._pending.result()
        self._loaded = None

    def _begin(self, iteration: int) -> None:
        version = self.version_of(iteration)
        if self._loaded != version:
            self._collector.engine.update_weights(WeightSource.of_folder(self._folder_of(version)), version)
            self._loaded = version
        self._pending = self._pool.submit(self._collect, iteration)

    def _collect(self, iteration: int) -> Collected:
        trajectories, metrics = self._collector.collect(iteration, self._sampler)
        return Collected(trajectories, metrics, self._sampler.state())
