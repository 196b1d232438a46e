"""Environments behind OpenEnv servers: `env.factory=openenv:<address>`, and the base of a task in one.

One connection is one session of the server, one environment and one episode. A connection that is lost, an error that
the server sends, and an answer that comes too late end the episode as failed: a new connection would be a new
environment, at its beginning.
"""

from __future__ import annotations

import asyncio
import json
import re
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field

from geo_sokoban_pipeline.background import BackgroundLoop, shared_loop
from geo_sokoban_pipeline.config.base import Seconds, validate_parameters
from geo_sokoban_pipeline.envs.adapters.base import (
    AdapterTask,
    EnvAdapter,
    EnvAdapterOptions,
    Step,
    as_pixels,
    check_words,
    said_in,
)
from geo_sokoban_pipeline.envs.plugins import PluginError
from geo_sokoban_pipeline.formats import type_name
from geo_sokoban_pipeline.masking import without_login

if TYPE_CHECKING:
    import numpy as np
    from aiohttp import ClientSession, ClientWebSocketResponse, WSMessage

SCHEME = "openenv"
_SCHEMES = ("ws", "wss", "http", "https")
_LARGEST = 100 * 2**20  # bytes of a frame, and of an image; aiohttp's own limit is 4 MB
_MOST_PIXELS = 2**26
_CLOSING = 5.0  # seconds that a server has to end a session
_SHOWN = 300  # characters of a server's message
# By the code of an error frame; of others the message has to do.
_WAYS_OUT = {
    "CAPACITY_REACHED": "set rollout.max_environments so that all processes together open no more sessions than the "
    "server holds (its max_concurrent_envs), or raise that",
    "VALIDATION_ERROR": "make env.args.action and env.args.actions fit the server's schema, {http}/schema",
    "EXECUTION_ERROR": "the environment raised; the server's log has where",
    "FACTORY_ERROR": "the server could not make an environment; its log has why",
}


class OpenEnvError(RuntimeError):
    """A server is not there, sent an error, answered too late, or left.

    Attributes:
        code: of the error that it sent; None: it sent none.
    """

    def __init__(self, text: str, code: str | None = None) -> None:
        super().__init__(text)
        self.code = code


class OpenEnvOptions(EnvAdapterOptions):
    """Arguments of an environment behind an OpenEnv server."""

    action: str = Field("action", description="Field of the action that a response decides.")
    actions: dict[str, Any] | Literal["text", "integer", "json"] = Field(
        description="Values of that field by the words that choose them, as `{left: 0, right: 1}`; a value that is a "
        "mapping is the whole action. Or what the answer is: `text`, `integer` (the first one in it), or `json` (an "
        "object, which is the whole action)."
    )
    image: str | None = Field(
        None,
        description="Field of the observation with an image, `a.b` for one inside another: a data URI, base64, or "
        "lists of integers from 0 to 255, (height, width) or (height, width, 3). None: no image.",
    )
    reset: dict[str, str] = Field(
        default_factory=dict,
        description="Keywords of the environment's `reset`, and the columns of the prompt they are.",
    )
    seed: str | None = Field(
        "seed",
        description="Keyword of `reset` that is the seed of the episode, unless `env.args.reset` names it. None: there "
        "is none.",
    )
    timeout: Seconds = Field(60.0, description="Seconds for connecting, and for each answer.")


# The connection.


def _loop() -> BackgroundLoop:
    """The event loop of all connections of this process."""
    return shared_loop(SCHEME)


class _Connection:
    """One session of a server. Coroutines run in `_loop`.

    Args:
        url: address of the server, without `/ws`.
        seconds: for connecting, and for each answer.
    """

    def __init__(self, url: str, seconds: float) -> None:
        self._url, self._seconds = url, seconds
        self._http: ClientSession
        self._socket: ClientWebSocketResponse
        self._answers: asyncio.Queue[WSMessage | None] = asyncio.Queue()

    async def open(self) -> None:
        """Connect.

        Raises:
            OpenEnvError: the server cannot be reached, or refuses.
        """
        import aiohttp

        self._http = aiohttp.ClientSession()
        try:
            async with asyncio.timeout(self._seconds):
                self._socket = await self._http.ws_connect(f"{self._url}/ws", max_msg_size=_LARGEST)
        except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
            await self._http.close()
            why = f"no answer within env.args.timeout={self._seconds:g} s" if isinstance(error, TimeoutError) else error
            raise OpenEnvError(
                f"{self._url}: cannot connect ({why}). Start the server, or correct the address in env.factory."
            ) from error
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        """Take what comes at any time: only a connection that is read answers the server's pings."""
        with suppress(ConnectionError):
            async for message in self._socket:
                self._answers.put_nowait(message)
        self._answers.put_nowait(None)

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """`data` of the observation that answers `reset` or `step`.

        Raises:
            OpenEnvError: there is none in time; the connection is closed then, unless the server sent an error.
        """
        try:
            async with asyncio.timeout(self._seconds):
                with suppress(ConnectionError):  # before it left, the server may have said why
                    frame = {"type": kind, "data": data}
                    await self._socket.send_str(json.dumps(frame, default=lambda value: value.tolist()))
                message = await self._answers.get()
        except TimeoutError:
            await self.drop()
            raise OpenEnvError(
                f"{self._url}: {kind} had no answer within env.args.timeout={self._seconds:g} s. Raise it, or look for "
                "what the server waits for."
            ) from None
        return _read_frame(self._url, kind, message, self._socket.close_code)

    async def close(self) -> None:
        """End the session, and wait a while until the server has: its place is free then."""
        with suppress(ConnectionError):
            await self._socket.send_str('{"type": "close"}')
            await asyncio.wait([self._reader], timeout=_CLOSING)
        await self.drop()

    async def drop(self) -> None:
        """Close the connection at once."""
        self._reader.cancel()
        await self._http.close()


