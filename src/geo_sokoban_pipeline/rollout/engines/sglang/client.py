"""What can go wrong with a server, as exceptions, and how long to wait before a further try.

The class decides what follows: a `ServerLost` is brought back, a `BadReply` is asked for again, a `RequestRefused` or a
`WrongServer` stops the run at once, because a second try would end alike.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from geo_sokoban_pipeline.config.rollout import SamplingOptions
from geo_sokoban_pipeline.config.server import FaultOptions
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.engines.base import FinishReason, Request
from geo_sokoban_pipeline.runs.storage import read_json


class ServerFault(RuntimeError):
    """Anything that a server did wrong."""


class ServerLost(ServerFault):
    """The server does not answer: it has ended, hangs, or cannot be reached."""


class BadReply(ServerFault):
    """The server answered, but with an error of its own or with something that is no reply."""


class RequestRefused(ServerFault):
    """The server refuses what was asked; asking again does not help."""


class WrongServer(ServerFault):
    """The server serves another model, vocabulary or software than this policy needs."""


class EngineStopped(ServerFault):
    """Tries or restarts are used up; the message says what failed and what to do."""


def pause_before(attempt: int, options: FaultOptions) -> float:
    """Seconds to wait before a try.

    Args:
        attempt: number of the try, from 0; nothing is waited before the first.
    """
    if attempt == 0:
        return 0.0
    return float(min(options.longest_pause, options.first_pause * 2 ** (attempt - 1)))


# Translation between the engine's requests and the JSON of SGLang's `/generate`; no connection, no state.


# Finite, because logits of half precision plus −inf would make NaN where all tokens of a row are banned in a pass.
_BAN = -1e9
_LOG_PROB_TOLERANCE = 1e-6
_SEED_BITS = 0x7FFFFFFF


@dataclass(frozen=True)
class Terms:
    """What policy and server have agreed on.

    Attributes:
        size: rows of the embedding.
        banned: ids that are never sampled.
        end_ids: tokens that end a reply.
        pad_id: token that stands for a picture.
        merge_size: patches per side that one pad stands for.
        context: tokens of the longest conversation.
        longest_prompt: tokens of the longest prompt.
    """

    size: int
    banned: frozenset[int]
    end_ids: tuple[int, ...]
    pad_id: int
    merge_size: int
    context: int
    longest_prompt: int

    @property
    def bias(self) -> dict[str, float]:
        """`logit_bias` that bans what is never sampled."""
        return ban(self.banned)


@dataclass(frozen=True)
class Reply:
    """What a server has sampled.

    Attributes:
        token_ids: (T,) int32. log_probs: (T,) float32.
        finish_reason: as in `Result`.
        spans: (name of the weights, start, end) over the T tokens, in order.
        cached_tokens: tokens of the prompt that were not read again.
    """

    token_ids: np.ndarray
    log_probs: np.ndarray
    finish_reason: FinishReason
    spans: tuple[tuple[str, int, int], ...]
    cached_tokens: int


def ban(token_ids: Iterable[int]) -> dict[str, float]:
    """`logit_bias` under which ids are never sampled."""
    return {str(token): _BAN for token in sorted(token_ids)}


def room_of(request: Request, terms: Terms) -> int:
    """Tokens that a reply may have; 0 or less where the context is full."""
    if len(request.token_ids) > terms.longest_prompt:
        return 0
    room = terms.context - len(request.token_ids)
    return room if request.max_new_tokens is None else min(room, request.max_new_tokens)


def write_request(request: Request, terms: Terms, rid: str, *, bias: Mapping[str, float]) -> dict[str, Any]:
    """Body of a request.

    Args:
        rid: name by which it can be aborted.
        bias: `terms.bias`, made once.
    """
    pads = [image.token_count(terms.merge_size) for image in request.images]
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": collapse_pads(request.token_ids, terms.pad_id, pads).tolist(),
        "sampling_params": {
            **_write_sampling(request.sampling),
            "max_new_tokens": room_of(request, terms),
            "stop_token_ids": list(terms.end_ids),
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "logit_bias": dict(bias),
            "sampling_seed": request.seed & _SEED_BITS,
        },
        "return_logprob": True,
        "logprob_start_len": -1,
    }
    if request.images:
        body["image_data"] = [_data_uri(image.png) for image in request.images]
    return body


def collapse_pads(token_ids: np.ndarray, pad_id: int, counts: Sequence[int]) -> np.ndarray:
    """Ids with one pad per picture.

    Args:
        token_ids: (L,) ids, pads expanded.
        counts: pads of each picture; neighbouring pictures need not be separated by another token.

    Raises:
        ValueError: the pads among the ids are not those of the pictures.
    """
    pads = np.flatnonzero(token_ids == pad_id)
    if len(pads) != sum(counts):
        raise ValueError(f"{len(pads)} picture pads among the tokens, but the pictures take {sum(counts)}.")
    firsts = np.cumsum([0, *counts[:-1]]) if counts else np.empty(0, np.int64)
    kept = np.ones(len(token_ids), bool)
    kept[pads] = False
    kept[pads[firsts]] = True
    return token_ids[kept]


def read_reply(body: Any, request: Request, terms: Terms) -> Reply:
    """A reply, checked against what was asked.

    Raises:
        BadReply: it is not of the known form, or contradicts itself.
        WrongServer: the prompt has another length there than here.
    """
    try:
        meta, ids = body["meta_info"], np.asarray(body["output_ids"], np.int32)
        entries = meta.get("output_token_logprobs") or []
        log_probs = np.asarray([entry[0] for entry in entries], np.float32)
        named = np.asarray([entry[1] for entry in entries], np.int32)
        ending, prompt = meta["finish_reason"], int(meta.get("prompt_tokens", -1))
        reason, matched = ending["type"], ending.get("matched")
        spans, cached = _read_spans(meta, len(ids)), int(meta.get("cached_tokens") or 0)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise BadReply(f"the reply is malformed ({type(error).__name__}: {error})") from error
    # A request that was aborted while it waited was never read, or its prompt is not counted any more.
    if prompt < 0 and reason != "abort":
        raise BadReply("the reply is malformed (it counts no prompt_tokens)")
    if prompt != len(request.token_ids) and (reason != "abort" or (len(ids) and prompt >= 0)):
        raise WrongServer(
            f"the server counts {prompt} tokens in a prompt of {len(request.token_ids)} with {len(request.images)} "
            "pictures: it does not see them as this policy does. Check that it serves this policy's folder, image "
            "processor included."
        )
    if not np.array_equal(ids, named):
        raise BadReply(f"the reply has {len(ids)} tokens, but log-probs of {len(named)}, or of others")
    _check_tokens(ids, log_probs, terms)
    reason = _read_reason(reason, matched, ids, room_of(request, terms), terms)
    return Reply(ids, np.minimum(log_probs, 0.0), reason, spans, cached)


def _check_tokens(ids: np.ndarray, log_probs: np.ndarray, terms: Terms) -> None:
    if len(ids) and (ids.min() < 0 or ids.max() >= terms.size):
        raise BadReply(f"the reply has token {int(ids.max())} of a vocabulary of {terms.size}")
    banned = terms.banned.intersection(ids.tolist())
    if banned:
        raise BadReply(f"the reply has the banned tokens {sorted(banned)}")
    if not np.isfinite(log_probs).all() or (log_probs > _LOG_PROB_TOLERANCE).any():
        raise BadReply("the reply has log-probs that are none")


def _read_reason(kind: object, matched: object, ids: np.ndarray, room: int, terms: Terms) -> FinishReason:
    """How a reply ended, by its tokens: a word to stop it, or the limit, may have met its end."""
    ends = np.flatnonzero(np.isin(ids, terms.end_ids))
    if len(ids) > room or (len(ends) and ends[0] != len(ids) - 1):
        raise BadReply(f"the reply has {len(ids)} of {room} tokens, and goes on after it has ended: {ids.tolist()}")
    if isinstance(matched, str):  # nobody asks for strings that stop; a server tells so of logits that are no numbers
        raise BadReply(f"the reply was stopped: {matched}")
    if len(ends) and kind in ("stop", "length", "abort"):
        return "stop"
    if kind == "length" and len(ids) == room:
        return "length"
    if kind == "abort":
        return "abort"
    raise BadReply(f"the reply ended with {kind!r} after {len(ids)} of {room} tokens, the last no end of a reply")


def _read_spans(meta: Mapping[str, Any], count: int) -> tuple[tuple[str, int, int], ...]:
    given = meta.get("weight_versions")
    if not given:
        return ((str(meta["weight_version"]), 0, count),) if count else ()
    spans = tuple((str(s["version"]), int(s["start"]), int(s["end"])) for s in given if s["end"] > s["start"])
    edges = [0, *(end for _, _, end in spans)]
    if [start for _, start, _ in spans] != edges[:-1] or edges[-1] != count:
        raise ValueError(f"weight_versions {given} do not cover {count} tokens")
    return spans


def _write_sampling(sampling: SamplingOptions) -> dict[str, Any]:
    if sampling.greedy:
        return {"temperature": 0.0}
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k else -1,
    }


@lru_cache(maxsize=1024)
def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


# Talks to one server: every question is one HTTP request with a time limit, and every failure one of `faults`.


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


# Is a server what this policy needs? Asked before anything is sent to it, because weights of another shape end it.


logger = logging.getLogger(__name__)
TESTED_VERSION = "0.5.21"
SPARE_TOKENS = 2  # of a server's context that no conversation gets
_SIZES = {
    "text_config": ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    "vision_config": ("depth", "hidden_size", "patch_size", "spatial_merge_size", "out_hidden_size"),
}


@dataclass(frozen=True)
class ServerFacts:
    """What a server says about itself.

    Attributes:
        version: of SGLang.
        seeded: whether it samples by the request's seed.
        context: tokens of a conversation at most, its reply included.
        longest_prompt: tokens of a prompt at most.
        ranks: processes that each need the weights.
    """

    version: str
    seeded: bool
    context: int
    longest_prompt: int
    ranks: int


async def inspect_server(client: ServerClient, policy: Policy) -> ServerFacts:
    """Facts of a server that serves the policy's kind of model.

    Raises:
        WrongServer: it serves another model or another vocabulary.
    """
    model, server = await client.get("/model_info"), await client.get("/server_info")
    _check_model(client.url, model, policy)
    await _check_vocabulary(client, policy)
    version = str(server.get("version"))
    if version != TESTED_VERSION:
        logger.warning("%s runs SGLang %s; this project is tested with %s", client.url, version, TESTED_VERSION)
    longest = int(policy.model.config.text_config.max_position_embeddings)
    context = min([longest - SPARE_TOKENS, *_limits(server)])
    shorter_than = int(server.get("max_req_input_len") or context + 1)
    return ServerFacts(
        version=version,
        seeded=bool(server.get("enable_deterministic_inference")),
        context=context,
        longest_prompt=min(context, shorter_than - 1),
        ranks=int(server.get("tp_size") or 1),
    )


def _limits(server: Mapping[str, Any]) -> list[int]:
    """Tokens of a conversation at most, by what a server keeps free of its context and of its cache."""
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
            f"{'' if model.get('has_image_understanding') else ' without pictures'}; this policy is a "
            f"{wanted.model_type} model. Start the server with this policy's folder."
        )
    # After an update from disk, model_path is the folder of the weights; the tokenizer's folder stays.
    path = Path(str(model.get("tokenizer_path"))) / "config.json"
    if not path.is_file():
        logger.warning("%s serves %s, which cannot be read here: its sizes are not checked", url, path.parent)
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
    special = policy.tokenizer.all_special_tokens
    text = "".join(special) + " Up, left:\n<answer>Down</answer> x² = 1.5"
    expected = policy.codec.encode_text(text).tolist()
    answer = await client.command("/tokenize", {"model": "", "prompt": text, "add_special_tokens": False})
    found = answer.get("tokens") if isinstance(answer, dict) else None
    if found != expected:
        raise WrongServer(
            f"{client.url} has another vocabulary: it reads a text with the special tokens as {found}, this policy as "
            f"{expected}. Start the server with this policy's folder, tokenizer included."
        )
