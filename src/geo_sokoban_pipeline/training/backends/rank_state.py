"""What a rank's backend holds, and how it leaves the rank: weights for engines, folders of weights and moments.

Where several ranks share the weights, each method is a collective: ranks send and write what they hold, one tensor at a
time. Everything that leaves has Hugging Face's names and shapes, whatever the layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from geo_sokoban_pipeline.config.grpo import OptimizerOptions
from geo_sokoban_pipeline.distributed.fsdp import gather, move_shards
from geo_sokoban_pipeline.distributed.group import Group
from geo_sokoban_pipeline.distributed.slices import (
    Slice,
    StoredTensors,
    collect_weight,
    own_part,
    own_rows,
    read_weights,
    with_part,
    write_slices,
    write_weights,
)
from geo_sokoban_pipeline.policies.experts import published_spec
from geo_sokoban_pipeline.policies.policy import Policy, allocate_weights, save_encoding, save_policy
from geo_sokoban_pipeline.rollout.engines.base import WeightSource
from geo_sokoban_pipeline.runs.storage import Files, read_json, write_json
from geo_sokoban_pipeline.runs.tensor_files import SHARD_BYTES, TensorSpec, write_tensors
from geo_sokoban_pipeline.training.backends.optim import Optimizers

OPTIMIZER = "optimizer"  # beginning of the names of its files
STATE_FILE = "trainer_state.json"


class RankState:
    """The part of `TrainBackend` that hands out and takes over weights and moments.

    Attributes:
        policy: of the engine in this process.
        options: optimizer and micro-batches.
        trained_policy: whose weights are trained; the same one, unless several ranks share them.
        optimizers: what moves the weights.
    """

    policy: Policy
    options: OptimizerOptions
    trained_policy: Policy
    optimizers: Optimizers
    _group: Group | None
    _device: torch.device
    _is_sharded: bool
    _parameters: dict[str, Tensor]
    _skipped: int
    _changes: int

    def iter_weights(self, dtype: str | None = None) -> Iterator[tuple[str, Any]]:
        """See `TrainBackend`; where several ranks share the weights, see `collect`."""
        if not self._is_sharded:
            yield from WeightSource.of_model(self.policy.model).read(dtype)
            return
        for name in self._specs():
            yield from self.collect([name], dtype)

    def weight_source(self) -> WeightSource:
        """See `TrainBackend`."""
        if not self._is_sharded:
            return WeightSource.of_model(self.policy.model)
        return WeightSource(self.iter_weights, lambda: self._changes)

    def plan_parts(self, dtype: str | None, largest: int) -> Iterator[list[str]]:
        """Names of weights that are collected together: of at most so many bytes, or one."""
        names: list[str] = []
        held = 0
        for name, spec in self._specs().items():
            size = replace(spec, dtype=dtype or spec.dtype).bytes
            if names and held + size > largest:
                yield names
                names, held = [], 0
            names.append(name)
            held += size
        yield names

    def collect(self, names: Sequence[str], dtype: str | None) -> list[tuple[str, Tensor]]:
        """Whole weights by name, in the published layout and a torch dtype, on rank 0; every rank calls this.

        Other ranks send their rows, one tensor at a time, and get nothing. A tensor stays on the device of the weights.
        """
        assert self._group is not None
        kind, collected = None if dtype is None else getattr(torch, dtype), []
        for name in names:
            whole = self._collect_one(name, 0, kind, on_device=True)
            if whole is not None and self._group.rank == 0:
                collected.append((name, whole))
        return collected

    @torch.no_grad()
    def renew(self) -> None:
        """See `TrainBackend`; a collective where the weights are sharded."""
        if not self._is_sharded:
            return
        if self.policy.is_empty:
            allocate_weights(self.policy, self._device)
        whole = dict(self.policy.model.named_parameters())
        for name, weight in whole.items():
            weight.copy_(self._gather(name, weight.dtype))

    def sleep(self) -> None:
        """See `TrainBackend`; what is offloaded is in the memory of the CPU already."""
        self._move("cpu")

    def wake_up(self) -> None:
        """See `TrainBackend`."""
        self._move(self._device)

    def _move(self, device: torch.device | str) -> None:
        if not self.options.offload:
            if self._is_sharded:
                move_shards(self.trained_policy, device)
            else:
                self.trained_policy.model.to(device)
            self.optimizers.move(device)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what torch keeps for later use, nobody else could take

    def _described(self) -> Policy:
        """A policy with the configuration of the trained one, in Hugging Face's class."""
        return self.trained_policy

    def _specs(self) -> dict[str, TensorSpec]:
        """Types and shapes of the whole weights as published, in the order of the model."""
        return {name: published_spec(name, parameter) for name, parameter in self._parameters.items()}

    def _collect_one(
        self, name: str, owner: int, dtype: torch.dtype | None = None, *, on_device: bool = False
    ) -> Tensor | None:
        """A whole weight in the published layout, on one rank; a collective. See `collect_weight`.

        Args:
            on_device: it stays on the device of the weights.
        """
        assert self._group is not None
        parameter = self._parameters[name]
        device = own_part(parameter).device if on_device else "cpu"
        return collect_weight(name, parameter, owner, self._group, dtype, device)

    def _gather(self, name: str, dtype: torch.dtype) -> Tensor:
        """A whole weight in a type, on every rank; a collective."""
        # Rounded before it is sent.
        return gather(self._parameters[name].detach().to(dtype))

    def digest(self) -> str:
        """Hash of what this rank holds of the weights, and of all buffers."""
        digest = hashlib.blake2b(digest_size=16)
        for tensor in (*map(own_part, self._parameters.values()), *self.trained_policy.model.buffers()):
            digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    def export(self, folder: Path, largest: int = SHARD_BYTES) -> Files:
        """See `TrainBackend`; where the weights are sharded, every rank writes a part, and returns its own files.

        Args:
            largest: bytes of a file of weights.
        """
        if self._group is None or not self._is_sharded:
            return save_policy(self.trained_policy, folder, largest=largest)
        if self._group.rank == 0:
            save_encoding(self._described(), folder)
        return write_weights(folder, self._specs(), self._collect_one, self._group, largest)

    def save_state(self, folder: Path) -> Files:
        """See `TrainBackend`; where moments are sharded, every rank writes a part, and returns its own files."""
        tensors, steps = self.optimizers.state()
        if self._group is None or self._group.rank == 0:
            write_json(folder / STATE_FILE, {"optimizer_steps": steps, "skipped_in_a_row": self._skipped})
        if self._is_sharded:
            return self._write_moments(folder, tensors)
        specs = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
        return write_tensors(folder / f"{OPTIMIZER}.safetensors", specs, tensors.__getitem__)

    @torch.no_grad()
    def load_state(self, folder: Path) -> None:
        """See `TrainBackend`; every rank reads what it holds, one tensor at a time."""
        self._read_weights(folder)
        self._changes += 1
        moments = self._read_moments(StoredTensors(folder, OPTIMIZER))
        numbers = read_json(folder / STATE_FILE)
        self._skipped = int(numbers["skipped_in_a_row"])
        self.optimizers.load_state(moments, int(numbers["optimizer_steps"]))

    def _write_moments(self, folder: Path, moments: Mapping[str, Tensor]) -> Files:
        """Write this rank's part of the moments."""
        assert self._group is not None
        return write_slices(folder, OPTIMIZER, moments, self._group)

    def _read_weights(self, folder: Path) -> None:
        read_weights(self._parameters, folder)

    def _read_moments(self, stored: StoredTensors) -> dict[str, Tensor]:
        """This rank's part of the moments."""
        moments = {}
        for key in stored.names:
            parameter = self._parameters[key.split(".", 1)[1]]
            rows, part = own_rows(parameter), own_part(parameter)
            own = stored.read(key, Slice(rows)).to(part.device) if rows else torch.empty_like(part)
            moments[key] = with_part(own, parameter)
        return moments