def _drop(connection: _Connection) -> None:
    _loop().start(connection.drop())


def _read_frame(url: str, kind: str, message: WSMessage | None, code: int | None) -> dict[str, Any]:
    """`data` of an observation frame.

    Args:
        message: None: the connection is lost.
        code: with which it was closed.

    Raises:
        OpenEnvError: the frame is another one; the message has the code of an error, and the way out.
    """
    if message is None or not isinstance(message.data, str):
        reason = f"code {code}" if message is None else message.data
        raise OpenEnvError(
            f"{url}: the connection was lost during {kind} ({reason}), and the environment with it. See its log."
        )
    try:
        frame = json.loads(message.data)
        found, data = str(frame["type"]), dict(frame["data"])
    except (ValueError, TypeError, KeyError):
        found, data = "", {}
    if found == "error":
        error = str(data.get("code"))
        way_out = _WAYS_OUT.get(error, "the server does not speak the protocol of OpenEnv 0.10").format(
            http=http_url(url)
        )
        wrong = f": {data['errors']}" if data.get("errors") else ""
        text = f"{data.get('message')}{wrong}"[:_SHOWN]
        raise OpenEnvError(f"{url}: {kind}: {error}: {text}. Way out: {way_out}.", error)
    if found != "observation" or "observation" not in data:
        raise OpenEnvError(
            f"{url}: {kind} was answered by {message.data[:_SHOWN]!r}, which is no observation; is this an OpenEnv "
            "server?"
        )
    return data


# The environment.


