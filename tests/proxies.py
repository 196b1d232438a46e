"""A proxy in front of a real server that does to some answers what networks and servers do to them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import ClientSession, ClientTimeout, web

from geo_sokoban_pipeline.background import BackgroundLoop
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.engines.sglang.client import TESTED_VERSION

# Changes the bytes of an answer, or says what happens instead of it.
Fault = Callable[[bytes], bytes] | str


class Proxy:
    """Passes everything on to a server, but for the faults that were ordered.

    Attributes:
        url: of the proxy.
        seen: paths of all requests, in order.
        answered: answers of the server to `/generate` so far.
        most: requests to `/generate` that were in flight at once.
        is_closed: whether nothing listens at `url` any more.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.seen: list[str] = []
        self.answered = self.most = 0
        self.is_closed = False
        self._faults: dict[str, list[Fault]] = {}
        self._loop = BackgroundLoop("proxy")
        self.url = self._loop.run(self._open())

    def order(self, path: str, *faults: Fault) -> None:
        """Faults of the next requests to a path: a function of the answer, `drop`, `500`, or so many seconds
        before it is passed on (`wait 3`) or its answer passed back (`late 3`).
        """
        self._faults.setdefault(path, []).extend(faults)

    @property
    def open_requests(self) -> int:
        """Requests to `/generate` without an answer."""
        return self.seen.count("/generate") - self.answered

    def close(self) -> None:
        self.is_closed = True
        self._loop.run(self._close())
        self._loop.close()

    async def _open(self) -> str:
        self._session = ClientSession(timeout=ClientTimeout(total=600))
        application = web.Application(client_max_size=1 << 30)
        application.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _close(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request.path)
        self.most = max(self.most, self.open_requests)
        orders = self._faults.get(request.path, [])
        fault = orders.pop(0) if orders else None
        if fault == "500":
            return web.Response(status=500, text="Internal Server Error")
        if fault == "drop":
            request.transport.close()
            return web.Response()
        if isinstance(fault, str) and fault.startswith("wait"):
            await asyncio.sleep(float(fault.split()[1]))
        status, body = await self._ask(request)
        self.answered += request.path == "/generate"
        if isinstance(fault, str) and fault.startswith("late"):
            await asyncio.sleep(float(fault.split()[1]))
        if callable(fault):
            body = fault(body)
        return web.Response(status=status, body=body, content_type="application/json")

    async def _ask(self, request: web.Request) -> tuple[int, bytes]:
        """Status and body of the server's answer."""
        data = await request.read()
        headers = {"Content-Type": request.headers.get("Content-Type", "application/json")}
        async with self._session.request(
            request.method, self.target + request.path_qs, data=data, headers=headers
        ) as answer:
            return answer.status, await answer.read()


class WithoutModel(Proxy):
    """In place of a server: it only takes weights, and names the last ones as it is asked.

    Attributes:
        payloads: texts of all weights that came by requests, in order.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy, self.tag = policy, ""
        self.payloads: list[str] = []
        super().__init__("")

    async def _ask(self, request: web.Request) -> tuple[int, bytes]:
        body = await request.json() if request.can_read_body else {}
        self.tag = body.get("weight_version", self.tag)
        self.payloads += body.get("serialized_named_tensors", [])
        answer = {
            "model_type": self.policy.model.config.model_type,
            "has_image_understanding": True,
            "version": TESTED_VERSION,
            "tokens": self.policy.codec.encode_text(body.get("prompt", "")).tolist(),
            "weight_version": self.tag,
        }
        return 200, json.dumps(answer).encode()


@contextmanager
def proxied(target: str) -> Iterator[Proxy]:
    """A proxy in front of a server, for the `with` block."""
    proxy = Proxy(target)
    try:
        yield proxy
    finally:
        proxy.close()


def changed(change: Callable[[Any], Any]) -> Callable[[bytes], bytes]:
    """A fault that changes the JSON of an answer: `change` gets it, and gives what is sent instead."""
    return lambda body: json.dumps(change(json.loads(body))).encode()
