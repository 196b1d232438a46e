"""The collectives of the ranks, over torch.distributed.

Every rank gets the same bits from a sum, and an equal run gets them again: the parts of a tensor are added in an order
that depends on its size and on the number of ranks alone.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from geo_sokoban_pipeline.processes import gloo_on, interface_of

LOOPBACK = "127.0.0.1"
_PATIENCE = dist.default_pg_timeout  # of gloo
_SUMS = "where the ranks connect for sums"
_CONNECTING = 60.0  # seconds
_SHARED_BYTES = 256 << 20  # at most, for sums by shared memory
_ALIGNMENT = 8  # bytes of the largest type


class LeftRankError(RuntimeError):
    """Another rank has left the group in the middle of a collective."""


@dataclass(frozen=True)
class Part:
    """The part of a tensor that a rank holds.

    Attributes:
        own: part of this rank.
        shape: of the whole tensor.
        ranks: those that hold its parts.
        of: where the part of a rank lies in the whole tensor.
    """

    own: Tensor
    shape: Sequence[int]
    ranks: Sequence[int]
    of: Callable[[Tensor, int], Tensor]


def open_rendezvous(size: int, host: str = LOOPBACK) -> dist.TCPStore:
    """Where the ranks find each other: a store that rank 0 serves on one network interface, as long as it keeps it.

    Args:
        host: address of rank 0 on that interface; loopback where all ranks are on one machine.
    """
    # Given a port number alone, the store would listen on every interface.
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.bind((host, 0))
    listener.listen(size)
    port = listener.getsockname()[1]
    return dist.TCPStore(host, port, size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def join_group(
    rank: int, size: int, port: int, device: str = "cpu", host: str = LOOPBACK, address: str | None = None
) -> Group:
    """A rank's group, given host and port of rank 0's rendezvous; returns when all ranks have joined."""
    return Group(rank, size, dist.TCPStore(host, port, size, is_master=False), device, address)


class Group:
    """The ranks that compute a step together; every rank calls the same methods in the same order.

    A process is in one group at a time.

    Args:
        store: through which the ranks find each other; None: torch's default group is there already.
        device: type of the device on which the ranks compute; of several GPUs that a rank sees, it takes the one of its
            number.
        address: at which ranks on other machines reach this one; None: all are on this machine.

    Attributes:
        rank: of this process.
        size: number of ranks.
    """

    def __init__(self, rank: int, size: int, store: dist.Store | None, device: str, address: str | None = None) -> None:
        self.rank, self.size, self._device = rank, size, device
        self._interface = None if address is None else interface_of(address)
        self._sums = SharedSums(rank, size, store if address is None else None)
        if store is None:
            return
        if dist.is_initialized() and dist.get_world_size() == 1:
            dist.destroy_process_group()  # of `alone`, which computes no more
        if device != "cpu" and size > 1:
            torch.cuda.set_device(rank % torch.cuda.device_count())  # Ray shows a rank its own alone
        with gloo_on(self._interface):
            backend = "gloo" if device == "cpu" else f"cpu:gloo,{device}:nccl"
            dist.init_process_group(backend, store=store, rank=rank, world_size=size)

    @classmethod
    def alone(cls, device: str) -> Group:
        """The group of this process alone, for what torch does on groups only; kept until it joins another one.

        Args:
            device: type of the device on which it computes.
        """
        return cls(0, 1, None if dist.is_initialized() else dist.HashStore(), device)

    def mesh(self, copies: int = 1) -> DeviceMesh:
        """The ranks as a mesh for sharding: in rows of shards, one row for each copy of the weights."""
        with gloo_on(self._interface):
            if copies == 1:
                return init_device_mesh(self._device, (self.size,))
            return init_device_mesh(self._device, (copies, self.size // copies), mesh_dim_names=("copy", "shard"))

    def grid(self, sizes: Mapping[str, int]) -> DeviceMesh:
        """The ranks as a mesh of named dimensions; neighbouring ranks differ in the last one."""
        with gloo_on(self._interface):
            return init_device_mesh(self._device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def sum_counts(self, counts: Sequence[int]) -> list[int]:
        """Sums of integers over the ranks."""
        return self._reduced(counts, dist.ReduceOp.SUM)

    def largest(self, counts: Sequence[int]) -> list[int]:
        """The largest of each integer over the ranks."""
        return self._reduced(counts, dist.ReduceOp.MAX)

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        self.sum_counts([0])

    @torch.no_grad()
    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Sum the gradients of parameters over the ranks, in float32, by one collective.

        A parameter that has no gradient on any rank keeps none, as in one process.
        """
        has_gradient = [float(parameter.grad is not None) for parameter in parameters]
        held = torch.tensor(has_gradient, device=parameters[0].device)
        parts = [
            held.new_zeros(parameter.numel()) if parameter.grad is None else parameter.grad.flatten().float()
            for parameter in parameters
        ]
        flat = torch.cat([held, *parts])
        del parts
        flat = self._sums(flat)
        first = len(parameters)
        for parameter, count in zip(parameters, flat[:first].tolist(), strict=True):
            end = first + parameter.numel()
            if count:
                parameter.grad = flat[first:end].view_as(parameter).to(parameter.dtype)
            first = end

    @torch.no_grad()
    def combine(self, own: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of which each is held by one rank, or in parts, on all ranks, by one collective.

        Args:
            own: with zeros where other ranks hold it; None where another rank holds the tensor.
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
        flat = self._sums(flat)
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

    @torch.no_grad()
    def collect_bucket(self, wanted: Mapping[int, Sequence[tuple[Part, Tensor]]], device: torch.device) -> None:
        """Fill whole tensors on some ranks, by one collective, which goes by nccl between GPUs.

        Args:
            wanted: by rank that gets them: parts of tensors, in their types, and these; those of other ranks may be on
                no device.
            device: of all that is given here.
        """
        empty = torch.empty(_ALIGNMENT, dtype=torch.uint8, device=device)
        sent, given = [empty[:0]], [0] * self.size
        for owner, parts in sorted(wanted.items()):
            held = [part.own.flatten().view(torch.uint8) for part, _ in parts if self.rank in part.ranks]
            if held and owner != self.rank:  # its own are there
                length = sum(map(len, held))
                sent += [*held, empty[: -length % _ALIGNMENT]]
                given[owner] = length + -length % _ALIGNMENT
        mine = wanted.get(self.rank, ())
        lengths = [
            sum(part.of(whole, rank).nbytes for part, whole in mine if rank in part.ranks) for rank in range(self.size)
        ]
        lengths[self.rank] = 0
        received = [length + -length % _ALIGNMENT for length in lengths]
        found = empty.new_empty(sum(received))
        dist.all_to_all_single(found, torch.cat(sent), received, given)
        for rank, row in enumerate(found.split(received)):
            first = 0
            for part, whole in mine:
                if rank not in part.ranks:
                    continue
                place = part.of(whole, rank)
                if rank == self.rank:
                    place.copy_(part.own)
                else:
                    place.copy_(row[first : first + place.nbytes].view(place.dtype).view(place.shape))
                    first += place.nbytes

    def close(self) -> None:
        """Leave the group."""
        self._sums.close()
        dist.destroy_process_group()

    def _reduced(self, counts: Sequence[int], operation: Any) -> list[int]:
        values = torch.tensor(counts, dtype=torch.int64)
        dist.all_reduce(values, operation)
        return values.tolist()


class SharedSums:
    """Sums of float32 tensors over the ranks of one machine, by memory that all of them map.

    By gloo, whose threads wake up two dozen times for it, the two sums of a step of the default policy take 5 % of its
    CPU time. Tensors that are large or not in the memory of the CPU go there all the same, and all of them where
    memory cannot be shared. Terms are added in the order of the ranks.
    """

    def __init__(self, rank: int, size: int, store: dist.Store | None) -> None:
        self._rank, self._size, self._store = rank, size, store
        self._is_possible = store is not None and hasattr(os, "memfd_create")  # Linux
        self._peers: list[socket.socket] = []  # of rank 0 all others, of these rank 0
        self._rows = torch.empty(2, size, 0)  # two buffers in turn: a rank ahead writes the one that is not read
        self._turn = 0

    def __call__(self, flat: Tensor) -> Tensor:
        """The sum of a flat tensor over the ranks; the tensor's own content is undefined after that.

        Raises:
            LeftRankError: another rank has ended, or has not come here for half an hour.
        """
        count = flat.numel()
        is_small = 2 * self._size * count * flat.element_size() <= _SHARED_BYTES
        is_shared = self._is_possible and is_small and flat.device.type == "cpu" and flat.dtype == torch.float32
        if is_shared and not self._peers:
            is_shared = self._is_possible = self._connect()
        if not is_shared:
            dist.all_reduce(flat)
            return flat
        try:
            if count > self._rows.shape[-1]:
                self._grow(count)
            rows = self._rows[self._turn, :, :count]
            self._turn = 1 - self._turn
            rows[self._rank] = flat
            self._wait()
        except OSError as error:
            self.close()  # ranks that wait for this one must not wait for its end
            raise LeftRankError(f"another rank has left the group: {error}") from error
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        return total

    def close(self) -> None:
        """Leave: ranks that wait for this one fail."""
        for peer in self._peers:
            peer.close()
        self._peers, self._is_possible = [], False

    def _wait(self) -> None:
        """Return when all ranks have come here."""
        for step in (self._receive, self._send) if self._rank == 0 else (self._send, self._receive):
            step()

    def _send(self) -> None:
        for peer in self._peers:
            peer.sendall(b".")

    def _receive(self) -> None:
        for peer in self._peers:
            if not peer.recv(1):
                raise ConnectionResetError("its end of the connection is closed")

    def _grow(self, count: int) -> None:
        """Map memory for tensors of this length; it ends with the last process that maps it."""
        size = 2 * self._size * count * self._rows.element_size()
        if self._rank == 0:
            own = os.memfd_create("sums of the ranks")
        else:
            _, numbers, _, _ = socket.recv_fds(self._peers[0], 1, 1)
            if not numbers:
                raise ConnectionResetError("its end of the connection is closed")
            own = numbers[0]
        try:
            if self._rank == 0:
                os.ftruncate(own, size)
                for peer in self._peers:
                    socket.send_fds(peer, [b"."], [own])
            self._rows = torch.frombuffer(mmap.mmap(own, size), dtype=torch.float32).view(2, self._size, count)
        finally:
            os.close(own)

    def _connect(self) -> bool:
        """Connect rank 0 with the others, in a folder that this user alone can open; whether all ranks could."""
        assert self._store is not None
        dist.all_reduce(torch.zeros(1))  # a rank that has failed before never connects, and this raises
        try:
            if self._rank == 0:
                self._peers = self._accept(self._store)
            else:
                peer = socket.socket(socket.AF_UNIX)
                self._peers = [peer]
                peer.connect(self._store.get(_SUMS).decode())
            for peer in self._peers:
                peer.settimeout(_PATIENCE.total_seconds())
            failed = 0
        except OSError:  # a path that is too long, for one
            failed = 1
        failures = torch.tensor([failed])
        dist.all_reduce(failures)
        if not failures.item():
            return True
        self.close()
        return False

    def _accept(self, store: dist.Store) -> list[socket.socket]:
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            place = f"{folder}/ranks"
            try:
                listener.bind(place)
                listener.listen(self._size)
            finally:
                store.set(_SUMS, place)
            listener.settimeout(_CONNECTING)
            return [listener.accept()[0] for _ in range(1, self._size)]


def has_lost_a_rank(error: Exception) -> bool:
    """Whether this is what a collective raises that does not end, because another rank has failed or ended."""
    return isinstance(error, (LeftRankError, dist.DistError)) or (type(error) is RuntimeError and "gloo" in str(error))
