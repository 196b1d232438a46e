"""Rollout engine over SGLang servers, which it launches or attaches to and keeps in sync with the weights.

The caller submits and polls; an event loop in a thread sends the requests. Each request is retried or resubmitted until
a server with the current weights answers it, or until `faults.tries` is reached; a malformed response is dropped whole.

Rollout workers sample with a `FollowingEngine` over the servers of another process, which alone launches, updates and
restarts them. A server that it finds lost is reported, and its requests wait until the other process has brought it
back, with the weights that all responses are to be sampled with.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import shutil
import uuid
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.background import BackgroundLoop
from geo_sokoban_pipeline.config.server import ServerOptions
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.policies.weights import WeightSource
from geo_sokoban_pipeline.progress import waiting
from geo_sokoban_pipeline.rollout.engines.base import Request, Result, empty_result
from geo_sokoban_pipeline.rollout.engines.sglang.client import (
    BadResponse,
    EngineStopped,
    ServerFault,
    ServerLost,
    WrongServer,
)
from geo_sokoban_pipeline.rollout.engines.sglang.servers import (
    HERE,
    Fleet,
    Launcher,
    Server,
    ServerPlace,
    pause_before,
)
from geo_sokoban_pipeline.rollout.engines.sglang.wire import (
    ModelLimits,
    Response,
    read_response,
    room_of,
    write_request,
)
from geo_sokoban_pipeline.runs.scratch import Scratch

_REPEAT_ABORT_SECONDS = 0.5


class SglangEngine:
    """`RolloutEngine` over one or several SGLang servers.

    Args:
        policy: its folder launches the servers, and its model gives the weights.
        options: of the servers.
        launcher: of servers that are launched.

    Attributes:
        version: of the servers' weights.
        tag: name of the servers' weights; empty before the first update.

    Raises:
        ServerLost: a server does not start.
        WrongServer: an attached server has another model, vocabulary or software.
    """

    name = "sglang"
    in_process = False

    def __init__(self, policy: Policy, options: ServerOptions, launcher: Launcher = HERE) -> None:
        self.policy = policy
        self._launcher = launcher
        self.version = 0
        self.tag = ""
        self._options = options
        self._scratch = Scratch(None if options.update_folder is None else Path(options.update_folder))
        self._versions: dict[str, int] = {}
        self._sent: tuple[Hashable, int] | None = None
        self._folder: Path | None = None
        self._answers: queue.SimpleQueue[Result | BaseException] = queue.SimpleQueue()
        self._open: dict[int, Future[None]] = {}
        self._loop = BackgroundLoop("sglang engine")
        self._fleet = self._make_fleet()
        try:
            facts = self._loop.run(self._fleet.start())
        except BaseException:
            self.close()
            raise
        self._dtype = options.dtype or facts.dtype or str(policy.model.dtype).removeprefix("torch.")
        self.software_version = facts.version
        self.seeded = facts.seeded
        self.limits = ModelLimits(
            size=int(policy.model.config.text_config.vocab_size),
            banned=frozenset(policy.banned_ids.tolist()),
            end_ids=policy.end_ids,
            pad_id=policy.codec.image_pad_id,
            merge_size=policy.codec.merge_size,
            context=facts.context,
            longest_prompt=facts.longest_prompt,
        )
        self._dispatcher = Dispatcher(self._fleet, self.limits, self._versions.__getitem__)

    def _make_fleet(self) -> Fleet:
        return Fleet(self._options, self.policy, self._launcher)

    def _way(self, weights: WeightSource) -> str:
        """How these weights reach the servers."""
        if self._launcher is HERE:
            return self._options.way(on_gpu=self.policy.device != "cpu")
        # Servers that Ray places read the memory of ranks, but never that of this process.
        is_there = weights.sender is not None
        way = self._options.way(on_gpu=self._options.colocated and is_there)
        return "group" if way == "ipc" and not is_there else way

    def bring_back(self, number: int, life: int, reason: str) -> None:
        """Restart a server that another process has found lost, unless a later life of it has begun.

        Args:
            number: of the server.

        Raises:
            EngineStopped: it was lost more often than `faults.restarts` allows.
        """
        self._loop.run(self._fleet.bring_back(self.servers[number], life, ServerLost(reason)))

    def place_of(self, number: int) -> ServerPlace:
        """Where a server is, once a restart in progress is over."""
        return self._loop.run(self.servers[number].place())

    @property
    def servers(self) -> list[Server]:
        """Its servers, launched or attached."""
        return self._fleet.servers

    @property
    def restarts(self) -> int:
        """How often a server of it was lost and brought back."""
        return self._fleet.restarts

    @property
    def urls(self) -> list[str]:
        """Addresses of the servers."""
        return [server.url for server in self.servers]

    @property
    def cached_tokens(self) -> dict[int, int]:
        """Per conversation, tokens of its last prompt that a server took from its cache."""
        return self._dispatcher.cached_tokens

    def submit(self, requests: Sequence[Request]) -> None:
        """Start requests; see `RolloutEngine`.

        Raises:
            ValueError: a conversation already has a request in flight.
        """
        if not self.tag:
            self.update_weights(None, self.version)
        for request in requests:
            if request.id in self._open:
                raise ValueError(f"conversation {request.id} already waits for a response; poll or abort it first.")
            self._open[request.id] = self._loop.start(self._answer(request, self._answers))

    def poll(self) -> list[Result]:
        """Results that are ready; waits for one while any request is in flight.

        Raises:
            EngineStopped, RequestRefused, WrongServer: a request failed; all others are cancelled.
        """
        if not self._open:
            return []
        with waiting():  # requests have limits of their own
            answers = [self._answers.get()]
        while not self._answers.empty():
            answers.append(self._answers.get())
        results = []
        for answer in answers:
            if isinstance(answer, BaseException):
                self._drop_all()
                raise answer
            del self._open[answer.id]
            results.append(answer)
        return results

    def abort(self, ids: Iterable[int]) -> None:
        """Abort requests; they return with their tokens so far, as `abort` unless complete."""
        for identity in ids:
            self._loop.call(self._dispatcher.abort, identity)

    def release(self, ids: Iterable[int]) -> None:
        """Drop the conversations' statistics; servers evict their caches themselves."""
        for identity in ids:
            self.cached_tokens.pop(identity, None)

    def update_weights(self, weights: WeightSource | None, version: int) -> None:
        """Send new weights to the servers; requests in flight continue with them.

        Args:
            weights: to be read now, and again for a server that is restarted; None: those of the policy's model. The
                same version of unchanged weights is not sent twice.
        """
        weights = weights or WeightSource.of_model(self.policy.model)
        state = weights.state()
        if self._sent == (state, version) and not any(server.released for server in self.servers):
            return
        self._sent, self.tag = None, f"{version}-{uuid.uuid4().hex[:12]}"
        self._versions[self.tag] = version
        before, self._folder = self._folder, None
        given = weights.cast(dict.fromkeys(weights.specs, self._dtype))
        way = self._way(weights)
        if way == "disk":
            self._folder = self._scratch.path / self.tag
            given.write(self._folder, self._options.bucket_bytes)
            given = WeightSource.of_folder(self._folder)
        else:
            given = replace(given, state=partial(_see_unchanged, weights, version, state))
        self._loop.run(self._fleet.update_weights(given, self.tag, way, pause=bool(self._open)))
        self.version = self._dispatcher.version = version
        self._sent = state, version
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)

    def offload(self) -> None:
        """Have the servers give up the memory of weights and cache until `update_weights`; no request is in flight."""
        self._loop.run(self._fleet.release_memory())

    def close(self) -> None:
        """Close the connections; launched servers stay idle for the next engine, see `servers`."""
        self._drop_all()
        self._loop.run(self._fleet.close())
        self._loop.close()
        self._scratch.cleanup()

    async def _answer(self, request: Request, answers: queue.SimpleQueue[Result | BaseException]) -> None:
        """Put the response into the queue of its submission; `_drop_all` replaces the queue for later requests."""
        try:
            if room_of(request, self.limits) <= 0:
                answers.put(empty_result(request, "length", self.version))
            else:
                answers.put(await self._dispatcher.answer(request))
        except Exception as error:  # `poll` raises it
            answers.put(error)

    def _drop_all(self) -> None:
        for future in self._open.values():
            future.cancel()
        self._open.clear()
        self._answers.put(EngineStopped("the requests were cancelled."))  # a thread may wait for an answer
        self._answers = queue.SimpleQueue()


