"""The protocol of rollout engines: requests carry token ids and images, never text; results carry ids and log-probs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from geo_sokoban_pipeline.config.rollout import SamplingOptions
from geo_sokoban_pipeline.policies.patches import EncodedImage
from geo_sokoban_pipeline.policies.weights import WeightSource

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Request:
    """One response to be sampled.

    Attributes:
        id: unique among the requests in flight; also names the conversation, whose cached prefix is reused.
        token_ids: (L,) int32, the whole conversation so far, image pads expanded.
        images: every image so far, in order of its pads.
        sampling: how to choose tokens.
        max_new_tokens: tokens of the response at most; None: only the engine's own limit.
        seed: seed of this episode's sampling.
        sampled: tokens sampled in this conversation so far; the response's first token takes draw number `sampled`.
    """

    id: int
    token_ids: np.ndarray
    images: Sequence[EncodedImage]
    sampling: SamplingOptions
    max_new_tokens: int | None
    seed: int
    sampled: int = 0


@dataclass(frozen=True)
class Result:
    """One response.

    Attributes:
        id: of the request.
        token_ids: (T,) int32 sampled ids, the end token included where it was sampled.
        log_probs: (T,) float32 under the sampling policy, after temperature, before top-p, top-k; greedy: untempered.
        finish_reason: `stop` at an end token, `length` at the limit, `abort` if it was aborted before. A request whose
            context is full gets an empty response with `length`.
        weight_version: version of the weights that sampled its first token.
        weight_spans: (version, start, end) over the T tokens, if weights changed in between; empty: they did not.
    """

    id: int
    token_ids: np.ndarray
    log_probs: np.ndarray
    finish_reason: FinishReason
    weight_version: int
    weight_spans: tuple[tuple[int, int, int], ...] = ()

    @property
    def spans(self) -> tuple[tuple[int, int, int], ...]:
        """(version, start, end) of all tokens."""
        return self.weight_spans or ((self.weight_version, 0, len(self.token_ids)),)


def empty_result(request: Request, reason: FinishReason, version: int) -> Result:
    """A response without a token: the context is full, or it was aborted before the first."""
    return Result(request.id, np.empty(0, np.int32), np.empty(0, np.float32), reason, version)


def join_results(first: Result, second: Result) -> Result:
    """Join two parts of a response; each keeps its weight versions."""
    count = len(first.token_ids)
    own, other = first.spans, second.spans
    return Result(
        id=second.id,
        token_ids=np.concatenate([first.token_ids, second.token_ids]),
        log_probs=np.concatenate([first.log_probs, second.log_probs]),
        finish_reason=second.finish_reason,
        weight_version=first.weight_version,
        weight_spans=(*own, *((version, start + count, end + count) for version, start, end in other)),
    )


class EngineControl(Protocol):
    """The part of an engine that the trainer uses, wherever responses are sampled.

    Attributes:
        in_process: whether it samples with the policy's own model.
        version: of its weights.
    """

    in_process: bool
    version: int

    def update_weights(self, weights: WeightSource | None, version: int) -> None:
        """Load new weights; None: those of the policy's model, which the trainer has changed in place."""

    def offload(self) -> None:
        """Give up memory that others need, until `update_weights`; nothing where there is none to give up."""

    def close(self) -> None:
        """Free everything."""


class RolloutEngine(EngineControl, Protocol):
    """The interface of an engine to the episode loop."""

    name: str
    software_version: str
    seeded: bool

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests."""

    def poll(self) -> list[Result]:
        """Results that are ready: waits for at least one while any request is in flight; `[]` without requests."""

    def abort(self, ids: Iterable[int]) -> None:
        """Stop requests; unfinished ones return with `abort`. Unknown ids are ignored."""

    def release(self, ids: Iterable[int]) -> None:
        """Free the memory of conversations. Unknown ids are ignored."""
