"""HTTP client of one server: every request has a time limit, and every failure is one of the classes below.

The class decides what follows. After a `ServerLost` the server is restarted and the request resubmitted; after a
`BadResponse` the request is retried; a `RequestRefused` or a `WrongServer` stops the run, because a retry would fail
alike.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from geo_sokoban_pipeline.config.server import FaultOptions
from geo_sokoban_pipeline.runs.storage import read_json

if TYPE_CHECKING:
    from geo_sokoban_pipeline.policies.policy import Policy

logger = logging.getLogger(__name__)
TESTED_VERSION = "0.5.21"
SPARE_TOKENS = 2  # of a server's context that conversations may not use
_SIZES = {
    "text_config": ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    "vision_config": ("depth", "hidden_size", "patch_size", "spatial_merge_size", "out_hidden_size"),
}
ROUTING_KEY = "X-SMG-Routing-Key"
_DTYPES = {"float32": "float32", "float": "float32", "bfloat16": "bfloat16", "float16": "float16", "half": "float16"}
_SHOWN_CHARACTERS = 500
_READY_SECONDS = 10.0  # for answers that need no computing
_PLAIN = ("/abort_request", "/flush_cache")  # answers are plain text or empty
_POLL_SECONDS = 0.5
_SENT_BYTES = 1 << 20

Body = Mapping[str, Any] | Sequence[bytes]


class ServerFault(RuntimeError):
    """Base class of all faults of servers."""


class ServerLost(ServerFault):
    """The server does not answer: it has exited, hangs, or is unreachable."""


class BadResponse(ServerFault):
    """The server answered with an internal error or a malformed response."""


class RequestRefused(ServerFault):
    """The server refuses the request; a retry does not help."""


class UpdateInterrupted(ServerFault):
    """The server has a part of new weights, because another server of the same process group was lost."""


class WrongServer(ServerFault):
    """The server has another model, vocabulary or software than the policy needs."""


class EngineStopped(ServerFault):
    """All retries or restarts are used up; the message has the last fault and the way out."""


class ServerClient:
    """Connections to one server, or to the router in front of several.

    Args:
        url: `http://host:port`.
        connections: maximum number of open connections.
        key: API key, sent with every request and never logged; None: the server needs none.
    """

    def __init__(self, url: str, faults: FaultOptions, connections: int, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._faults = faults
        self._connections = connections
        self._opened: aiohttp.ClientSession | None = None

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:  # created inside the event loop, to which a session belongs
            # One more than the responses in flight, so that an update of weights need not wait for them.
            connector = aiohttp.TCPConnector(limit=self._connections + 1, force_close=False)
            self._opened = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self._opened

    async def generate(self, body: dict[str, Any], key: str) -> Any:
        """Request a response; `key` identifies the conversation for a router."""
        return await self._post("/generate", body, self._faults.reply_timeout, {ROUTING_KEY: key})

    async def abort(self, rid: str) -> None:
        """Abort a request; the server answers it with the tokens so far."""
        await self._post("/abort_request", {"rid": rid}, _READY_SECONDS)

    async def is_ready(self, path: str = "/ready", seconds: float = _READY_SECONDS) -> bool:
        """Whether the server accepts requests, or answers another question of yes or no; False if it is unreachable."""
        try:
            async with self._session.get(f"{self.url}{path}", timeout=aiohttp.ClientTimeout(seconds)) as answer:
                return answer.status == 200
        except (TimeoutError, aiohttp.ClientError, OSError):
            return False

    async def wait_until_ready(self, path: str = "/ready", lost: Callable[[], str | None] | None = None) -> None:
        """Wait until the server accepts requests, for `start_timeout` at most.

        Args:
            lost: returns why the launched process has exited, None while it runs. None: the server is attached.

        Raises:
            ServerLost: the process has exited, or the time is over.
        """
        seconds, began = self._faults.start_timeout, time.monotonic()
        while not await self.is_ready(path):
            reason = None if lost is None else await asyncio.to_thread(lost)  # an actor may answer late
            if reason is not None:
                raise ServerLost(f"{self.url} ended while it started: {reason}")
            if time.monotonic() - began > seconds:
                raise ServerLost(
                    f"{self.url} was not ready within rollout.server.faults.start_timeout={seconds:g} s. See its log, "
                    "or raise the timeout."
                )
            await asyncio.sleep(_POLL_SECONDS)

    async def get(self, path: str) -> Any:
        """JSON answer to a GET request."""
        return await self._request("GET", path, None, self._faults.control_timeout)

    async def command(self, path: str, body: Body) -> Any:
        """JSON answer to a command that changes the server's state, such as an update of weights.

        Args:
            body: to be encoded, or JSON in pieces.

        Raises:
            RequestRefused: the answer has `success: false`.
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

    async def _post(self, path: str, body: Body, seconds: float, headers: dict[str, str] | None = None) -> Any:
        return await self._request("POST", path, body, seconds, headers)

    async def _request(
        self, method: str, path: str, body: Body | None, seconds: float, headers: dict[str, str] | None = None
    ) -> Any:
        where = f"{self.url}{path}"
        content: dict[str, Any] = {"json": body}
        if isinstance(body, Sequence):
            size = str(sum(map(len, body)))
            headers = {**(headers or {}), "Content-Type": "application/json", "Content-Length": size}
            content = {"data": _stream(body)}
        try:
            async with self._session.request(
                method, where, headers=headers, timeout=aiohttp.ClientTimeout(seconds), **content
            ) as answer:
                text = await answer.text(errors="replace")
        except TimeoutError as error:
            raise ServerLost(f"{where} did not answer within {seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerLost(f"{where} is gone ({type(error).__name__}: {error})") from error
        return _read_answer(where, answer.status, text)


async def _stream(pieces: Sequence[bytes]) -> AsyncIterator[bytes]:
    """Pieces, cut where they are long: a socket copies the rest of a piece that it does not take at once."""
    for piece in pieces:
        for first in range(0, len(piece), _SENT_BYTES):
            yield piece[first : first + _SENT_BYTES]


def _read_answer(where: str, status: int, text: str) -> Any:
    shown = text[:_SHOWN_CHARACTERS]
    if status >= 500:
        raise BadResponse(f"{where} answered {status}: {shown}")
    if status in (401, 403):
        raise RequestRefused(
            f"{where} refused with {status}: the API key is missing or wrong. Name the environment variable that holds "
            "it in rollout.server.api_key_variable."
        )
    if status >= 400:
        raise RequestRefused(f"{where} refused with {status}: {shown}")
    if where.endswith(_PLAIN):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BadResponse(f"{where} answered with invalid JSON: {shown!r}") from error


@dataclass(frozen=True)
class ServerFacts:
    """Facts of a server.

    Attributes:
        version: of SGLang.
        seeded: whether it samples with the request's seed.
        context: tokens of a conversation at most, response included.
        longest_prompt: tokens of a prompt at most.
        ranks: number of its processes that need the weights.
        dtype: torch dtype of its weights; None: unknown.
    """

    version: str
    seeded: bool
    context: int
    longest_prompt: int
    ranks: int
    dtype: str | None = None


async def inspect_server(client: ServerClient, policy: Policy) -> ServerFacts:
    """Check that a server serves the policy's model, and return its facts.

    Raises:
        WrongServer: it has another model or another vocabulary.
    """
    model, server = await client.get("/model_info"), await client.get("/server_info")
    _check_model(client.url, model, policy)
    await _check_vocabulary(client, policy)
    version = str(server.get("version"))
    if version != TESTED_VERSION:
        logger.warning("%s runs SGLang %s; this project is tested with %s", client.url, version, TESTED_VERSION)
    context = min([int(policy.model.config.text_config.max_position_embeddings) - SPARE_TOKENS, *_limits(server)])
    shorter_than = int(server.get("max_req_input_len") or context + 1)
    return ServerFacts(
        version=version,
        seeded=bool(server.get("enable_deterministic_inference")),
        context=context,
        longest_prompt=min(context, shorter_than - 1),
        ranks=int(server.get("tp_size") or 1),
        dtype=_DTYPES.get(str(server.get("dtype"))),
    )


def _limits(server: Mapping[str, Any]) -> list[int]:
    """Upper limits on the tokens of a conversation, from the server's context and its KV cache."""
    found = []
    if server.get("context_length"):
        found.append(int(server["context_length"]) - SPARE_TOKENS)
    if server.get("max_total_num_tokens"):
        found.append(int(server["max_total_num_tokens"]) - 2 * int(server.get("page_size") or 1))
    return found


def _check_model(url: str, model: Mapping[str, Any], policy: Policy) -> None:
    wanted = policy.model.config
    if model.get("model_type") != wanted.model_type or not model.get("has_image_understanding"):
        raise WrongServer(
            f"{url} serves {model.get('model_path')}, a {model.get('model_type')} model"
            f"{'' if model.get('has_image_understanding') else ' without images'}; this policy is a "
            f"{wanted.model_type} model. Start the server with this policy's folder."
        )
    # After an update from disk, model_path is the folder of the weights; tokenizer_path does not change.
    path = Path(str(model.get("tokenizer_path"))) / "config.json"
    if not path.is_file():
        logger.warning("%s serves %s, which cannot be read from here: its sizes are not checked", url, path.parent)
        return
    theirs, ours = read_json(path), wanted.to_dict()
    for section, names in _SIZES.items():
        for name in names:
            there, here = theirs.get(section, {}).get(name), ours[section].get(name)
            if there != here:
                raise WrongServer(
                    f"{url} serves {path.parent} with {section}.{name}={there}; this policy has {here}. "
                    "Start the server with this policy's folder."
                )


async def _check_vocabulary(client: ServerClient, policy: Policy) -> None:
    text = "".join(policy.tokenizer.all_special_tokens) + " Up, left:\n<answer>Down</answer> x² = 1.5"
    expected = policy.codec.encode_text(text).tolist()
    answer = await client.command("/tokenize", {"model": "", "prompt": text, "add_special_tokens": False})
    found = answer.get("tokens") if isinstance(answer, dict) else None
    if found != expected:
        raise WrongServer(
            f"{client.url} has another vocabulary: it encodes a text with the special tokens as {found}, this policy "
            f"as {expected}. Start the server with this policy's folder, tokenizer included."
        )