def _see_unchanged(weights: WeightSource, version: int, state: Hashable) -> Hashable:
    """The state of weights that a version had in it.

    Raises:
        EngineStopped: they have changed since.
    """
    if weights.state() != state:
        raise EngineStopped(
            f"a server needs the weights of version {version} again, but the policy has changed since. Set "
            "rollout.server.update=disk, which stores them, or change the policy only while no request is in flight."
        )
    return state


class Dispatcher:
    """Sends requests to the servers of a fleet, with retries.

    Args:
        limits: ids and limits that hold for policy and servers.
        version_of: version of the weights with a tag; raises KeyError for an unknown tag.

    Attributes:
        version: of the servers' current weights.
        cached_tokens: per conversation, tokens of its last prompt that a server had not to read again.
    """

    def __init__(self, fleet: Fleet, limits: ModelLimits, version_of: Callable[[str], int]) -> None:
        self.fleet = fleet
        self.limits = limits
        self.version = 0
        self.cached_tokens: dict[int, int] = {}
        self._version_of = version_of
        self._aborted: dict[int, asyncio.Event] = {}
        self._numbers = itertools.count()
        self._name = uuid.uuid4().hex[:8]

    async def answer(self, request: Request) -> Result:
        """Get the response to a request.

        Raises:
            EngineStopped: retries or restarts are used up.
            RequestRefused, WrongServer: a retry would fail alike.
        """
        aborted = self._aborted[request.id] = asyncio.Event()
        try:
            return await self._answer(request, aborted)
        finally:
            if self._aborted.get(request.id) is aborted:
                del self._aborted[request.id]

    def abort(self, identity: int) -> None:
        """Abort a request; unknown ids are ignored."""
        if identity in self._aborted:
            self._aborted[identity].set()

    async def _answer(self, request: Request, aborted: asyncio.Event) -> Result:
        faults = self.fleet.options.faults
        fault: ServerFault | None = None
        for attempt in range(faults.tries):
            await asyncio.sleep(pause_before(attempt, faults))
            server = self.fleet.server_of(str(request.id))
            async with server.places:
                life = await self.fleet.settle(server)
                if aborted.is_set():
                    return empty_result(request, "abort", self.version)
                try:
                    return self._result(request, await self._try_once(server, request, aborted))
                except (ServerLost, BadResponse) as seen:
                    fault = seen
                    await self.fleet.recover(server, life, seen)
        raise EngineStopped(
            f"a request failed {faults.tries} times (rollout.server.faults.tries); last fault: {fault}. The same "
            "command continues from the last checkpoint."
        ) from fault

    async def _try_once(self, server: Server, request: Request, aborted: asyncio.Event) -> Response:
        rid = f"{self._name}-{next(self._numbers)}."  # the dot: servers abort all requests whose id begins with a rid
        body = write_request(request, self.limits, rid)
        possible = self.fleet.possible_servers(server)
        for one in possible:
            one.in_flight += 1
        try:
            answer = await self._exchange(server, body, f"{self._name}-{request.id}", rid, aborted)
        finally:
            for one in possible:
                one.in_flight -= 1
        response = read_response(answer, request, self.limits)
        if response.finish_reason == "abort" and not aborted.is_set():
            raise BadResponse(f"{server.url} aborted a request that this run did not abort")
        return response

    async def _exchange(self, server: Server, body: dict[str, Any], key: str, rid: str, aborted: asyncio.Event) -> Any:
        """Send a body and wait for the answer, while watching for a hanging server and for an abort."""
        response = asyncio.ensure_future(self.fleet.client_of(server).generate(body, key))
        stopped = asyncio.ensure_future(aborted.wait())
        hangs = {asyncio.ensure_future(one.hung.wait()): one for one in self.fleet.possible_servers(server)}
        tasks = {response, stopped, *hangs}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            while stopped.done() and not any(task.done() for task in (response, *hangs)):
                # Repeated: an abort may arrive before its request, and has no effect until the server queues it.
                await self.fleet.abort(rid, server)
                await asyncio.wait(
                    {response, *hangs}, timeout=_REPEAT_ABORT_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
            if not response.done():
                urls = ", ".join(one.url for hung, one in hangs.items() if hung.done())
                raise ServerLost(f"{urls} hangs: it computes nothing")
            return response.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _result(self, request: Request, response: Response) -> Result:
        spans = tuple((self._version(tag), start, end) for tag, start, end in response.spans)
        self.cached_tokens[request.id] = response.cached_tokens
        return Result(
            id=request.id,
            token_ids=response.token_ids,
            log_probs=response.log_probs,
            finish_reason=response.finish_reason,
            weight_version=spans[0][0] if spans else self.version,
            weight_spans=spans,
        )

    def _version(self, tag: str) -> int:
        try:
            return self._version_of(tag)
        except KeyError:
            raise WrongServer(
                f"a response was sampled with weights named {tag!r}, which this run has not sent: another run updates "
                "the same server. Give each run its own servers."
            ) from None


# (number of a server, its life, what was seen) → where it is once it is back
Report = Callable[[int, int, str], "Future[ServerPlace]"]


class FollowingEngine(SglangEngine):
    """`RolloutEngine` over servers that another process keeps.

    Args:
        policy: its model may be empty.
        options: of servers that are there; their addresses are those of `places`.
        places: of these servers.
        report: tells the process that keeps them of a lost one.

    Raises:
        ServerLost, WrongServer: as `SglangEngine`.
    """

    def __init__(self, policy: Policy, options: ServerOptions, places: Sequence[ServerPlace], report: Report) -> None:
        self._places, self._report = places, report
        super().__init__(policy, options)

    def follow(self, tag: str, version: int, places: Sequence[ServerPlace]) -> None:
        """Note the weights that the servers have, and where they are."""
        self._loop.run(self._following.move_to(places))
        self.tag, self._versions[tag] = tag, version
        self.version = self._dispatcher.version = version

    def _make_fleet(self) -> Fleet:
        self._following = FollowingFleet(self._options, self.policy, self._places, self._report)
        return self._following


class FollowingFleet(Fleet):
    """Servers that another process keeps.

    Args:
        places: of these servers.
        report: see `FollowingEngine`.
    """

    def __init__(self, options: ServerOptions, policy: Policy, places: Sequence[ServerPlace], report: Report) -> None:
        super().__init__(options.model_copy(update={"urls": tuple(place.url for place in places)}), policy)
        self._places, self._report = list(places), report

    async def move_to(self, places: Sequence[ServerPlace]) -> None:
        """Take over where the servers are, unless a later life of one is known; no request is in flight."""
        for number, (server, place) in enumerate(zip(self.servers, places, strict=True)):
            if place.life > self._places[number].life:
                self._places[number] = place
                await server.move(place.url)

    async def _begin(self, server: Server) -> None:
        if await server.answers():
            await server.move(server.url)
        else:  # not noticed so far, and only the other process can bring it back
            await self._restart(server, ServerLost(f"{server.url} does not answer"))

    async def _restart(self, server: Server, fault: ServerFault) -> None:
        number = self.servers.index(server)
        life = self._places[number].life
        place = self._places[number] = await asyncio.wrap_future(self._report(number, life, str(fault)))
        await server.move(place.url)
