"""The protocol of rollout engines: requests carry token ids and images, never text; results carry ids and log-probs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from geo_sokoban_pipeline.config.rollout import SamplingOptions
from geo_sokoban_pipeline.policies.patches import EncodedImage

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Request:
    """One response to be sampled.

    Attributes:
        id: unique among the requests in flight; also the conversation whose cached prefix is continued.
        token_ids: (L,) int32, the whole conversation so far, image pads expanded.
        images: every image so far, in order of its pads.
        sampling: how to choose tokens.
        max_new_tokens: tokens of the response at most; None: no limit but the engine's own.
        seed: seed of this episode's sampling.
        sampled: tokens that were sampled in this conversation before; the response's first token takes draw number
            `sampled`.
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
        finish_reason: `stop` at an end token, `length` at the limit, `abort` if it was stopped before. A request for
            which the context has no room is answered with an empty response and `length`.
        weight_version: version of the weights that sampled its first token.
        weight_spans: (version, start, end) over the T tokens, where weights changed in between; empty: they did not.
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
    """A response without a token: there was no room for one, or it was aborted before the first."""
    return Result(request.id, np.empty(0, np.int32), np.empty(0, np.float32), reason, version)


def join_results(first: Result, second: Result) -> Result:
    """A response that was sampled in two parts, as one; each part keeps its weights."""
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


class RolloutEngine(Protocol):
    """What the episode loop needs of an engine."""

    name: str
    software_version: str
    seeded: bool
    version: int

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests."""

    def poll(self) -> list[Result]:
        """Results that are ready; waits for at least one while any is in flight, `[]` when none is."""

    def abort(self, ids: Iterable[int]) -> None:
        """Stop requests; those that are not whole by then are answered as `abort`. Unknown ids are ignored."""

    def release(self, ids: Iterable[int]) -> None:
        """Forget conversations, so that their memory is free. Unknown ids are ignored."""

    def update_weights(self, weights: Iterable[tuple[str, Any]] | None, version: int) -> None:
        """Take new weights (name, tensor), in the layout of published checkpoints; None: those of the policy's model,
        which the trainer changed in place.
        """

    def close(self) -> None:
        """Free everything."""
