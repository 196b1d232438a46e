"""Four ranks that are started once: each case makes a worker group of the first ones, over a policy of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from geo_sokoban_pipeline.config.grpo import MegatronOptions
from geo_sokoban_pipeline.config.policy import PolicyOptions
from geo_sokoban_pipeline.distributed.fsdp import gather
from geo_sokoban_pipeline.distributed.slices import own_part
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.training.backends.torch import TorchBackend
from geo_sokoban_pipeline.training.worker import Worker, WorkerSpec
from geo_sokoban_pipeline.training.worker_group import WorkerGroup
from open_workers import leave, open_group, opened, start_others
from task_options import TrainOptions

LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "one process": {"processes": 1},
    "two replicas": {"processes": 2},
    "four replicas": {"processes": 4},
    "two shards": {"processes": 2, "sharding": "full"},
    "three shards": {"processes": 3, "sharding": "full"},
    "four shards": {"processes": 4, "sharding": "full"},
    "two copies of one shard": {"processes": 2, "sharding": "hybrid", "replicas": 2},
    "two copies of two shards": {"processes": 4, "sharding": "hybrid", "replicas": 2},
    # Megatron: ranks that split matrices, times groups of them that split samples; `sequence`: tokens too.
    "tensor 1": {"processes": 1, "backend": "megatron"},
    "tensor 2": {"processes": 2, "backend": "megatron", "megatron": MegatronOptions(tensor_parallel=2)},
    "tensor 2, sequence": {
        "processes": 2,
        "backend": "megatron",
        "megatron": MegatronOptions(tensor_parallel=2, sequence_parallel=True),
    },
    "data 2": {"processes": 2, "backend": "megatron"},
    "tensor 2 x data 2": {"processes": 4, "backend": "megatron", "megatron": MegatronOptions(tensor_parallel=2)},
    "tensor 2 x data 2, sequence": {
        "processes": 4,
        "backend": "megatron",
        "megatron": MegatronOptions(tensor_parallel=2, sequence_parallel=True),
    },
}


def megatron_of(layout: str) -> MegatronOptions | None:
    """What `build_backend` is given beside a worker group of this layout."""
    chosen = LAYOUTS[layout]
    return chosen.get("megatron", MegatronOptions()) if chosen.get("backend") == "megatron" else None


class FourRanks:
    """The processes; all use the given options but for their layout."""

    def __init__(self, policy: Policy, options: TrainOptions) -> None:
        self._options = options.model_copy(update={"processes": 4, "threads": 1})
        self._others = start_others(policy, self._options, 3)

    @contextmanager
    def group(self, policy: Policy, layout: str, chosen: PolicyOptions | None = None) -> Iterator[WorkerGroup | None]:
        """A worker group with a layout, for the `with` block; None for one process.

        Args:
            chosen: other options of the policy.
        """
        options = self._options.model_copy(update={"sharding": "none", "replicas": 1, **LAYOUTS[layout]})
        if options.megatron.sequence_parallel:
            # Megatron-Core asks a GPU where to put its buffers; nothing that computes is replaced.
            answer_with_cpu()
            self._apply(answer_with_cpu)
        if chosen is not None:
            options = options.model_copy(update={"policy": chosen})
        if options.processes == 1:
            yield None
            return
        self._apply(partial(take_over, spec=WorkerSpec.of(policy, options)))
        workers = open_group(policy, options, self._others[: options.processes - 1])
        try:
            yield workers
        finally:
            leave(workers)

    def _apply(self, function: Callable[[Any], Any]) -> None:
        for done in [other.call("apply", function) for other in self._others]:
            done.result()

    def close(self) -> None:
        """End the processes."""
        for other in self._others:
            other.close()


def take_over(worker: Worker, spec: WorkerSpec) -> None:
    """Leave the group, and take over another policy."""
    if worker.group is not None:
        worker.group.close()
    vars(worker).clear()
    vars(worker).update(vars(opened(Worker(spec.build_policy(), spec.options))))


def answer_with_cpu(worker: Worker | None = None) -> None:
    """Have `torch.cuda.current_device` name the CPU in this process."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]


class MovingBackend(TorchBackend):
    """Moves its state between two places in the memory of the CPU, and spoils the place that it leaves."""

    _moves = True

    def _replace_state(self, copies: Any) -> None:
        model = self.trained_policy.model
        left = [own_part(one) for one in (*model.parameters(), *model.buffers(), *self.optimizers.moments())]
        super()._replace_state(copies)
        for part in left:
            part.fill_(torch.nan)


def move_for_real(worker: Worker) -> None:
    """Have a rank's backend move its state."""
    worker.backend.__class__ = MovingBackend


def keep_gradients(backend: TorchBackend) -> list[Tensor | None]:
    """A list to which each optimizer step adds the gradients that it is given, whole, in the order of the optimizers.

    Every rank must call this, because sharded gradients are gathered.
    """
    kept: list[Tensor | None] = []

    def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                kept.append(None if parameter.grad is None else gather(parameter.grad).clone())

    for optimizer in backend.optimizers.in_force:
        optimizer.register_step_pre_hook(keep)
    return kept


def watch_gradients(worker: Worker) -> None:
    """`keep_gradients` of a rank, whose part of the collectives the first one needs."""
    keep_gradients(worker.backend)
