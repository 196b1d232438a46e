"""Sends buckets of weights to servers from the process that has the weights.

That is the driver, or ranks: rank 0, which broadcasts, or with `ipc` in a Ray cluster the first rank of each server,
whose GPU the server sees. `weight_update.py` has what the driver asks of the servers meanwhile. Two buckets are in
memory, one is sent while the next is collected; a collective takes up to two more.

The body of SGLang's `update_weights_from_tensor` is a pickle, which is written here and never read. With `tensors` it
contains them by value, so a server may run on another machine. With `ipc` it contains one handle of a bucket, which
stays in the memory of a GPU, and where in it the tensors lie; a server of this machine opens it.
"""

from __future__ import annotations

import base64
import inspect
import pickle
import socket
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.multiprocessing import reductions

from geo_sokoban_pipeline.policies.weights import CAN_SHARE, SharedBytes, TensorSpec, cut
from geo_sokoban_pipeline.processes import gloo_on, interface_of, with_variable
from geo_sokoban_pipeline.progress import waiting

_JOIN_TIME = timedelta(seconds=60)
# By the address of a server: a text, in pieces, for each of its processes.
Handles = Mapping[str, Sequence[Sequence[bytes]]]


class Sender(Protocol):
    """The buckets of an update, each collected while the one before is sent.

    The methods block. All but `give_up` are called one after the other.
    """

    def advance(self, specs: Mapping[str, TensorSpec] | None) -> str | None:
        """Collect the next bucket, while the last one is broadcast, where there is a process group.

        Args:
            specs: of the next bucket; None: the last one was the last.

        Returns:
            What failed of the broadcast.
        """

    def pack_handles(self, specs: Mapping[str, TensorSpec], counts: Mapping[str, int]) -> Handles:
        """Texts by which servers open the last bucket, which is on a GPU then.

        Args:
            counts: processes of each server by its address.
        """

    def invite(self, urls: Sequence[str], ranks: Sequence[int], device: str, seconds: float) -> list[dict[str, Any]]:
        """Open a process group with servers, after the first bucket, with `join` to follow.

        Args:
            ranks: processes of each server.
            device: on which the servers compute; `cpu` also for those on the sender's own GPU.
            seconds: that a broadcast may take.

        Returns:
            For each server the body of the command by which it joins.
        """

    def join(self) -> str | None:
        """Join the process group; returns what failed."""

    def give_up(self) -> None:
        """End a wait for servers, in `join` and, by nccl, in a broadcast; any thread may call this."""

    def leave(self) -> None:
        """Leave the process group, and drop the buckets."""


class BucketSender:
    """`Sender` of this process.

    Args:
        collect: see `WeightSource`; None where other processes have the bucket.
        largest: bytes of the largest bucket, for memory of the CPU that is used again; None: each has its own.
        slots: buckets in memory; 1: each is copied before the next one is collected.
    """

    def __init__(
        self,
        collect: Callable[[Mapping[str, TensorSpec], SharedBytes | None], Tensor | None],
        largest: int | None = None,
        slots: int = 2,
    ) -> None:
        self._collect, self._largest, self._slots = collect, largest, slots
        self._memory: list[SharedBytes] = []
        self._held: list[Tensor] = []  # the bucket that is sent, and the newest
        self._number = 0
        self._group: UpdateGroup | None = None

    def advance(self, specs: Mapping[str, TensorSpec] | None) -> str | None:
        with ThreadPoolExecutor(1) as aside:
            sent = None if self._group is None else aside.submit(self._group.broadcast, self._held[-1])
            del self._held[: len(self._held) - self._slots + 1]
            if specs is not None:
                self._take(specs)
            with waiting():  # servers have a limit of their own
                fault = None if sent is None else sent.exception()
        return None if fault is None else str(fault)

    @property
    def newest(self) -> Tensor:
        """The bucket that was collected last."""
        return self._held[-1]

    def pack_handles(self, specs: Mapping[str, TensorSpec], counts: Mapping[str, int]) -> Handles:
        if counts:
            self._held[-1] = put_on_gpu(self._held[-1])
        return {url: [pack_handle(self._held[-1], specs) for _ in range(count)] for url, count in counts.items()}

    def invite(self, urls: Sequence[str], ranks: Sequence[int], device: str, seconds: float) -> list[dict[str, Any]]:
        backend = "nccl" if device == self.newest.device.type == "cuda" else "gloo"
        self._group = UpdateGroup(urls, ranks, backend, seconds)
        return self._group.invitations

    def join(self) -> str | None:
        assert self._group is not None
        try:
            with waiting():
                self._group.join()
        except (RuntimeError, ValueError) as error:
            return str(error)
        return None

    def give_up(self) -> None:
        if self._group is not None:
            self._group.give_up()

    def leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.leave()
        self._held, self._number = [], 0
        if torch.cuda.is_initialized():  # servers have the rest of this GPU
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    def _take(self, specs: Mapping[str, TensorSpec]) -> None:
        memory = self._memory[self._number % self._slots] if self._memory else None
        bucket = self._collect(specs, memory)
        self._number += 1
        if bucket is None:
            return
        self._held.append(bucket)
        # Pages that are there need not be made.
        if self._largest is not None and not self._memory and bucket.device.type == "cpu" and CAN_SHARE:
            self._memory = [SharedBytes(self._largest) for _ in range(self._slots)]


