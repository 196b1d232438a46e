"""A training backend over a worker group: one `TorchBackend` per rank, which take every step together.

The driver shards samples; each rank accumulates the gradients of its part, the group adds them, and every rank moves
its copy of the weights alike. Losses are divided by the counts of the whole step, so N ranks compute what one does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from torch.distributed.device_mesh import DeviceMesh

from geo_sokoban_pipeline.config.grpo import MegatronOptions, OptimizerOptions
from geo_sokoban_pipeline.config.policy import PolicyOptions
from geo_sokoban_pipeline.distributed.fsdp import device_of_mesh, move_shards, shard_policy
from geo_sokoban_pipeline.distributed.group import Group
from geo_sokoban_pipeline.distributed.messages import RankError
from geo_sokoban_pipeline.grpo.loss import Objective, StepSize
from geo_sokoban_pipeline.policies.policy import Policy, load_as, load_empty, store_in_compute_type
from geo_sokoban_pipeline.rollout.engines.base import WeightSource
from geo_sokoban_pipeline.runs.storage import Files
from geo_sokoban_pipeline.training.backends.base import Batch
from geo_sokoban_pipeline.training.backends.torch import GradientPass, PassSetting, TorchBackend
from geo_sokoban_pipeline.training.batch import TrainSample
from geo_sokoban_pipeline.training.demonstrations import Demonstrations
from geo_sokoban_pipeline.training.runtime import PART_THRESHOLD, limit_heap
from geo_sokoban_pipeline.training.sharding import StepCost, shard_range, shard_samples
from geo_sokoban_pipeline.training.worker import Worker
from geo_sokoban_pipeline.training.worker_group import WorkerGroup

PART_BYTES = 16 << 20  # of weights that are collected by one job; held beside a bucket for servers
_OF_THE_STEP = ("grad_norm", "skipped")  # equal on all ranks; other metrics add up


class RankedBackend:
    """`TrainBackend` over the ranks of a worker group.

    Args:
        policy: of the driver. Copies are trained in place, on all ranks alike. Where the weights are sharded it is that
            of the engine, and may be empty (`load_empty`): each rank reads its part from the policy's folder.
        options: optimizer and micro-batches.
        temperature: sampling temperature of the rollouts.

    """

    def __init__(self, policy: Policy, options: OptimizerOptions, temperature: float, workers: WorkerGroup) -> None:
        self._workers = workers
        self._cost = StepCost.of(policy.model.config)
        self._is_stale = policy.is_empty
        self._changes = 0
        shape = workers.options
        layout = shape.megatron_layout
        build = BuildBackend(options, temperature, shape.sharding, shape.replicas, layout)
        if workers.weights is None:
            self._on_all(build)
        else:
            workers.read(workers.weights, lambda folder: replace(build, folder=folder))
        self._is_sharded = shape.shares_weights  # hybrid may have one shard a copy
        self._is_apart = self._is_sharded or options.offload  # what is trained, from the engines' weights
        self._parts = Parts(workers.size, 1 if layout is None else layout.tensor_parallel)
        if layout is not None:
            self._first_copies = [rank - rank % layout.tensor_parallel for rank in range(workers.size)]
        else:
            shards = {"none": 1, "full": workers.size, "hybrid": workers.size // shape.replicas}[shape.sharding]
            self._first_copies = [rank % shards for rank in range(workers.size)]
        workers.before_rollout = self.renew if self._is_apart else None

    @property
    def own(self) -> TorchBackend:
        """The driver's backend, where the driver is a rank."""
        backend: TorchBackend = self._workers.own.backend
        return backend

    def log_probs(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """See `TrainBackend`."""
        shards = _shard(samples, self._parts.count, self._cost)
        parts = self._parts.spread([[samples[index] for index in shard] for shard in shards])
        scored = self._workers.run_jobs([LogProbs(part) for part in parts])
        return _in_order(self._parts.pick(scored), shards)

    def step(self, batch: Batch, objective: Objective, learning_rate: float) -> dict[str, float]:
        """See `TrainBackend`."""
        count = self._parts.count
        jobs: list[Callable[[Worker], Any]]
        if isinstance(batch, Demonstrations):
            parts = self._parts.spread(_filled(shard_range(batch.numbers, count), range(0), count))
            jobs = [SftStep(part, objective, learning_rate) for part in parts]
        else:
            size = StepSize.of(batch)
            shards = [[batch[index] for index in shard] for shard in _shard(batch, count, self._cost)]
            jobs = [Step(part, objective, learning_rate, size) for part in self._parts.spread(shards)]
        rows: list[dict[str, float]] = self._workers.run_jobs(jobs)
        self._note_change()
        # A rank without samples has no metrics of the objective.
        totals: dict[str, float] = {}
        for row in self._parts.pick(rows):
            for name, value in row.items():
                if name not in _OF_THE_STEP:
                    totals[name] = totals.get(name, 0.0) + value
        return {**totals, **{name: rows[0][name] for name in _OF_THE_STEP}}

    def renew(self) -> None:
        """See `TrainBackend`; every rank's own model."""
        if self._is_apart and self._is_stale:
            self._on_all(Renew())
        self._is_stale = False

    def iter_weights(self, dtype: str | None = None) -> Iterator[tuple[str, Any]]:
        """See `TrainBackend`; weights that this process lacks are sent in parts of `PART_BYTES` when they are read."""
        if self._workers.drives_a_rank and not self._is_sharded:
            yield from self.own.iter_weights(dtype)
            return
        for names in self._workers.run_jobs([PlanParts(dtype, PART_BYTES)])[0]:
            part: list[tuple[str, Any]] = self._on_all(Collect(names, dtype))[0]
            part.reverse()
            while part:
                yield part.pop()  # no name for it: the receiver alone holds it

    def weight_source(self) -> WeightSource:
        """See `TrainBackend`."""
        return WeightSource(self.iter_weights, lambda: self._changes)

    def sleep(self) -> None:
        """See `TrainBackend`."""
        self._on_all(Sleep())

    def wake_up(self) -> None:
        """See `TrainBackend`."""
        self._on_all(WakeUp())

    def export(self, folder: Path) -> Files:
        """See `TrainBackend`.

        Raises:
            RankError: the copies of the weights have come apart.
        """
        if self._first_copies != list(range(self._workers.size)):
            self._compare_copies()
        return self._workers.write(folder, Export, everywhere=self._is_sharded)

    def save_state(self, folder: Path) -> Files:
        """See `TrainBackend`."""
        return self._workers.write(folder, SaveState, everywhere=self._is_sharded)

    def load_state(self, folder: Path) -> None:
        """See `TrainBackend`."""
        self._workers.read(folder, LoadState)
        self._note_change()

    def close(self) -> None:
        """See `TrainBackend`."""
        self._workers.before_rollout = None
        if self._workers.drives_a_rank:
            self.own.close()

    def _note_change(self) -> None:
        self._is_stale = True
        self._changes += 1

    def _compare_copies(self) -> None:
        """See that all copies hold the same weights."""
        digests: list[str] = self._on_all(Digest())
        for rank, digest in enumerate(digests):
            first = self._first_copies[rank]
            if digest != digests[first]:
                raise RankError(
                    f"the weights of process {rank + 1} differ from those of process {first + 1}, and nothing is "
                    "saved. The same command continues from what is stored."
                )

    def _on_all(self, job: Callable[[Worker], Any]) -> list[Any]:
        return self._workers.run_jobs([job] * self._workers.size)


class ReferenceScorer:
    """A policy that is not trained, or a rank's part of it. Between calls it waits in the memory of the CPU.

    Args:
        passes: over the policy, which lies on the device that computes.

    Attributes:
        policy: whole, or this rank's part.
    """

    def __init__(self, passes: GradientPass) -> None:
        self._pass, self.policy, self._device = passes, passes.policy, passes.policy.model.device
        move_shards(self.policy, "cpu")

    def log_probs(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """(M,) float32 log-probs of each sample's trained tokens."""
        move_shards(self.policy, self._device)
        try:
            return self._pass.log_probs(samples)
        finally:
            move_shards(self.policy, "cpu")


class RankedScorer:
    """Log-probs of a policy that is not trained, of which each rank of a worker group holds a part.

    Args:
        policy: empty; its weights are read from its folder.
        options: micro-batches.
        temperature: sampling temperature of the rollouts.
    """

    def __init__(self, policy: Policy, options: OptimizerOptions, temperature: float, workers: WorkerGroup) -> None:
        shape = workers.options
        assert policy.folder is not None
        layout = shape.megatron_layout
        self._workers, self._cost = workers, StepCost.of(policy.model.config)
        self._parts = Parts(workers.size, 1 if layout is None else layout.tensor_parallel)
        workers.read(
            policy.folder,
            lambda folder: BuildScorer(folder, options, temperature, shape.sharding, shape.replicas, layout),
        )

    @property
    def own(self) -> ReferenceScorer:
        """The driver's part, where the driver is a rank."""
        scorer: ReferenceScorer = self._workers.own.scorer
        return scorer

    def __call__(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """(M,) float32 log-probs of each sample's trained tokens."""
        shards = _shard(samples, self._parts.count, self._cost)
        parts = self._parts.spread([[samples[index] for index in shard] for shard in shards])
        scored = self._workers.run_jobs([ReferenceLogProbs(part) for part in parts])
        return _in_order(self._parts.pick(scored), shards)


@dataclass(frozen=True)
class Parts:
    """How many ranks work on the same samples.

    Attributes:
        ranks: all of them.
        alike: neighbouring ranks that take the same samples.
    """

    ranks: int
    alike: int = 1

    @property
    def count(self) -> int:
        """Parts of the samples of a step."""
        return self.ranks // self.alike

    def spread(self, parts: Sequence[Any]) -> list[Any]:
        """The part of each rank."""
        return [part for part in parts for _ in range(self.alike)]

    def pick(self, results: Sequence[Any]) -> list[Any]:
        """One result of each part, of those of all ranks."""
        return list(results[:: self.alike])


def _shard(samples: Sequence[TrainSample], count: int, cost: StepCost) -> list[list[int]]:
    """Indices of the samples of each rank."""
    return _filled(shard_samples(samples, count, cost), [], count)


def _in_order(scored: Sequence[Sequence[np.ndarray]], shards: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Rows of all ranks, in the order of the samples."""
    rows = dict(zip(chain(*shards), chain(*scored), strict=True))
    return [rows[index] for index in range(len(rows))]


def _filled(parts: list[Any], empty: Any, count: int) -> list[Any]:
    """One part for each rank: every rank takes part in a step, with or without samples."""
    return [*parts, *[empty] * (count - len(parts))]


def mesh_of(group: Group, sharding: str, replicas: int) -> DeviceMesh | None:
    """The mesh over which the weights are sharded; None: every rank has a copy, or is the only one."""
    return None if sharding == "none" or group.size == 1 else group.mesh(replicas)


@dataclass(frozen=True)
class BuildBackend:
    """Build this rank's part of a backend; a policy without weights is read from a folder, by default its own."""

    options: OptimizerOptions
    temperature: float
    sharding: str = "none"
    replicas: int = 1
    megatron: MegatronOptions | None = None
    folder: Path | None = None

    def __call__(self, worker: Worker) -> None:
        """Run in a worker."""
        if self.folder is not None:
            worker.policy.folder = self.folder
        worker.backend = self.build(worker.policy, worker.group)

    def build(self, policy: Policy, group: Group | None) -> TorchBackend:
        """The backend of a rank."""
        if self.megatron is not None:
            from geo_sokoban_pipeline.training.backends.megatron.backend import MegatronBackend

            assert group is not None
            limit_heap(PART_THRESHOLD)
            return MegatronBackend(policy, self.options, self.temperature, group, self.megatron)
        mesh = None if group is None else mesh_of(group, self.sharding, self.replicas)
        if mesh is not None:
            limit_heap(PART_THRESHOLD)
        return TorchBackend(policy, self.options, self.temperature, group, mesh)


@dataclass(frozen=True)
class LoadState:
    """Load weights and state of a checkpoint."""

    folder: Path

    def __call__(self, worker: Worker) -> None:
        """Run in a worker."""
        worker.backend.load_state(self.folder)


@dataclass(frozen=True)
class Renew:
    """Give the worker's engine whole weights of the newest version."""

    def __call__(self, worker: Worker) -> None:
        """Run in a worker."""
        worker.backend.renew()


@dataclass(frozen=True)
class PlanParts:
    """Names of weights that are collected together."""

    dtype: str | None
    largest: int

    def __call__(self, worker: Worker) -> list[list[str]]:
        """Run in a worker."""
        return list(worker.backend.plan_parts(self.dtype, self.largest))


@dataclass(frozen=True)
class Collect:
    """Send rank 0 this rank's rows of weights; it returns the whole ones, by name."""

    names: Sequence[str]
    dtype: str | None

    def __call__(self, worker: Worker) -> list[tuple[str, Any]]:
        """Run in a worker."""
        weights: list[tuple[str, Any]] = worker.backend.collect(self.names, self.dtype)
        return weights


@dataclass(frozen=True)
class Export:
    """Write this rank's part of the policy."""

    folder: Path

    def __call__(self, worker: Worker) -> Files:
        """Run in a worker."""
        files: Files = worker.backend.export(self.folder)
        return files


@dataclass(frozen=True)
class SaveState:
    """Write this rank's part of the training state."""

    folder: Path

    def __call__(self, worker: Worker) -> Files:
        """Run in a worker."""
        files: Files = worker.backend.save_state(self.folder)
        return files


@dataclass(frozen=True)
class Sleep:
    """Move this rank's weights and moments to the memory of the CPU."""

    def __call__(self, worker: Worker) -> None:
        """Run in a worker."""
        worker.backend.sleep()


@dataclass(frozen=True)
class WakeUp:
    """Move this rank's weights and moments back to its device."""

    def __call__(self, worker: Worker) -> None:
        """Run in a worker."""
        worker.backend.wake_up()


@dataclass(frozen=True)
class Digest:
    """Hash of what this rank holds of the weights."""

    def __call__(self, worker: Worker) -> str:
        """Run in a worker."""
        digest: str = worker.backend.digest()
        return digest


@dataclass(frozen=True)
class LogProbs:
    """Log-probs of the samples' trained tokens."""

    samples: Sequence[TrainSample]

    def __call__(self, worker: Worker) -> list[np.ndarray]:
        """Run in a worker."""
        rows: list[np.ndarray] = worker.backend.log_probs(self.samples)
        return rows


@dataclass(frozen=True)
class BuildScorer:
    """Build this rank's part of a `RankedScorer`, or a whole policy where none is sharded."""

    folder: Path
    options: OptimizerOptions
    temperature: float
    sharding: str = "none"
    replicas: int = 1
    megatron: MegatronOptions | None = None

    def __call__(self, worker: Worker) -> None:
        """Run in a worker."""
        assert worker.group is not None
        worker.scorer = self.build(worker.options.policy, worker.group)

    def build(self, chosen: PolicyOptions, group: Group | None = None) -> ReferenceScorer:
        """The scorer of a rank, or of a process alone."""
        if self.megatron is not None:
            from geo_sokoban_pipeline.training.backends.megatron.backend import build_parallel_pass

            assert group is not None
            empty = load_empty(chosen, self.folder)
            passes = build_parallel_pass(empty, self.options, self.temperature, group, self.megatron)
            return ReferenceScorer(passes)
        setting = PassSetting.of(self.options, self.temperature)
        mesh = None if group is None else mesh_of(group, self.sharding, self.replicas)
        if mesh is not None:
            held = shard_policy(load_empty(chosen, self.folder), mesh, is_trained=False)
            return ReferenceScorer(GradientPass(held, setting, group, device_of_mesh(mesh)))
        policy = load_as(chosen, self.folder)
        store_in_compute_type(policy)
        return ReferenceScorer(GradientPass(policy, setting))


@dataclass(frozen=True)
class ReferenceLogProbs:
    """Log-probs of the samples' trained tokens under the policy of a `RankedScorer`."""

    samples: Sequence[TrainSample]

    def __call__(self, worker: Worker) -> list[np.ndarray]:
        """Run in a worker."""
        rows: list[np.ndarray] = worker.scorer.log_probs(self.samples)
        return rows


@dataclass(frozen=True)
class Step:
    """An optimizer step of all ranks, on this rank's samples."""

    samples: Sequence[TrainSample]
    objective: Objective
    learning_rate: float
    size: StepSize

    def __call__(self, worker: Worker) -> dict[str, float]:
        """Run in a worker."""
        row: dict[str, float] = worker.backend.step(self.samples, self.objective, self.learning_rate, self.size)
        return row


@dataclass(frozen=True)
class SftStep:
    """An optimizer step of all ranks, on numbered demonstrations; needs `SetDemonstrations` before."""

    numbers: range
    objective: Objective
    learning_rate: float

    def __call__(self, worker: Worker) -> dict[str, float]:
        """Run in a worker."""
        assert worker.expert is not None
        batch = Demonstrations(self.numbers, worker.expert)
        row: dict[str, float] = worker.backend.step(batch, self.objective, self.learning_rate)
        return row
