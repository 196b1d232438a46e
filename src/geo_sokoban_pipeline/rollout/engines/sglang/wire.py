"""Wire format: converts the engine's requests to the JSON of SGLang's `/generate`, and its answers to responses.

Pure functions. A response is checked against its request before use: equal prompt length, one log-prob per id, no
banned token, and a finish reason that agrees with its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from geo_sokoban_pipeline.config.rollout import SamplingOptions
from geo_sokoban_pipeline.envs.images import png_data_uri
from geo_sokoban_pipeline.rollout.engines.sglang.client import BadResponse, WrongServer

if TYPE_CHECKING:
    from geo_sokoban_pipeline.rollout.engines.base import FinishReason, Request

# Finite, because −inf would give NaN in half precision where all tokens of a row are banned.
_BAN = -1e9
_LOG_PROB_TOLERANCE = 1e-6
_SEED_BITS = 0x7FFFFFFF


@dataclass(frozen=True)
class ModelLimits:
    """Ids and limits that hold for policy and servers.

    Attributes:
        size: rows of the embedding.
        banned: ids that are never sampled.
        end_ids: tokens that end a response.
        pad_id: token that stands for an image.
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

    @cached_property
    def bias(self) -> dict[str, float]:
        """`logit_bias` of the banned ids."""
        return ban(self.banned)


@dataclass(frozen=True)
class Response:
    """A server's response.

    Attributes:
        token_ids: (T,) int32.
        log_probs: (T,) float32.
        finish_reason: as in `Result`.
        spans: (tag of the weights, start, end) over the T tokens, in order.
        cached_tokens: tokens of the prompt that the server took from its cache.
    """

    token_ids: np.ndarray
    log_probs: np.ndarray
    finish_reason: FinishReason
    spans: tuple[tuple[str, int, int], ...]
    cached_tokens: int


def ban(token_ids: Iterable[int]) -> dict[str, float]:
    """`logit_bias` that bans ids."""
    return {str(token): _BAN for token in sorted(token_ids)}


def room_of(request: Request, limits: ModelLimits) -> int:
    """Tokens that a response may have; 0 or less if the context is full."""
    if len(request.token_ids) > limits.longest_prompt:
        return 0
    room = limits.context - len(request.token_ids)
    return room if request.max_new_tokens is None else min(room, request.max_new_tokens)


def write_request(request: Request, limits: ModelLimits, rid: str) -> dict[str, Any]:
    """Body of a request.

    Args:
        rid: id for aborting it.
    """
    pads = [image.token_count(limits.merge_size) for image in request.images]
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": collapse_pads(request.token_ids, limits.pad_id, pads).tolist(),
        "sampling_params": {
            **_write_sampling(request.sampling),
            "max_new_tokens": room_of(request, limits),
            "stop_token_ids": list(limits.end_ids),
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "logit_bias": limits.bias,
            "sampling_seed": request.seed & _SEED_BITS,
        },
        "return_logprob": True,
        "logprob_start_len": -1,
    }
    if request.images:
        body["image_data"] = [_data_uri(image.png) for image in request.images]
    return body


def collapse_pads(token_ids: np.ndarray, pad_id: int, counts: Sequence[int]) -> np.ndarray:
    """Ids with one pad per image.

    Args:
        token_ids: (L,) ids, pads expanded.
        counts: pads of each image; neighbouring images need not be separated by another token.

    Raises:
        ValueError: the number of pads among the ids is not that of the images.
    """
    pads = np.flatnonzero(token_ids == pad_id)
    if len(pads) != sum(counts):
        raise ValueError(f"{len(pads)} image pads among the tokens, but the images take {sum(counts)}.")
    firsts = np.cumsum([0, *counts[:-1]]) if counts else np.empty(0, np.int64)
    kept = np.ones(len(token_ids), bool)
    kept[pads] = False
    kept[pads[firsts]] = True
    return token_ids[kept]


def read_response(body: Any, request: Request, limits: ModelLimits) -> Response:
    """A response, checked against its request.

    Raises:
        BadResponse: it is malformed or contradicts itself.
        WrongServer: the server counts another prompt length than this policy.
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
        raise BadResponse(f"the response is malformed ({type(error).__name__}: {error})") from error
    # A request aborted before its prefill has no or another prompt_tokens.
    if prompt < 0 and reason != "abort":
        raise BadResponse("the response is malformed (it counts no prompt_tokens)")
    if prompt != len(request.token_ids) and (reason != "abort" or (len(ids) and prompt >= 0)):
        raise WrongServer(
            f"the server counts {prompt} tokens in a prompt of {len(request.token_ids)} with {len(request.images)} "
            "images: it encodes them otherwise than this policy. Check that it serves this policy's folder, image "
            "processor included."
        )
    if not np.array_equal(ids, named):
        raise BadResponse(f"the response has {len(ids)} tokens, but log-probs of {len(named)} or of other tokens")
    _check_tokens(ids, log_probs, limits)
    reason = _read_reason(reason, matched, ids, room_of(request, limits), limits)
    return Response(ids, np.minimum(log_probs, 0.0), reason, spans, cached)


def _check_tokens(ids: np.ndarray, log_probs: np.ndarray, limits: ModelLimits) -> None:
    if len(ids) and (ids.min() < 0 or ids.max() >= limits.size):
        raise BadResponse(f"the response has token {int(ids.max())} of a vocabulary of {limits.size}")
    if banned := limits.banned.intersection(ids.tolist()):
        raise BadResponse(f"the response has the banned tokens {sorted(banned)}")
    if not np.isfinite(log_probs).all() or (log_probs > _LOG_PROB_TOLERANCE).any():
        raise BadResponse("the response has log-probs that are above 0 or not finite")


def _read_reason(kind: object, matched: object, ids: np.ndarray, room: int, limits: ModelLimits) -> FinishReason:
    """Finish reason of a response by its tokens: an abort or the limit may coincide with its end token."""
    ends = np.flatnonzero(np.isin(ids, limits.end_ids))
    if len(ids) > room or (len(ends) and ends[0] != len(ids) - 1):
        raise BadResponse(
            f"the response has {len(ids)} of {room} tokens, or tokens after its end token: {ids.tolist()}"
        )
    if isinstance(matched, str):  # requests have no stop strings; a server reports NaN logits in this field
        raise BadResponse(f"the response was stopped: {matched}")
    if len(ends) and kind in ("stop", "length", "abort"):
        return "stop"
    if kind == "length" and len(ids) == room:
        return "length"
    if kind == "abort":
        return "abort"
    raise BadResponse(f"the response ended with {kind!r} after {len(ids)} of {room} tokens, the last one no end token")


def _read_spans(meta: Mapping[str, Any], count: int) -> tuple[tuple[str, int, int], ...]:
    if not (given := meta.get("weight_versions")):
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


_data_uri = lru_cache(maxsize=1024)(png_data_uri)
