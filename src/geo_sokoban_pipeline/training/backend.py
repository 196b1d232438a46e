"""The training backend of a run: of this process alone, or over a worker group, whose ranks take every step together.

The driver shards samples; each rank accumulates the gradients of its part, the group adds them, and every rank moves
its copy of the weights alike. Losses are divided by the counts of the whole step, so N ranks compute what one does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from geo_sokoban_pipeline.config.grpo import MegatronOptions, OptimizerOptions, TrainOptions
from geo_sokoban_pipeline.distributed.group import Group
from geo_sokoban_pipeline.distributed.process import WorkerError
from geo_sokoban_pipeline.grpo.loss import Objective, StepSize
from geo_sokoban_pipeline.policies.policy import Policy, load_empty, save_encoding
from geo_sokoban_pipeline.policies.preparing import open_teacher
from geo_sokoban_pipeline.policies.weights import (
    CAN_SHARE,
    SharedBytes,
    TensorSpec,
    WeightSource,
    published_specs,
    write_checkpoint,
)
from geo_sokoban_pipeline.rollout.engines.sglang.sender import Handles, Sender
from geo_sokoban_pipeline.runs.policy_folder import PolicyFolder
from geo_sokoban_pipeline.runs.storage import Files
from geo_sokoban_pipeline.training.backends.base import Batch, TrainBackend
from geo_sokoban_pipeline.training.backends.torch import TorchBackend
from geo_sokoban_pipeline.training.batch import TrainSample
from geo_sokoban_pipeline.training.demonstrations import Demonstrations
from geo_sokoban_pipeline.training.sharding import StepCost, shard_range, shard_samples
from geo_sokoban_pipeline.training.worker import build_rank, build_rank_scorer
from geo_sokoban_pipeline.training.worker_group import WorkerGroup

_OF_THE_STEP = ("grad_norm", "skipped")  # equal on all ranks; other metrics add up


def build_backend(
    policy: Policy,
    options: OptimizerOptions,
    temperature: float = 1.0,
    workers: WorkerGroup | None = None,
    megatron: MegatronOptions | None = None,
) -> TrainBackend:
    """The training backend over a policy's model, which it trains in place.

    Args:
        options: optimizer and micro-batches.
        temperature: sampling temperature of the rollouts; 1 for SFT.
        workers: worker group whose ranks take every step together, by the backend of its options; None: this process
            alone.
        megatron: layout of Megatron's ranks, of this process alone; None: PyTorch.
    """
    if workers is not None:
        return RankedBackend(policy, options, temperature, workers)
    if megatron is not None:
        return build_rank(policy, options, temperature, Group.alone(policy.device), megatron=megatron)
    return TorchBackend(policy, options, temperature)


def open_reference(
    start: Callable[[], PolicyFolder],
    policy: Policy,
    options: TrainOptions,
    workers: WorkerGroup | None,
    backend: TrainBackend,
) -> Callable[[Sequence[TrainSample]], list[np.ndarray]] | None:
    """Scorer of the policy beside the trained one: the teacher, or the reference of the KL; None where there is none.

    Args:
        start: the policy that GRPO starts from, which is the reference.
        policy: that is trained; a teacher has its tokens.
        backend: of the policy; without an adapter it is the one that GRPO starts from.
    """
    grpo = options.grpo
    if not grpo.needs_reference:
        return None
    if policy.adapter is not None and grpo.teacher is None:
        return backend.base_log_probs
    return build_scorer(start() if grpo.teacher is None else open_teacher(grpo.teacher, policy), options, workers)


def build_scorer(
    folder: PolicyFolder, options: TrainOptions, workers: WorkerGroup | None = None
) -> Callable[[Sequence[TrainSample]], list[np.ndarray]]:
    """Log-probs of a policy that is not trained.

    Between calls it waits in the memory of the CPU.

    Args:
        workers: whose ranks hold a part of it each, where they do of the trained policy. None: this process alone.
    """
    given = options.optimizer, options.rollout.sampling.temperature
    if workers is None or (workers.drives_a_rank and not options.shares_weights):
        return build_rank_scorer(folder.path, options.policy, *given).log_probs
    cost = StepCost.of(load_empty(options.policy, folder.path).model.config)
    workers.read(folder.path, "build_scorer", *given)
    return partial(_score, workers=workers, method="scorer.log_probs", parts=Parts.of(workers), cost=cost)


class RankedBackend:
    """`TrainBackend` over the ranks of a worker group.

    Args:
        policy: of the driver. Copies are trained in place, on all ranks alike. Where the weights are sharded it is that
            of the engine, and may be empty (`load_empty`): each rank reads its part from the policy's folder.
        options: optimizer and micro-batches.
        temperature: sampling temperature of the rollouts.

    """

    def __init__(self, policy: Policy, options: OptimizerOptions, temperature: float, workers: WorkerGroup) -> None:
        self._workers, self._policy = workers, policy
        self._cost = StepCost.of(policy.model.config)
        self._specs = published_specs(policy.model)  # in the types in which it is trained, before `renew`
        self._is_stale = policy.is_empty
        self._changes = 0
        shape = workers.options
        layout = shape.megatron_layout
        if workers.weights is None:
            workers.call_all("build_backend", None, options, temperature)
        else:
            workers.read(workers.weights, "build_backend", options, temperature)
        self._is_sharded = shape.shares_weights  # hybrid may have one shard a copy
        self._is_apart = self._is_sharded or options.offload  # what is trained, from the engines' weights
        self._parts = Parts.of(workers)
        if layout is not None:
            self._first_copies = [rank - rank % layout.tensor_parallel for rank in range(workers.size)]
        else:
            shards = {"none": 1, "full": workers.size, "hybrid": workers.size // shape.replicas}[shape.sharding]
            self._first_copies = [rank % shards for rank in range(workers.size)]
        workers.before_rollout = self.renew if self._is_apart else None
        self._shares_memory = CAN_SHARE and workers.drives_a_rank and policy.device == "cpu"

    @property
    def own(self) -> TorchBackend:
        """The driver's backend, where the driver is a rank."""
        assert self._workers.own is not None
        return self._workers.own.backend

    def log_probs(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        return _score(samples, self._workers, "backend.log_probs", self._parts, self._cost)

    def base_log_probs(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        return _score(samples, self._workers, "backend.base_log_probs", self._parts, self._cost)

    def step(self, batch: Batch, objective: Objective, learning_rate: float) -> dict[str, float]:
        count = self._parts.count
        size = None if isinstance(batch, Demonstrations) else StepSize.of(batch)
        parts: list[Any] = (
            _filled(shard_range(batch.numbers, count), range(0), count)
            if isinstance(batch, Demonstrations)
            else [[batch[index] for index in shard] for shard in _shard(batch, count, self._cost)]
        )
        given = [(part, objective, learning_rate, size) for part in self._parts.spread(parts)]
        rows: list[dict[str, float]] = self._workers.call_each("step", given)
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
            self._workers.call_all("backend.renew")
        self._is_stale = False

    def iter_weights(self) -> Iterator[tuple[str, Any]]:
        return self.weight_source().read()

    def weight_source(self) -> WeightSource:
        """See `TrainBackend`; weights that this process lacks are sent when they are read."""
        if self._workers.drives_a_rank and not self._is_sharded:
            return self.own.weight_source()
        # Ranks on CPUs of this machine write into memory of the driver.
        by_ranks: Callable[[Mapping[str, int]], Sender] = partial(RankSender, self._workers)
        sender = None if self._shares_memory else by_ranks
        return WeightSource(self._specs, self._collect, lambda: self._changes, sender=sender)

    def offload(self) -> None:
        self._workers.call_all("backend.offload")

    def onload(self) -> None:
        self._workers.call_all("backend.onload")

    def export(self, folder: Path) -> Files:
        """See `TrainBackend`.

        Raises:
            WorkerError: the copies of the weights have come apart.
        """
        self._compare_copies()
        if not self._is_sharded or self._workers.shares(folder):
            return self._workers.write(folder, "backend.export", everywhere=self._is_sharded)
        # One file has parts of all ranks, so that none could send its own.
        save_encoding(self._policy, folder)
        return write_checkpoint(folder, self._specs, self.weight_source().read_one)

    def export_trained(self, folder: Path) -> Files:
        if self._policy.adapter is None:
            return self.export(folder)
        self._compare_copies()
        return self._workers.write(folder, "backend.export_trained", everywhere=self._is_sharded)

    def save_state(self, folder: Path) -> Files:
        return self._workers.write(folder, "backend.save_state", everywhere=self._is_sharded)

    def load_state(self, folder: Path) -> None:
        self._workers.read(folder, "backend.load_state")
        self._note_change()

    def close(self) -> None:
        self._workers.before_rollout = None
        if self._workers.drives_a_rank:
            self.own.close()

    def _collect(self, specs: Mapping[str, TensorSpec], memory: SharedBytes | None) -> Tensor:
        if not self._shares_memory:
            memory = None
        elif memory is None:
            memory = SharedBytes(sum(spec.bytes for spec in specs.values()))
        return self._workers.call_all("backend.collect", specs, memory)[0]

    def _note_change(self) -> None:
        self._is_stale = True
        self._changes += 1

    def _compare_copies(self) -> None:
        """See that all copies hold the same weights."""
        if self._first_copies == list(range(self._workers.size)):
            return
        digests: list[str] = self._workers.call_all("backend.digest")
        for rank, digest in enumerate(digests):
            first = self._first_copies[rank]
            if digest != digests[first]:
                raise WorkerError(
                    f"the weights of process {rank + 1} differ from those of process {first + 1}, and nothing is "
                    "saved. The same command continues from what is stored."
                )


class RankSender:
    """`Sender` of the ranks of a worker group: servers get weights from these, past the driver.

    Args:
        ranks: by the address of a server, the first rank on whose GPUs it lies; {}: rank 0 sends to all of them.
    """

    def __init__(self, workers: WorkerGroup, ranks: Mapping[str, int]) -> None:
        self._workers = workers
        # Servers of this machine see all of its GPUs.
        self._owners = dict.fromkeys(ranks, 0) if workers.drives_a_rank else dict(ranks)
        workers.call_all("open_sender", sorted({*self._owners.values()} or {0}))

    def advance(self, specs: Mapping[str, TensorSpec] | None) -> str | None:
        faults: list[str | None] = self._workers.call_all("sender.advance", specs)
        return faults[0]

    def pack_handles(self, specs: Mapping[str, TensorSpec], counts: Mapping[str, int]) -> Handles:
        wanted: list[dict[str, int]] = [{} for _ in range(self._workers.size)]
        for url, count in counts.items():
            wanted[self._owners[url]][url] = count
        found: list[Handles] = self._workers.call_each("sender.pack_handles", [(specs, own) for own in wanted])
        return {url: texts for own in found for url, texts in own.items()}

    def invite(self, urls: Sequence[str], ranks: Sequence[int], device: str, seconds: float) -> list[dict[str, Any]]:
        found: list[list[dict[str, Any]]] = self._workers.call_each("sender.invite", [(urls, ranks, device, seconds)])
        return found[0]

    def join(self) -> str | None:
        faults: list[str | None] = self._workers.call_each("sender.join", [()])
        return faults[0]

    def give_up(self) -> None:
        for handle in self._workers.handles[:1]:
            handle.send("sender.give_up")

    def leave(self) -> None:
        with suppress(WorkerError):  # without ranks there is nothing to leave
            self._workers.call_all("sender.leave")


@dataclass(frozen=True)
class Parts:
    """How many ranks work on the same samples.

    Attributes:
        ranks: all of them.
        alike: neighbouring ranks that take the same samples.
    """

    ranks: int
    alike: int

    @classmethod
    def of(cls, workers: WorkerGroup) -> Parts:
        """Of the ranks of a group."""
        layout = workers.options.megatron_layout
        return cls(workers.size, 1 if layout is None else layout.tensor_parallel)

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


def _score(
    samples: Sequence[TrainSample], workers: WorkerGroup, method: str, parts: Parts, cost: StepCost
) -> list[np.ndarray]:
    """Rows that a method of the workers gives samples, shared out over the ranks, in the order of the samples."""
    shards = _shard(samples, parts.count, cost)
    given = parts.spread([[samples[index] for index in shard] for shard in shards])
    scored = parts.pick(workers.call_each(method, [(part,) for part in given]))
    rows = dict(zip(chain(*shards), chain(*scored), strict=True))
    return [rows[index] for index in range(len(rows))]


def _filled(parts: list[Any], empty: Any, count: int) -> list[Any]:
    """One part for each rank: every rank takes part in a step, with or without samples."""
    return [*parts, *[empty] * (count - len(parts))]
