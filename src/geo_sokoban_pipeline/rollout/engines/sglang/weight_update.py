"""Sends weights to servers in one of four ways, and verifies their tag afterwards.

Through a folder that the servers read (`disk`), in requests (`tensors`), by a broadcast in a process group of the
servers and the process that has the weights (`group`), or as handles of GPU memory that the servers open (`ipc`).
Weights are read once for all servers, in buckets. The next one is collected and encoded while one is sent
(`sender.py`), so that process needs the memory of two. A set of weights has a unique tag. The server repeats it with
every response, so every token is attributed to the weights that sampled it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from geo_sokoban_pipeline.config.server import ServerOptions
from geo_sokoban_pipeline.policies.weights import TensorSpec, WeightSource, plan_buckets
from geo_sokoban_pipeline.rollout.engines.sglang.client import (
    BadResponse,
    RequestRefused,
    ServerClient,
    ServerFault,
    ServerLost,
    UpdateInterrupted,
    WrongServer,
)
from geo_sokoban_pipeline.rollout.engines.sglang.sender import BucketSender, Handles, Sender, pack_tensors

Plan = Sequence[Mapping[str, TensorSpec]]
Advance = Callable[[Mapping[str, TensorSpec] | None], str | None]  # see `Sender`


class _BrokenGroupError(Exception):
    """This end of a process group failed; the message says how."""


class WeightUpdate:
    """An update of several servers at once; a server with a fault is left out of what follows.

    Args:
        ranks: processes of each server; each loads its part of every tensor.
        options: of the servers.
        way: see `ServerOptions.way`.
        numbers: of the servers, in order, where they lie on GPUs of ranks.

    Attributes:
        faults: of servers that do not get the weights.
    """

    def __init__(
        self, ranks: Mapping[ServerClient, int], options: ServerOptions, way: str, numbers: Sequence[int] = ()
    ) -> None:
        self.faults: dict[ServerClient, ServerFault] = {}
        self._ranks, self._options, self._way = dict(ranks), options, way
        self._places = {
            client.url: number * options.tensor_parallel for client, number in zip(ranks, numbers, strict=False)
        }
        self._members: tuple[ServerClient, ...] = ()  # of the process group
        self._group_name = ""
        self._work: asyncio.Future[Any] | None = None  # of a thread

    async def send(self, weights: WeightSource, tag: str) -> None:
        """Send new weights to the servers, which drop their caches.

        Args:
            weights: in a folder that the servers read, with update `disk`. `state` raises once they have changed.
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
            await self._each(lambda client: client.command("/end_weight_update", {}))
        await self._each(lambda client: _check_tag(client, tag))

    async def _send_buckets(self, weights: WeightSource, tag: str) -> None:
        is_text = self._way == "tensors"
        # Of an encoded bucket only the text, a third longer, is kept; two are in memory beside the next bucket.
        plan = list(plan_buckets(weights.specs, max(1, self._options.bucket_bytes // (2 if is_text else 1))))
        sender: Sender
        if is_text or weights.sender is None:
            largest = max(sum(spec.bytes for spec in specs.values()) for specs in plan)
            sender = BucketSender(weights.collect, largest, slots=1 if is_text else 2)
        else:
            sender = await self._in_thread(weights.sender, self._places if self._way == "ipc" else {})

        def advance(specs: Mapping[str, TensorSpec] | None) -> str | None:
            fault = sender.advance(specs)
            if specs is not None:
                weights.state()
            return fault

        try:
            await (self._broadcast if self._way == "group" else self._post)(sender, advance, plan, tag)
        finally:
            if self._work is not None and not self._work.done():  # this was cancelled, and the thread goes on
                await self._give_up(sender)
                await asyncio.wait([self._work])
            # At the same time: members of a group of nccl wait for each other to leave.
            await asyncio.gather(self._in_thread(sender.leave), self._dismiss())

    async def _post(self, sender: Sender, advance: Advance, plan: Plan, tag: str) -> None:
        """Send buckets in requests: as text, or as handles; the next one is collected and encoded meanwhile.

        A bucket with handles lives until all servers have answered.
        """
        is_text = self._way == "tensors"

        def collect(specs: Mapping[str, TensorSpec] | None) -> Sequence[bytes]:
            """The text of a bucket; none with handles, of which each process needs its own."""
            if specs is None:
                return ()
            advance(specs)
            return pack_tensors(sender.newest, specs) if isinstance(sender, BucketSender) and is_text else ()

        text = await self._in_thread(collect, plan[0])
        for specs, following in zip(plan, (*plan[1:], None), strict=True):
            if not self._ranks:
                return
            counts = {client.url: count for client, count in self._ranks.items()}
            fields = _fields(tag, is_last=following is None)
            if is_text:
                payloads = {url: [text] * count for url, count in counts.items()}
            else:
                payloads = await self._in_thread(sender.pack_handles, specs, counts)
                fields["load_format"] = "flattened_bucket"
            post = self._each(partial(_post_packed, payloads, fields))
            text = await _both(post, self._in_thread(collect, following))

    async def _broadcast(self, sender: Sender, advance: Advance, plan: Plan, tag: str) -> None:
        """Send buckets in a process group with the servers, which lives for this update."""
        await self._in_thread(advance, plan[0])
        if not self._ranks:
            return
        options, members = self._options, tuple(self._ranks)
        device = "cpu" if options.colocated else options.device  # nccl takes one process a GPU
        given = [client.url for client in members], [*self._ranks.values()], device
        invited = await self._in_thread(sender.invite, *given, options.faults.control_timeout)
        self._members, self._group_name = members, invited[0]["group_name"]
        await self._together(sender, "/init_weights_update_group", invited, sender.join)
        for specs, following in zip(plan, (*plan[1:], None), strict=True):
            if not self._ranks:
                return
            body = {**_fields(tag, is_last=following is None), **describe_bucket(specs), "group_name": self._group_name}
            own = partial(advance, following)
            await self._together(sender, "/update_weights_from_distributed", [body] * len(members), own)

    async def _together(
        self, sender: Sender, path: str, bodies: Sequence[dict[str, Any]], own: Callable[[], str | None]
    ) -> None:
        """Command all members of the group, while the sender does its part.

        Where one is lost, all others have to be sent everything again.

        Args:
            own: returns what failed of the group.
        """
        members = self._members

        async def take_part() -> None:
            if (fault := await self._in_thread(own)) is not None:
                raise _BrokenGroupError(fault)

        pairs = zip(members, bodies, strict=True)
        commands = [asyncio.ensure_future(client.command(path, body)) for client, body in pairs]
        part, ending = asyncio.ensure_future(take_part()), set[asyncio.Future[None]]()
        try:
            await asyncio.wait({*commands, part}, return_when=asyncio.FIRST_EXCEPTION)
            if any(command.done() and command.exception() for command in commands):
                ending.add(asyncio.ensure_future(self._give_up(sender)))
            (error,) = await asyncio.gather(part, return_exceptions=True)
            if error is not None and not isinstance(error, _BrokenGroupError):
                self._members = ()  # they may wait for a sender that is gone
                raise error
            if error is not None:
                await self._in_thread(sender.leave)  # no member waits for it any longer
            answers = await asyncio.gather(*commands, return_exceptions=True)
        finally:
            for command in commands:
                command.cancel()
            await asyncio.gather(*ending)
        lost = [answer for answer in answers if isinstance(answer, ServerLost | BadResponse)]
        for number, answer in enumerate(answers):
            url = members[number].url
            if lost and answer not in lost:
                answers[number] = UpdateInterrupted(f"{url} has a part of its new weights: {lost[0]}")
            elif error is not None and not isinstance(answer, BaseException):
                answers[number] = BadResponse(f"{url}: a process group of weights failed: {error}")
        self._note(zip(members, answers, strict=True))

    async def _give_up(self, sender: Sender) -> None:
        """End the wait of a sender: for others to join, and for members to take what it sends."""
        await asyncio.gather(asyncio.to_thread(sender.give_up), self._dismiss())

    async def _dismiss(self) -> None:
        """Have all members leave the group; a member closes its connections, and the others stop waiting for it."""
        members, self._members = self._members, ()
        body = {"group_name": self._group_name}
        ends = [client.command("/destroy_weights_update_group", body) for client in members]
        await asyncio.gather(*ends, return_exceptions=True)  # a fault shows in the next command

    async def _in_thread(self, work: Callable[..., Any], *given: Any) -> Any:
        """Call a function in a thread, and return its result; a cancellation does not end the thread."""
        self._work = asyncio.ensure_future(asyncio.to_thread(work, *given))
        return await asyncio.shield(self._work)

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


async def _both(post: Coroutine[Any, Any, None], collect: Coroutine[Any, Any, Any]) -> Any:
    """Run both, and return the result of `collect`; its failure ends `post`."""
    posted, collected = asyncio.ensure_future(post), asyncio.ensure_future(collect)
    await asyncio.wait({posted, collected}, return_when=asyncio.FIRST_EXCEPTION)
    if collected.done() and collected.exception() is not None:
        posted.cancel()
    results = await asyncio.gather(collected, posted, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results[0]


def _fields(tag: str, *, is_last: bool) -> dict[str, Any]:
    """Fields of the command by which a server takes a bucket: its caches go, and its tag changes, with the last."""
    return {"flush_cache": True, "weight_version": tag} if is_last else {"flush_cache": False}


def describe_bucket(specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """Fields of the command by which servers receive a bucket that is broadcast."""
    return {
        "names": list(specs),
        "dtypes": [spec.dtype for spec in specs.values()],
        "shapes": [list(spec.shape) for spec in specs.values()],
        "load_format": "flattened_bucket",
    }


async def _post_packed(payloads: Handles, fields: dict[str, Any], client: ServerClient) -> None:
    """Send a server its payloads, each in pieces of text, one for each of its processes."""
    beginning = json.dumps(fields).removesuffix("}") + ', "serialized_named_tensors": ['
    words: list[bytes] = []
    for packed in payloads[client.url]:
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
