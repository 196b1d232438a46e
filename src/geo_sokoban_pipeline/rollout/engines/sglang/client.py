"""Talks to one server: every question is one HTTP request with a time limit, and every failure one of `faults`.

Nothing is tried again here; whoever asks decides that.
"""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from geo_sokoban_pipeline.options.server import FaultOptions
from geo_sokoban_pipeline.rollout.engines.sglang.faults import BadReply, RequestRefused, ServerLost

ROUTING_KEY = "X-SMG-Routing-Key"
_SHOWN_CHARACTERS = 500
_READY_SECONDS = 10.0  # for answers that need no computing
_PLAIN = ("/abort_request", "/flush_cache")  # answered with plain text, or nothing


class ServerClient:
    """Connections to one server, or to the router in front of several.

    Args:
        url: `http://host:port`.
        connections: that are open at the same time at most.
        key: that the server asks for, sent with every request and shown nowhere; None: it asks for none.
    """

    def __init__(self, url: str, faults: FaultOptions, connections: int, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._faults = faults
        self._connections = connections
        self._opened: aiohttp.ClientSession | None = None

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:  # inside the event loop, which a session belongs to
            # One more than the replies in flight: an update of weights must not wait behind them.
            connector = aiohttp.TCPConnector(limit=self._connections + 1, force_close=False)
            self._opened = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self._opened

    async def generate(self, body: dict[str, Any], key: str) -> Any:
        """Ask for a reply; `key` names the conversation to a router."""
        return await self._post("/generate", body, self._faults.reply_timeout, {ROUTING_KEY: key})

    async def abort(self, rid: str) -> None:
        """Stop a request; it is then answered with what there is of it."""
        await self._post("/abort_request", {"rid": rid}, _READY_SECONDS)

    async def is_ready(self, path: str = "/ready") -> bool:
        """Whether the server takes requests; False too where nobody listens."""
        return await self._answers(path, _READY_SECONDS)

    async def is_computing(self, seconds: float) -> bool:
        """Whether the server's model computes a token, or is at work on others, within so many seconds."""
        return await self._answers("/health", seconds)

    async def get(self, path: str) -> Any:
        """JSON answer to a question."""
        return await self._ask("GET", path, None, self._faults.control_timeout)

    async def command(self, path: str, body: dict[str, Any]) -> Any:
        """JSON answer to a command that changes the server, such as an update of weights.

        Raises:
            RequestRefused: it answered that it did not succeed.
        """
        answer = await self._post(path, body, self._faults.control_timeout)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise RequestRefused(f"{self.url}{path}: {answer.get('message')}")
        return answer

    async def close(self) -> None:
        """Close the connections."""
        if self._opened is not None:
            await self._opened.close()
            self._opened = None

    async def _answers(self, path: str, seconds: float) -> bool:
        try:
            async with self._session.get(f"{self.url}{path}", timeout=_limit(seconds)) as answer:
                return answer.status == 200
        except (TimeoutError, aiohttp.ClientError, OSError):
            return False

    async def _post(self, path: str, body: Any, seconds: float, headers: dict[str, str] | None = None) -> Any:
        return await self._ask("POST", path, body, seconds, headers)

    async def _ask(
        self, method: str, path: str, body: Any, seconds: float, headers: dict[str, str] | None = None
    ) -> Any:
        where = f"{self.url}{path}"
        try:
            async with self._session.request(
                method, where, json=body, headers=headers, timeout=_limit(seconds)
            ) as answer:
                text = await answer.text(errors="replace")
        except TimeoutError as error:
            raise ServerLost(f"{where} did not answer within {seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerLost(f"{where} is gone ({type(error).__name__}: {error})") from error
        return _read_answer(where, answer.status, text)


def _read_answer(where: str, status: int, text: str) -> Any:
    shown = text[:_SHOWN_CHARACTERS]
    if status >= 500:
        raise BadReply(f"{where} answered {status}: {shown}")
    if status in (401, 403):
        raise RequestRefused(
            f"{where} refused with {status}: it asks for another API key. Name the environment variable that holds it "
            "in rollout.server.api_key_variable."
        )
    if status >= 400:
        raise RequestRefused(f"{where} refused with {status}: {shown}")
    if where.endswith(_PLAIN):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BadReply(f"{where} answered with something that is no JSON: {shown!r}") from error


def _limit(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds)
