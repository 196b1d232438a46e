"""Sends weights to servers in one of four ways, and verifies their tag afterwards.

Through a folder that the servers read (`disk`), in requests (`tensors`), by a broadcast in a process group of this
process and the servers (`group`), or as handles of GPU memory that the servers open (`ipc`). Weights are read once for
all servers, in buckets, so this process needs the memory of two buckets at most. A set of weights has a unique tag. The
server repeats it with every response, so every token is attributed to the weights that sampled it.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from geo_sokoban_pipeline.config.server import ServerOptions
from geo_sokoban_pipeline.rollout.engines.sglang.client import (
    BadResponse,
    RequestRefused,
    ServerClient,
    ServerFault,
    ServerLost,
    UpdateInterrupted,
    WrongServer,
)
from geo_sokoban_pipeline.rollout.engines.sglang.payload import pack_handles, pack_tensors
from geo_sokoban_pipeline.rollout.engines.sglang.update_group import UpdateGroup

Named = Iterator[tuple[str, Tensor]]
Bucket = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class WeightSet:
    """Weights of one version, which can be read several times.

    Attributes:
        version: of the policy.
        tag: their name at the servers.
        tensors: yields them by Hugging Face name, one at a time, in the servers' type.
        folder: that holds them; None: they are sent as tensors.
    """

    version: int
    tag: str
    tensors: Callable[[], Named]
    folder: Path | None = None


@dataclass(frozen=True)
class Receiver:
    """A server that gets weights.

    Attributes:
        ranks: its processes; each loads its part of every tensor.
    """

    client: ServerClient
    ranks: int


def make_tag(version: int) -> str:
    """A unique tag for weights of a version."""
    return f"{version}-{uuid.uuid4().hex[:12]}"


def write_folder(folder: Path, tensors: Named, bucket_bytes: int, stem: str = "") -> None:
    """Write weights into a new folder as safetensors files of one bucket each, for servers to read.

    The library holds a copy of a file while it writes it.

    Args:
        stem: of the files' names.
    """
    folder.mkdir(parents=True)
    for number, (bucket, _) in enumerate(cut_buckets(tensors, bucket_bytes)):
        save_file(
            {name: tensor.cpu().contiguous() for name, tensor in bucket}, folder / f"{stem}{number:05d}.safetensors"
        )


class Delivery:
    """An update of several servers at once; a server with a fault is left out of what follows.

    Attributes:
        receivers: servers without a fault.
        faults: of the others.
    """

    def __init__(self, receivers: Sequence[Receiver]) -> None:
        self.receivers = list(receivers)
        self.faults: dict[Receiver, ServerFault] = {}

    async def each(self, work: Callable[[Receiver], Coroutine[Any, Any, Any]]) -> None:
        """Do something with every receiver, all at the same time.

        Raises:
            RequestRefused, WrongServer: a retry would fail alike.
        """
        asked = list(self.receivers)
        self.note(zip(asked, await asyncio.gather(*map(work, asked), return_exceptions=True), strict=True))

    def note(self, answers: Iterable[tuple[Receiver, Any]]) -> None:
        """Note what receivers answered, or the exceptions that stand for it."""
        for receiver, answer in answers:
            if isinstance(answer, ServerLost | BadResponse | UpdateInterrupted):
                self.faults[receiver] = answer
                self.receivers.remove(receiver)
            elif isinstance(answer, BaseException):
                raise answer


async def send_weights(
    receivers: Sequence[Receiver], weights: WeightSet, options: ServerOptions
) -> dict[Receiver, ServerFault]:
    """Send new weights to servers, which drop their caches.

    Returns:
        Faults of the servers that did not get them.

    Raises:
        RequestRefused: a server refuses them.
        WrongServer: afterwards a server has another tag.
    """
    delivery = Delivery(receivers)
    if weights.folder is not None:
        body = {"model_path": str(weights.folder), "weight_version": weights.tag, "flush_cache": True}
        await delivery.each(lambda one: one.client.command("/update_weights_from_disk", body))
    else:
        await delivery.each(lambda one: _begin(one.client))
        send = {"tensors": _post, "group": _broadcast, "ipc": _share}[options.update]
        await send(delivery, weights, options)
        await delivery.each(lambda one: one.client.command("/end_weight_update", {}))
    await delivery.each(lambda one: _check_tag(one.client, weights.tag))
    return delivery.faults


async def _post(delivery: Delivery, weights: WeightSet, options: ServerOptions) -> None:
    """Send buckets in requests."""
    async with aclosing(_read_buckets(weights, options.bucket_bytes)) as buckets:
        async for bucket, fields in buckets:
            if not delivery.receivers:
                return
            await _post_bucket(delivery, bucket, fields)


async def _post_bucket(delivery: Delivery, bucket: Bucket, fields: dict[str, Any]) -> None:
    """Send a bucket, which is empty afterwards; its text is made once, and dropped before the next bucket is read."""
    packed = await asyncio.to_thread(pack_tensors, bucket)
    await delivery.each(lambda receiver: _post_packed([packed] * receiver.ranks, fields, receiver))


async def _share(delivery: Delivery, weights: WeightSet, options: ServerOptions) -> None:
    """Send handles of buckets, which the servers of this machine copy from the memory of the GPU by themselves."""
    async with aclosing(_read_buckets(weights, options.bucket_bytes)) as buckets:
        async for bucket, fields in buckets:
            if not delivery.receivers:
                return
            await _share_bucket(delivery, bucket, fields)


async def _share_bucket(delivery: Delivery, bucket: Bucket, fields: dict[str, Any]) -> None:
    """Send handles of a bucket, which lives until all servers have answered."""
    for index, (name, tensor) in enumerate(bucket):
        bucket[index] = (name, tensor.detach().to("cuda").contiguous())
    torch.cuda.synchronize()  # another process reads them
    await delivery.each(
        lambda receiver: _post_packed([pack_handles(bucket) for _ in range(receiver.ranks)], fields, receiver)
    )
    bucket.clear()
    torch.cuda.ipc_collect()


async def _post_packed(payloads: Sequence[Sequence[bytes]], fields: dict[str, Any], receiver: Receiver) -> None:
    """Send one payload, in pieces of text, to each process of a server."""
    beginning = json.dumps(fields).removesuffix("}") + ', "serialized_named_tensors": ['
    words: list[bytes] = []
    for packed in payloads:
        words += [b', "' if words else b'"', *packed, b'"']
    await receiver.client.command("/update_weights_from_tensor", [beginning.encode(), *words, b"]}"])


async def _broadcast(delivery: Delivery, weights: WeightSet, options: ServerOptions) -> None:
    """Send buckets in a process group with the receivers, which lives for this update."""
    broadcast: _Broadcast | None = None
    try:
        async with aclosing(_read_buckets(weights, options.bucket_bytes)) as buckets:
            async for bucket, fields in buckets:
                if broadcast is None and delivery.receivers:
                    broadcast = _Broadcast(delivery, options, bucket[0][1].device.type)
                    await broadcast.begin()
                if broadcast is None or not delivery.receivers:
                    return
                await broadcast.send(bucket, fields)
    finally:
        if broadcast is not None:
            await broadcast.close()


class _Broadcast:
    """The receivers of a delivery in a process group. Where one is lost, all others have to be sent everything again.

    Args:
        device: of the weights, `cpu` or `cuda`.
    """

    def __init__(self, delivery: Delivery, options: ServerOptions, device: str) -> None:
        self._delivery, self._members = delivery, tuple(delivery.receivers)
        backend = "nccl" if options.device == device == "cuda" else "gloo"
        urls, ranks = [one.client.url for one in self._members], [one.ranks for one in self._members]
        self._group = UpdateGroup(urls, ranks, backend, options.faults.control_timeout)
        self._is_dismissed = False

    async def begin(self) -> None:
        """Make the group."""
        await self._together("/init_weights_update_group", self._group.invitations, self._group.join)

    async def send(self, bucket: Bucket, fields: dict[str, Any]) -> None:
        """Send a bucket, which is empty afterwards."""
        bodies = [{**fields, **self._group.describe(bucket)}] * len(self._members)
        flat = self._group.flatten(bucket)
        await self._together("/update_weights_from_distributed", bodies, lambda: self._group.broadcast(flat))

    async def close(self) -> None:
        """End the group."""
        self._group.leave()
        await self._dismiss()

    async def _together(self, path: str, bodies: Sequence[dict[str, Any]], own: Callable[[], None]) -> None:
        """Command all members, while this process does its own part in a thread."""
        pairs = zip(self._members, bodies, strict=True)
        commands = [asyncio.ensure_future(one.client.command(path, body)) for one, body in pairs]
        part = asyncio.ensure_future(asyncio.to_thread(own))
        try:
            await asyncio.wait({*commands, part}, return_when=asyncio.FIRST_EXCEPTION)
            ending = None
            if not part.done() and any(command.done() and command.exception() for command in commands):
                self._group.close_store()  # where this process waits for others to join
                ending = asyncio.ensure_future(self._dismiss())  # where it waits for them to take what it sends
            (error,) = await asyncio.gather(part, return_exceptions=True)
            if error is not None:
                self._group.leave()  # no member waits for this process any longer
            answers = await asyncio.gather(*commands, return_exceptions=True)
            if ending is not None:
                await ending
        finally:
            for command in commands:
                command.cancel()
        lost = [answer for answer in answers if isinstance(answer, ServerLost | BadResponse)]
        for number, answer in enumerate(answers):
            url = self._members[number].client.url
            if lost and answer not in lost:
                answers[number] = UpdateInterrupted(f"{url} has a part of its new weights: {lost[0]}")
            elif error is not None and not isinstance(answer, BaseException):
                answers[number] = BadResponse(f"{url}: a process group of weights failed: {error}")
        self._delivery.note(zip(self._members, answers, strict=True))

    async def _dismiss(self) -> None:
        """Have all members leave the group; a member closes its connections, and nobody waits for it any longer."""
        if not self._is_dismissed:
            self._is_dismissed = True
            body = {"group_name": self._group.name}
            ends = [one.client.command("/destroy_weights_update_group", body) for one in self._members]
            await asyncio.gather(*ends, return_exceptions=True)  # a fault shows in the next command


async def _read_buckets(weights: WeightSet, limit: int) -> AsyncGenerator[tuple[Bucket, dict[str, Any]]]:
    """Buckets, and fields of the command that announces each; the tensors are read in a thread."""
    buckets = cut_buckets(weights.tensors(), limit)
    while (found := await asyncio.to_thread(next, buckets, None)) is not None:
        bucket, is_last = found
        yield bucket, {"flush_cache": is_last, **({"weight_version": weights.tag} if is_last else {})}


def cut_buckets(tensors: Named, limit: int) -> Iterator[tuple[Bucket, bool]]:
    """Buckets of consecutive tensors of at most `limit` bytes, and whether each is the last; a larger tensor is alone.

    A caller takes the tensors out of a bucket, so that they are not in memory while the next one fills.
    """
    bucket: Bucket = []
    held = 0
    for name, tensor in tensors:
        if bucket and held + tensor.nbytes > limit:
            yield bucket, False
            bucket, held = [], 0
        bucket.append((name, tensor))
        held += tensor.nbytes
        del tensor  # the bucket alone holds it, until the caller takes it out
    if bucket:
        yield bucket, True


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
