"""Sends weights to servers in one of four ways, and verifies their tag afterwards.

Through a folder that the servers read (`disk`), in requests (`tensors`), by a broadcast in a process group of this
process and the servers (`group`), or as handles of GPU memory that the servers open (`ipc`). Weights are read once for
all servers, in buckets. The next one is collected and encoded while one is sent, so this process needs the memory of
two. A set of weights has a unique tag. The server repeats it with every response, so every token is attributed to the
weights that sampled it.

The body of SGLang's `update_weights_from_tensor` is a pickle, which is written here and never read. With `tensors` it
contains them by value, so a server may run on another machine. With `ipc` it contains one handle of a bucket, which
stays in the memory of a GPU, and where in it the tensors lie; a server of this machine opens it.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import pickle
import socket
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.multiprocessing import reductions

from geo_sokoban_pipeline.config.server import ServerOptions
from geo_sokoban_pipeline.policies.weights import CAN_SHARE, SharedBytes, TensorSpec, WeightSource, cut, plan_buckets
from geo_sokoban_pipeline.processes import gloo_on
from geo_sokoban_pipeline.rollout.engines.sglang.client import (
    BadResponse,
    RequestRefused,
    ServerClient,
    ServerFault,
    ServerLost,
    UpdateInterrupted,
    WrongServer,
)

_JOIN_TIME = timedelta(seconds=60)


class WeightUpdate:
    """An update of several servers at once; a server with a fault is left out of what follows.

    Args:
        ranks: processes of each server; each loads its part of every tensor.
        options: of the servers.
        way: see `ServerOptions.way`.

    Attributes:
        faults: of servers that do not get the weights.
    """

    def __init__(self, ranks: Mapping[ServerClient, int], options: ServerOptions, way: str) -> None:
        self.faults: dict[ServerClient, ServerFault] = {}
        self._ranks, self._options, self._way = dict(ranks), options, way
        self._group: UpdateGroup | None = None
        self._members: tuple[ServerClient, ...] = ()  # of the group
        self._is_dismissed = False

    async def send(self, weights: WeightSource, tag: str) -> None:
        """Send new weights to the servers, which drop their caches.

        Args:
            weights: in a folder that the servers read, with update `disk`.
            tag: name of the weights at the servers.

        Raises:
            RequestRefused: a server refuses them; a retry would fail alike.
            WrongServer: afterwards a server has another tag.
        """
        if self._way == "disk":
            body = {"model_path": str(weights.folder), "weight_version": tag, "flush_cache": True}
            await self._each(lambda client: client.command("/update_weights_from_disk", body))
        else:
            await self._each(_begin)
            await self._send_buckets(weights, tag)
            if self._way == "ipc":
                torch.cuda.empty_cache()  # of buckets: servers have the rest of this GPU
            await self._each(lambda client: client.command("/end_weight_update", {}))
        await self._each(lambda client: _check_tag(client, tag))

    async def _send_buckets(self, weights: WeightSource, tag: str) -> None:
        """Collect and encode a bucket, in a thread, while the one before is sent."""
        prepare, send = {
            "tensors": (pack_tensors, self._post),
            "group": (lambda flat, specs: flat, self._broadcast),
            "ipc": (put_on_gpu, self._share),
        }[self._way]
        # Of an encoded bucket only the text, a third longer, is kept; two are in memory beside the next bucket.
        is_text = self._way == "tensors"
        plan = list(plan_buckets(weights.specs, max(1, self._options.bucket_bytes // (2 if is_text else 1))))
        memory: list[SharedBytes | None] = [None]  # of buckets in turn, if they are in that of the CPU

        def work(number: int) -> Any:
            flat = weights.collect(plan[number], memory[number % len(memory)])
            if number == 0 and flat.device.type == "cpu" and CAN_SHARE:  # pages that are there need not be made
                largest = max(sum(spec.bytes for spec in specs.values()) for specs in plan)
                memory[:] = [SharedBytes(largest) for _ in range(1 if is_text else 2)]
            return prepare(flat, plan[number])

        ahead = asyncio.ensure_future(asyncio.to_thread(work, 0))
        try:
            for number, specs in enumerate(plan):
                ready = await ahead
                if not self._ranks:
                    return
                fields: dict[str, Any] = {"flush_cache": True, "weight_version": tag}
                if number + 1 < len(plan):
                    ahead = asyncio.ensure_future(asyncio.to_thread(work, number + 1))
                    fields = {"flush_cache": False}
                await send(ready, specs, fields)
        finally:
            await asyncio.gather(ahead, return_exceptions=True)
            if self._group is not None:
                self._group.leave()
                await self._dismiss()

    async def _post(self, packed: list[bytes], specs: Mapping[str, TensorSpec], fields: dict[str, Any]) -> None:
        """Send the text of a bucket in requests; a server needs it once for each of its processes."""
        await self._each(lambda client: _post_packed([packed] * self._ranks[client], fields, client))

    async def _share(self, flat: Tensor, specs: Mapping[str, TensorSpec], fields: dict[str, Any]) -> None:
        """Send handles of a bucket, which the servers of this machine copy from the memory of the GPU by themselves."""
        fields = {**fields, "load_format": "flattened_bucket"}
        # The bucket lives until all servers have answered.
        await self._each(
            lambda client: _post_packed([pack_handle(flat, specs) for _ in range(self._ranks[client])], fields, client)
        )
        torch.cuda.ipc_collect()

    async def _broadcast(self, flat: Tensor, specs: Mapping[str, TensorSpec], fields: dict[str, Any]) -> None:
        """Send a bucket in a process group with the servers, which lives for this update."""
        if self._group is None:
            self._members = tuple(self._ranks)
            backend = "nccl" if self._options.device == flat.device.type == "cuda" else "gloo"
            urls = [client.url for client in self._members]
            self._group = UpdateGroup(urls, [*self._ranks.values()], backend, self._options.faults.control_timeout)
            await self._together(self._group, "/init_weights_update_group", self._group.invitations, self._group.join)
            if not self._ranks:
                return
        group = self._group
        bodies = [{**fields, **group.describe(specs)}] * len(self._members)
        await self._together(group, "/update_weights_from_distributed", bodies, lambda: group.broadcast(flat))

    async def _together(
        self, group: UpdateGroup, path: str, bodies: Sequence[dict[str, Any]], own: Callable[[], None]
    ) -> None:
        """Command all members of the group, while this process does its own part in a thread.

        Where one is lost, all others have to be sent everything again.
        """
        pairs = zip(self._members, bodies, strict=True)
        commands = [asyncio.ensure_future(client.command(path, body)) for client, body in pairs]
        part = asyncio.ensure_future(asyncio.to_thread(own))
        try:
            await asyncio.wait({*commands, part}, return_when=asyncio.FIRST_EXCEPTION)
            ending = None
            if not part.done() and any(command.done() and command.exception() for command in commands):
                group.close_store()  # where this process waits for others to join
                ending = asyncio.ensure_future(self._dismiss())  # where it waits for them to take what it sends
            (error,) = await asyncio.gather(part, return_exceptions=True)
            if error is not None:
                group.leave()  # no member waits for this process any longer
            answers = await asyncio.gather(*commands, return_exceptions=True)
            if ending is not None:
                await ending
        finally:
            for command in commands:
                command.cancel()
        lost = [answer for answer in answers if isinstance(answer, ServerLost | BadResponse)]
        for number, answer in enumerate(answers):
            url = self._members[number].url
            if lost and answer not in lost:
                answers[number] = UpdateInterrupted(f"{url} has a part of its new weights: {lost[0]}")
            elif error is not None and not isinstance(answer, BaseException):
                answers[number] = BadResponse(f"{url}: a process group of weights failed: {error}")
        self._note(zip(self._members, answers, strict=True))

    async def _dismiss(self) -> None:
        """Have all members leave the group; a member closes its connections, and the others stop waiting for it."""
        if self._is_dismissed:
            return
        self._is_dismissed = True
        assert self._group is not None
        body = {"group_name": self._group.name}
        ends = [client.command("/destroy_weights_update_group", body) for client in self._members]
        await asyncio.gather(*ends, return_exceptions=True)  # a fault shows in the next command

    async def _each(self, work: Callable[[ServerClient], Coroutine[Any, Any, Any]]) -> None:
        """Do something with every server that has no fault, all at the same time."""
        asked = list(self._ranks)
        self._note(zip(asked, await asyncio.gather(*map(work, asked), return_exceptions=True), strict=True))

    def _note(self, answers: Iterable[tuple[ServerClient, Any]]) -> None:
        """Note what servers answered, or the exceptions that stand for it."""
        for client, answer in answers:
            if isinstance(answer, ServerLost | BadResponse | UpdateInterrupted):
                self.faults[client] = answer
                del self._ranks[client]
            elif isinstance(answer, BaseException):
                raise answer


async def _post_packed(payloads: Sequence[Sequence[bytes]], fields: dict[str, Any], client: ServerClient) -> None:
    """Send one payload, in pieces of text, to each process of a server."""
    beginning = json.dumps(fields).removesuffix("}") + ', "serialized_named_tensors": ['
    words: list[bytes] = []
    for packed in payloads:
        words += [b', "' if words else b'"', *packed, b'"']
    await client.command("/update_weights_from_tensor", [beginning.encode(), *words, b"]}"])


async def _begin(client: ServerClient) -> None:
    try:
        await client.command("/begin_weight_update", {"selector": "all"})
    except RequestRefused:  # an interrupted update is still open
        await client.command("/end_weight_update", {})
        await client.command("/begin_weight_update", {"selector": "all"})


async def _check_tag(client: ServerClient, tag: str) -> None:
    named = await weights_of(client)
    if named != tag:
        raise WrongServer(
            f"{client.url} has the weights {named} after an update to {tag}: another run updates the same server. Give "
            "each run its own servers."
        )


async def weights_of(client: ServerClient) -> str:
    """Tag of the weights that a server has."""
    model = await client.get("/model_info")
    try:
        return str(model["weight_version"])
    except (KeyError, TypeError) as error:
        raise BadResponse(f"{client.url}/model_info has no weight_version") from error


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


def put_on_gpu(flat: Tensor, specs: Mapping[str, TensorSpec]) -> Tensor:
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
        return [{**common, "rank_offset": first} for first in accumulate(self._ranks[:-1], initial=1)]

    def join(self) -> None:
        """Join; returns when all ranks have joined, and raises when the store is closed before that."""
        with gloo_on() if self._host in ("127.0.0.1", "::1") else nullcontext():
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

    def describe(self, specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
        """Fields of the command by which the servers receive a bucket."""
        return {
            "group_name": self.name,
            "names": list(specs),
            "dtypes": [spec.dtype for spec in specs.values()],
            "shapes": [list(spec.shape) for spec in specs.values()],
            "load_format": "flattened_bucket",
        }

    def broadcast(self, flat: Tensor) -> None:
        """Send a bucket to all ranks; returns when it is sent."""
        flat = flat if self._backend == "nccl" else flat.cpu()
        dist.broadcast(flat, 0, self._group)
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)

    def close_store(self) -> None:
        """End the store by which ranks find each other; those that wait for others to join fail."""
        self._store = None

    def leave(self) -> None:
        """Close the connections; waiting calls of other ranks fail."""
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
        return probe.getsockname()[0]
