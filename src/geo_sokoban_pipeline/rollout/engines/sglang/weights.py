"""Sends weights to servers, by disk or as tensors, and verifies their tag afterwards.

A set of weights has a unique tag. The server repeats it with every response, so every token is attributed to the
weights that sampled it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from geo_sokoban_pipeline.config.server import ServerOptions
from geo_sokoban_pipeline.rollout.engines.sglang.client import BadResponse, RequestRefused, ServerClient, WrongServer
from geo_sokoban_pipeline.rollout.engines.sglang.payload import pack_tensors

Named = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class WeightSet:
    """Weights of one version, which can be read several times.

    Attributes:
        version: of the policy.
        tag: their name at the servers.
        tensors: yields them by Hugging Face name, one at a time.
        folder: policy folder that holds them; None: they are sent as tensors.
    """

    version: int
    tag: str
    tensors: Callable[[], Named]
    folder: Path | None = None


def make_tag(version: int) -> str:
    """A unique tag for weights of a version."""
    return f"{version}-{uuid.uuid4().hex[:12]}"


async def send_weights(client: ServerClient, weights: WeightSet, ranks: int, options: ServerOptions) -> None:
    """Send new weights to a server, which drops its cache.

    Args:
        ranks: processes of the server; each loads its part of every tensor.

    Raises:
        ServerLost, BadResponse, RequestRefused: the update failed.
        WrongServer: afterwards the server has another tag.
    """
    if weights.folder is not None:
        await client.command(
            "/update_weights_from_disk",
            {"model_path": str(weights.folder), "weight_version": weights.tag, "flush_cache": True},
        )
    else:
        tensors = weights.tensors()
        await _begin(client)
        for bucket, is_last in _with_last(cut_buckets(tensors, options.bucket_bytes)):
            await client.command(
                "/update_weights_from_tensor",
                {
                    "serialized_named_tensors": [pack_tensors(bucket)] * ranks,
                    "flush_cache": is_last,
                    **({"weight_version": weights.tag} if is_last else {}),
                },
            )
        await client.command("/end_weight_update", {})
    named = await weights_of(client)
    if named != weights.tag:
        raise WrongServer(
            f"{client.url} has the weights {named} after an update to {weights.tag}: another run updates the same "
            "server. Give each run its own servers."
        )


async def _begin(client: ServerClient) -> None:
    try:
        await client.command("/begin_weight_update", {"selector": "all"})
    except RequestRefused:  # an interrupted update is still open
        await client.command("/end_weight_update", {})
        await client.command("/begin_weight_update", {"selector": "all"})


async def weights_of(client: ServerClient) -> str:
    """Tag of the weights that a server has."""
    model = await client.get("/model_info")
    try:
        return str(model["weight_version"])
    except (KeyError, TypeError) as error:
        raise BadResponse(f"{client.url}/model_info has no weight_version") from error


def cut_buckets(tensors: Named, limit: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Buckets of consecutive tensors of at most `limit` bytes; a larger tensor has its own."""
    bucket: list[tuple[str, Tensor]] = []
    held = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if bucket and held + size > limit:
            yield bucket
            bucket, held = [], 0
        bucket.append((name, tensor))
        held += size
    if bucket:
        yield bucket


def _with_last(items: Iterable[list[tuple[str, Tensor]]]) -> Iterator[tuple[list[tuple[str, Tensor]], bool]]:
    held: list[tuple[str, Tensor]] | None = None
    for item in items:
        if held is not None:
            yield held, False
        held = item
    if held is not None:
        yield held, True