def pack_tensors(flat: Tensor, specs: Mapping[str, TensorSpec]) -> list[bytes]:
    """Base64 text, in pieces, of a pickled list of (name, CPU tensor): the weights of a bucket on any device."""
    writer = _Base64Writer()
    pickler = pickle.Pickler(writer, pickle.HIGHEST_PROTOCOL)
    pickler.fast = True  # without a memo, which would keep every tensor
    pickler.dump(_Copies(cut(flat, specs)))
    return writer.close()


def pack_handle(flat: Tensor, specs: Mapping[str, TensorSpec]) -> list[bytes]:
    """Base64 text of a pickled bucket with a handle of its memory, in SGLang's format, for one process of a server.

    The memory must live until the server has answered. Each process needs a handle of its own, because torch counts who
    has opened them.
    """
    ends = list(accumulate(spec.bytes for spec in specs.values()))
    # As `FlattenedTensorMetadata`, which this environment has not.
    metadata = [
        SimpleNamespace(
            name=name,
            shape=spec.shape,
            dtype=getattr(torch, spec.dtype),
            start_idx=end - spec.bytes,
            end_idx=end,
            numel=spec.bytes,
        )
        for (name, spec), end in zip(specs.items(), ends, strict=True)
    ]
    writer = _Base64Writer()
    pickle.Pickler(writer, pickle.HIGHEST_PROTOCOL).dump({"flattened_tensor": Handle(flat), "metadata": metadata})
    return writer.close()


def put_on_gpu(flat: Tensor) -> Tensor:
    """A bucket in the memory of a GPU, for another process to read."""
    flat = flat.to("cuda")
    torch.cuda.synchronize()
    return flat


@dataclass
class Handle:
    """Pickled as torch pickles a GPU tensor for another process, with the GPU's identifier in place of its number.

    A server counts the GPUs that it sees, so a number may mean another GPU there. SGLang accepts either.
    """

    tensor: Tensor

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, values = reductions.reduce_tensor(self.tensor)
        place = list(inspect.signature(rebuild).parameters).index("storage_device")
        identifier = str(torch.cuda.get_device_properties(values[place]).uuid)
        return rebuild, (*values[:place], identifier, *values[place + 1 :])


@dataclass
class _Copies:
    """Pickled as a list, item by item; each is copied before, because a pickled view would contain its whole bucket."""

    named: Iterable[tuple[str, Tensor]]

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (), None, ((name, tensor.to("cpu", copy=True)) for name, tensor in self.named)