class OpenEnv(EnvAdapter):
    """One episode of an environment behind a server; see `EnvAdapter`.

    Args:
        url: address of the server, without `/ws`.
        row: of the prompt, whose columns `reset` may take.
        arguments: fields of `OpenEnvOptions`.

    Raises:
        ParameterError: an argument is unknown or not allowed.
        ValueError: the row lacks a column.
    """

    options: OpenEnvOptions

    def __init__(self, url: str, row: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        options = validate_parameters(arguments, OpenEnvOptions, prefix="env.args")
        words = {} if isinstance(options.actions, str) else check_words(options.actions)
        super().__init__(url, options, words)
        columns = {**json.loads(row.get("columns") or "{}"), **row}
        for keyword, column in options.reset.items():
            if column not in columns:
                raise ValueError(
                    f"env.args.reset.{keyword}={column}: the prompt has no such column; it has {', '.join(columns)}."
                )
        self._keywords = {keyword: columns[column] for keyword, column in options.reset.items()}
        self._connection: _Connection | None = None
        self._begun: tuple[Any, Future[dict[str, Any]]] | None = None  # an action, and its answer

    def begin(self, seed: int | None) -> Any:
        """Connect, and reset the environment; see `EnvAdapter`."""
        self.close()
        connection = _Connection(self.name, self.options.timeout)
        _loop().run(connection.open())
        self._connection, self._begun = connection, None
        # An environment whose last call came too late is never closed; then its end closes the connection.
        weakref.finalize(self, _drop, connection)
        keywords = dict(self._keywords)
        if self.options.seed is not None and seed is not None:
            keywords.setdefault(self.options.seed, seed)
        data = self._answer(self._ask("reset", keywords))
        return None if data is None else data["observation"]

    def prepare(self, text: str) -> list[Future[Any]] | None:
        """Send a response's action, so that the environments of a batch step at the same time."""
        chosen = self.read(text)
        if chosen is None:
            return None
        self._begun = chosen[1], self._ask("step", chosen[1])
        return [self._begun[1]]

    def act(self, word: str, action: Any) -> Step | None:
        """See `EnvAdapter`; None for an object of the policy's own that the server's schema refuses."""
        begun, self._begun = self._begun, None
        if begun is not None and begun[0] != action:
            self.close()
            raise OpenEnvError(f"{self.name}: {action} after {begun[0]} was sent already; step what was prepared.")
        asked = self._ask("step", action) if begun is None else begun[1]
        data = self._answer(asked, "VALIDATION_ERROR" if self.options.actions == "json" else None)
        if data is None:
            return None
        seen = data["observation"]
        parts = seen if isinstance(seen, Mapping) else {}
        info = parts.get("metadata") or data.get("metadata") or {}
        truncated = bool(data.get("truncated") or parts.get("truncated"))
        done = bool(data.get("done") or data.get("terminated") or parts.get("terminated"))
        reward = data.get("reward") or 0.0
        if not isinstance(reward, int | float):
            raise OpenEnvError(f"{self.name}: its reward for {word} is {reward!r}; rewards must be numbers.")
        if done or truncated:
            self.close()  # another episode may need its place
        return seen, reward, done, truncated, info

    def _ask(self, kind: str, data: Mapping[str, Any]) -> Future[dict[str, Any]]:
        if self._connection is None:
            raise OpenEnvError(f"{self.name}: {kind} without a connection; call reset first.")
        return _loop().start(self._connection.ask(kind, data))

    def _answer(self, asked: Future[dict[str, Any]], harmless: str | None = None) -> dict[str, Any] | None:
        """Wait for an answer; None for an error of a harmless code. After any other one the session ends."""
        try:
            return asked.result()
        except OpenEnvError as error:
            if harmless is not None and error.code == harmless:
                return None
            self.close()
            raise

    def read(self, text: str) -> tuple[str, Any] | None:
        """The chosen word, or what the answer is, and the action; None: there is none."""
        kind, field = self.options.actions, self.options.action
        if not isinstance(kind, str):
            if (chosen := super().read(text)) is None:
                return None
            word, value = chosen
            return word, value if isinstance(value, Mapping) else {field: value}
        said = said_in(text).strip()
        if kind == "text":
            return (said, {field: said}) if said else None
        if kind == "integer":
            number = re.search(r"-?\d+", said)
            return None if number is None else (number[0], {field: int(number[0])})
        try:
            action, _ = json.JSONDecoder().raw_decode(said, max(0, said.find("{")))
        except (ValueError, RecursionError):
            return None
        return (json.dumps(action), action) if isinstance(action, dict) else None

    def pixels(self) -> np.ndarray:
        """(height, width, 3) uint8: the image of the present state.

        Raises:
            ValueError: there is none.
        """
        import numpy as np

        from geo_sokoban_pipeline.envs.images import base64_bytes, data_uri_bytes, decode_image, is_data_uri

        source = f"env.args.image={self.options.image}"
        found: Any = self.observation
        for name in str(self.options.image).split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        if isinstance(found, str):
            try:
                raw = data_uri_bytes(found, _LARGEST) if is_data_uri(found) else base64_bytes(found, _LARGEST)
                return np.asarray(decode_image(raw, max_pixels=_MOST_PIXELS))
            except ValueError as error:
                raise ValueError(f"{source}: {error}") from error
        with suppress(ValueError):  # lists of different lengths
            array = np.asarray(found)
            if array.dtype.kind == "i" and array.size and array.min() >= 0 and array.max() <= 255:
                found = array.astype(np.uint8)
        if (pixels := as_pixels(found)) is not None:
            return pixels
        known = ", ".join(self.observation) if isinstance(self.observation, Mapping) else type_name(self.observation)
        raise ValueError(
            f"{source}: an image is a data URI, base64, or lists of integers from 0 to 255, (height, width) or "
            f"(height, width, 3); this is {type_name(found)}. The observation has {known}."
        )

    def close(self) -> None:
        """End the session; calling it twice is harmless."""
        connection, self._connection = self._connection, None
        if connection is not None:
            _loop().run(connection.close())


def server_url(spec: str) -> str:
    """The address in `openenv:<address>`, without `/ws`.

    Raises:
        PluginError: it is no address, or holds a login, which a run would store.
    """
    address = spec.removeprefix(f"{SCHEME}:")
    parts = urlsplit(address)
    if parts.scheme not in _SCHEMES or not parts.hostname or without_login(address) != address:
        raise PluginError(
            f"'{SCHEME}:{without_login(address)}' names no server; write {SCHEME}:ws://host:port, or wss, http, https, "
            "without a login"
        )
    return address.rstrip("/").removesuffix("/ws")


def http_url(url: str) -> str:
    """The address of a server's pages."""
    return re.sub("^ws", "http", url)


def factory(address: str) -> Callable[[Mapping[str, Any], Mapping[str, Any]], OpenEnv]:
    """`build_env(sample, args)` of a server's address.

    Raises:
        PluginError: see `server_url`.
    """
    return partial(OpenEnv, server_url(address))


class OpenEnvTask(AdapterTask):
    """A task in an environment behind a server; `environment` is its address, such as `ws://127.0.0.1:8000`.

    `env.args.reset` must name the column `seed`, which is the level.
    """

    scheme = SCHEME
