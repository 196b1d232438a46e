"""The collectives of the ranks, over torch.distributed.

Every rank gets the same bits from a sum, and an equal run gets them again: gloo adds the parts of a tensor in an order
that depends on its size and on the number of ranks alone.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from geo_sokoban_pipeline.processes import gloo_on_loopback

_LOOPBACK = "127.0.0.1"


class Meeting:
    """Where the ranks of one machine find each other: a store that rank 0 serves on the loopback interface.

    Attributes:
        port: of the store.
    """

    def __init__(self, size: int) -> None:
        # Given a port number alone, the store would listen on every interface.
        listener = socket.socket()
        listener.bind((_LOOPBACK, 0))
        listener.listen(size)
        self.port: int = listener.getsockname()[1]
        self._store = dist.TCPStore(
            _LOOPBACK, self.port, size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def join(self, size: int) -> Group:
        """Rank 0 of the group; returns when all ranks have joined."""
        return Group(0, size, self._store)


def join_group(rank: int, size: int, port: int) -> Group:
    """A rank's group, given the port of rank 0's `Meeting`; returns when all ranks have joined."""
    return Group(rank, size, dist.TCPStore(_LOOPBACK, port, size, is_master=False))


class Group:
    """The ranks that compute a step together; every rank calls the same methods in the same order.

    A process is in one group at a time.

    Args:
        store: through which the ranks find each other; None: torch's default group is there already.
        device: type of the device on which the ranks compute.

    Attributes:
        rank: of this process.
        size: number of ranks.
    """

    def __init__(self, rank: int, size: int, store: dist.Store | None, device: str = "cpu") -> None:
        self.rank, self.size, self._device = rank, size, device
        if store is None:
            return
        with gloo_on_loopback():
            backend = "gloo" if device == "cpu" else f"cpu:gloo,{device}:nccl"
            dist.init_process_group(backend, store=store, rank=rank, world_size=size)

    @classmethod
    def alone(cls, device: str) -> Group:
        """The group of this process alone, for what torch does on groups only; kept until the process ends.

        Args:
            device: type of the device on which it computes.
        """
        return cls(0, 1, None if dist.is_initialized() else dist.HashStore(), device)

    def mesh(self, copies: int = 1) -> DeviceMesh:
        """The ranks as a mesh for sharding: in rows of shards, one row for each copy of the weights."""
        with gloo_on_loopback():
            if copies == 1:
                return init_device_mesh(self._device, (self.size,))
            return init_device_mesh(self._device, (copies, self.size // copies), mesh_dim_names=("copy", "shard"))

    def sum_counts(self, counts: Sequence[int]) -> list[int]:
        """Sums of integers over the ranks."""
        return self._reduced(counts, dist.ReduceOp.SUM)

    def largest(self, counts: Sequence[int]) -> list[int]:
        """The largest of each integer over the ranks."""
        return self._reduced(counts, dist.ReduceOp.MAX)

    @torch.no_grad()
    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Sum the gradients of parameters over the ranks, in float32, by one collective.

        A parameter that has no gradient on any rank keeps none, as in one process.
        """
        held = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
        parts = [
            held.new_zeros(parameter.numel()) if parameter.grad is None else parameter.grad.flatten().float()
            for parameter in parameters
        ]
        flat = torch.cat([held, *parts])
        del parts
        dist.all_reduce(flat)
        first = len(parameters)
        for parameter, count in zip(parameters, flat[:first].tolist(), strict=True):
            end = first + parameter.numel()
            if count:
                parameter.grad = flat[first:end].view_as(parameter).to(parameter.dtype)
            first = end

    @torch.no_grad()
    def combine(self, own: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of which each is held by one rank, on all ranks, by one collective.

        Args:
            own: None where another rank holds the tensor.
            like: tensors of the same shapes and type.
        """
        if not like:
            return []
        flat = torch.cat(
            [
                other.new_zeros(other.numel()) if tensor is None else tensor.flatten()
                for tensor, other in zip(own, like, strict=True)
            ]
        )
        dist.all_reduce(flat)
        counts = [other.numel() for other in like]
        return [part.view_as(other) for part, other in zip(flat.split(counts), like, strict=True)]

    @torch.no_grad()
    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite tensors with those of rank 0."""
        for tensor in tensors:
            whole = tensor.contiguous()
            dist.broadcast(whole, 0)
            if whole is not tensor:
                tensor.copy_(whole)

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a contiguous tensor to a rank, which receives it."""
        dist.send(tensor, to)

    def receive(self, tensor: Tensor, source: int) -> None:
        """Overwrite a contiguous tensor with the one that a rank sends."""
        dist.recv(tensor, source)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()

    def _reduced(self, counts: Sequence[int], operation: Any) -> list[int]:
        values = torch.tensor(counts, dtype=torch.int64)
        dist.all_reduce(values, operation)
        reduced: list[int] = values.tolist()
        return reduced


def has_lost_a_rank(error: Exception) -> bool:
    """Whether this is what a collective raises that does not end, because another rank has failed or ended."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error))