class _Base64Writer:
    """A binary file whose content is kept as pieces of base64 text."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._rest = b""  # fewer than three bytes, which base64 writes together

    def write(self, data: Any) -> int:
        """Append bytes."""
        view = memoryview(data)
        count = view.nbytes
        if self._rest:
            missing = 3 - len(self._rest)
            self._rest, view = self._rest + bytes(view[:missing]), view[missing:]
            if len(self._rest) < 3:
                return count
            self._pieces.append(base64.b64encode(self._rest))
        if end := len(view) - len(view) % 3:
            self._pieces.append(base64.b64encode(view[:end]))
        self._rest = bytes(view[end:])
        return count

    def close(self) -> list[bytes]:
        """The pieces."""
        return [*self._pieces, base64.b64encode(self._rest)]


class UpdateGroup:
    """A process group of this process, as rank 0, and the ranks of servers, in which weights are broadcast.

    SGLang makes its end by the function of torch that is called here: both ends must ask the store for the same keys.
    The group has nothing to do with that of the training ranks. Its methods block.

    Args:
        urls: of the servers.
        ranks: processes of each server that need the weights.
        backend: `gloo` or `nccl`.
        seconds: that a broadcast may take.

    Attributes:
        name: of the group.
    """

    def __init__(self, urls: Sequence[str], ranks: Sequence[int], backend: str, seconds: float) -> None:
        self.name = f"weights-{uuid.uuid4().hex[:12]}"
        self._ranks, self._backend, self._seconds = ranks, backend, seconds
        self._size = 1 + sum(ranks)
        self._host = own_address(urls)
        listener = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET)
        listener.bind((self._host, 0))
        listener.listen(self._size)
        self._port: int = listener.getsockname()[1]
        self._store: dist.Store | None = dist.TCPStore(
            self._host, self._port, self._size, True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        # Another end of the store than the one that serves it, which `give_up` closes.
        self._end = dist.TCPStore(self._host, self._port, self._size, False, timeout=_JOIN_TIME, wait_for_workers=False)
        self._group: dist.ProcessGroup | None = None

    @property
    def invitations(self) -> list[dict[str, Any]]:
        """Bodies of the commands by which the servers join."""
        common = {
            "master_address": self._host,
            "master_port": self._port,
            "world_size": self._size,
            "group_name": self.name,
            "backend": self._backend,
        }
        return [{**common, "rank_offset": first} for first in accumulate(self._ranks[:-1], initial=1)]

    def join(self) -> None:
        """Join; returns when all ranks have joined, and raises when the store is closed before that."""
        # The watchdog of nccl would end this process with a lost server.
        watchdog = with_variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        with gloo_on(None if self._host in ("127.0.0.1", "::1") else interface_of(self._host)), watchdog:
            made, _ = distributed_c10d._new_process_group_helper(
                self._size,
                0,
                [],
                dist.Backend(self._backend),
                dist.PrefixStore(self.name, self._end),
                group_name=self.name,
                timeout=_JOIN_TIME,
            )
        distributed_c10d._world.pg_group_ranks[made] = {rank: rank for rank in range(self._size)}
        distributed_c10d._set_pg_timeout(timedelta(seconds=self._seconds), made)
        self._group = made

    def broadcast(self, flat: Tensor) -> None:
        """Send a bucket to all ranks; returns when it is sent."""
        flat = flat if self._backend == "nccl" else flat.cpu()
        dist.broadcast(flat, 0, self._group)
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)

    def give_up(self) -> None:
        """End the store by which ranks find each other, and a broadcast by nccl here; those that wait fail."""
        self._store = None
        if self._group is not None and self._backend == "nccl":
            distributed_c10d._abort_process_group(self._group)

    def leave(self) -> None:
        """Close the connections; waiting calls of other ranks fail."""
        self._store, made = None, self._group
        self._group = None
        if made in distributed_c10d._world.pg_map:  # it has not been aborted
            dist.destroy_process_group(made)


def own_address(urls: Sequence[str]) -> str:
    """Address of this machine under which all of these servers reach it."""
    own = [_towards(url) for url in urls]
    return next((address for address in own if address not in ("127.0.0.1", "::1")), own[0])


def _towards(url: str) -> str:
    parts = urlsplit(url)
    place = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(place[0], socket.SOCK_DGRAM) as probe:
        probe.connect(place[4])  # finds the route; nothing is sent
        return probe.getsockname()[0]
