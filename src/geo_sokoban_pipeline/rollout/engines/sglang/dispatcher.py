"""Requests in flight: each is asked for until it is answered, on a server that lives and has the right weights.

A request holds its whole conversation, so what a lost server had of it is read again elsewhere: nothing of an episode
is lost but the reply that was being sampled, and nothing of that is kept.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from geo_sokoban_pipeline.rollout.engines.base import Request, Result
from geo_sokoban_pipeline.rollout.engines.sglang.faults import (
    BadReply,
    EngineStopped,
    ServerFault,
    ServerLost,
    WrongServer,
    pause_before,
)
from geo_sokoban_pipeline.rollout.engines.sglang.fleet import Fleet
from geo_sokoban_pipeline.rollout.engines.sglang.member import Member
from geo_sokoban_pipeline.rollout.engines.sglang.wire import Reply, Terms, read_reply, write_request

_REPEAT_ABORT_SECONDS = 0.5


class Dispatcher:
    """Asks the servers of a fleet.

    Args:
        terms: what policy and servers have agreed on.
        version_of: version of the weights with a tag; raises KeyError for a tag nobody here has given.

    Attributes:
        version: of the weights that servers have now.
        cached_tokens: per conversation, tokens of its last prompt that a server had not to read again.
    """

    def __init__(self, fleet: Fleet, terms: Terms, version_of: Callable[[str], int]) -> None:
        self.fleet = fleet
        self.terms = terms
        self.version = 0
        self.cached_tokens: dict[int, int] = {}
        self._version_of = version_of
        self._aborted: dict[int, asyncio.Event] = {}
        self._numbers = itertools.count()
        self._name = uuid.uuid4().hex[:8]

    async def answer(self, request: Request) -> Result:
        """The reply to a request.

        Raises:
            EngineStopped: tries or restarts are used up.
            RequestRefused, WrongServer: another try would end alike.
        """
        aborted = self._aborted[request.id] = asyncio.Event()
        try:
            return await self._answer(request, aborted)
        finally:
            if self._aborted.get(request.id) is aborted:
                del self._aborted[request.id]

    def abort(self, identity: int) -> None:
        """Have a request stopped; unknown ones are ignored."""
        if identity in self._aborted:
            self._aborted[identity].set()

    async def _answer(self, request: Request, aborted: asyncio.Event) -> Result:
        faults = self.fleet.options.faults
        fault: ServerFault | None = None
        for attempt in range(faults.tries):
            await asyncio.sleep(pause_before(attempt, faults))
            member = self.fleet.member_of(str(request.id))
            async with member.places:
                life = await self.fleet.settle(member)
                if aborted.is_set():
                    return self._nothing(request)
                try:
                    return self._result(request, await self._ask(member, request, aborted))
                except (ServerLost, BadReply) as seen:
                    fault = seen
                    await self.fleet.recover(member, life, seen)
        raise EngineStopped(
            f"a reply was asked for {faults.tries} times (rollout.server.faults.tries) without success; at last: "
            f"{fault}. The same command continues from the last checkpoint."
        ) from fault

    async def _ask(self, member: Member, request: Request, aborted: asyncio.Event) -> Reply:
        """One try."""
        rid = f"{self._name}-{next(self._numbers)}."  # servers stop whatever begins with it
        body = write_request(request, self.terms, rid, bias=self._bias)
        asked = self.fleet.asked_with(member)
        for one in asked:
            one.in_flight += 1
        try:
            answer = await self._exchange(member, body, f"{self._name}-{request.id}", rid, aborted)
        finally:
            for one in asked:
                one.in_flight -= 1
        reply = read_reply(answer, request, self.terms)
        if reply.finish_reason == "abort" and not aborted.is_set():
            raise BadReply(f"{member.url} aborted a request that nobody here has aborted")
        return reply

    async def _exchange(self, member: Member, body: dict[str, Any], key: str, rid: str, aborted: asyncio.Event) -> Any:
        """Send a body and wait for the answer, for a sign that the server hangs, or for the wish to abort."""
        reply = asyncio.ensure_future(self.fleet.entrance_of(member).generate(body, key))
        stopped = asyncio.ensure_future(aborted.wait())
        hangs = {asyncio.ensure_future(one.hung.wait()): one for one in self.fleet.asked_with(member)}
        tasks = {reply, stopped, *hangs}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            while stopped.done() and not any(task.done() for task in (reply, *hangs)):
                # It may have come before the request did. What the server has prepared but not queued runs to its end.
                await self.fleet.abort(rid, member)
                await asyncio.wait({reply, *hangs}, timeout=_REPEAT_ABORT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not reply.done():
                urls = ", ".join(one.url for hung, one in hangs.items() if hung.done())
                raise ServerLost(f"{urls} hangs: it computes nothing")
            return reply.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _nothing(self, request: Request) -> Result:
        return Result(request.id, np.empty(0, np.int32), np.empty(0, np.float32), "abort", self.version)

    def _result(self, request: Request, reply: Reply) -> Result:
        spans = tuple((self._version(tag), start, end) for tag, start, end in reply.spans)
        self.cached_tokens[request.id] = reply.cached_tokens
        return Result(
            id=request.id,
            token_ids=reply.token_ids,
            log_probs=reply.log_probs,
            finish_reason=reply.finish_reason,
            weight_version=spans[0][0] if spans else self.version,
            weight_spans=spans,
        )

    def _version(self, tag: str) -> int:
        try:
            return self._version_of(tag)
        except KeyError:
            raise WrongServer(
                f"a reply was sampled with weights named {tag!r}, which this run has not sent: somebody else updates "
                "the same server. Give each run servers of its own."
            ) from None

    @cached_property
    def _bias(self) -> dict[str, float]:
        return self.terms.bias
