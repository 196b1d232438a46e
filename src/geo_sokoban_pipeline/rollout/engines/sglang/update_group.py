"""A process group of this process, as rank 0, and the ranks of servers, in which weights are broadcast.

SGLang makes its end by the function of torch that is called here: both ends must ask the store for the same keys. The
group has nothing to do with that of the training ranks.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from geo_sokoban_pipeline.processes import gloo_on

_JOIN_TIME = timedelta(seconds=60)


class UpdateGroup:
    """The group; its methods block.

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
        # Another end of the store than the one that serves it, which `close_store` closes.
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
        firsts = list(accumulate(self._ranks[:-1], initial=1))
        return [{**common, "rank_offset": first} for first in firsts]

    def join(self) -> None:
        """Join; returns when all ranks have joined, and raises when the store is closed before that."""
        with ExitStack() as place:
            if self._host in ("127.0.0.1", "::1"):
                place.enter_context(gloo_on())
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

    def describe(self, bucket: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
        """Fields of the command by which the servers receive a bucket."""
        return {
            "group_name": self.name,
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "load_format": "flattened_bucket",
        }

    def flatten(self, bucket: list[tuple[str, Tensor]]) -> Tensor:
        """(bytes,) uint8 tensor of a bucket, as it is broadcast; the bucket is empty afterwards."""
        device = bucket[0][1].device if self._backend == "nccl" else torch.device("cpu")
        flat = torch.empty(sum(tensor.nbytes for _, tensor in bucket), dtype=torch.uint8, device=device)
        end = len(flat)
        while bucket:  # each is dropped when it is copied
            tensor = bucket.pop()[1].detach()
            first = end - tensor.nbytes
            flat[first:end].copy_(tensor.contiguous().view(-1).view(torch.uint8))
            end = first
        return flat

    def broadcast(self, flat: Tensor) -> None:
        """Send a tensor to all ranks; returns when it is sent."""
        dist.broadcast(flat, 0, self._group)
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)

    def close_store(self) -> None:
        """End the store by which ranks find each other; those that wait for others to join fail."""
        self._store = None

    def leave(self) -> None:
        """Close the connections; what other ranks wait for fails."""
        self.close_store()
        made, self._group = self._group, None
        if made is not None:
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
        address: str = probe.getsockname()[0]
    return address
