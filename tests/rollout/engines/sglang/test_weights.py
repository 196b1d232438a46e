"""Weights on their way: buckets, and payloads that hold tensors by value."""

from __future__ import annotations

import base64
import pickle

import pytest
import torch

from geo_sokoban_pipeline.rollout.engines.sglang.payload import pack_tensors
from geo_sokoban_pipeline.rollout.engines.sglang.weights import cut_buckets, make_tag


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ([1, 1, 1], 8, [[0, 1], [2]]),
        ([5, 1, 1], 8, [[0], [1, 2]]),  # larger than a bucket: alone
        ([1, 5, 1], 8, [[0], [1], [2]]),
        ([], 8, []),
        ([1, 1, 1], 1000, [[0, 1, 2]]),
    ],
)
def test_buckets(sizes, limit, expected):
    named = [(str(index), torch.zeros(size)) for index, size in enumerate(sizes)]
    assert [[int(name) for name, _ in bucket] for bucket in cut_buckets(named, limit)] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_payload_holds_no_more_than_its_tensors(dtype):
    whole = torch.arange(100_000).to(dtype)
    text = pack_tensors([("a", whole[10:14]), ("b", torch.nn.Parameter(torch.ones(2, 3, dtype=dtype)))])
    assert len(text) < 4000
    read = dict(pickle.loads(base64.b64decode(text)))
    assert torch.equal(read["a"], whole[10:14])
    assert (read["b"].shape, read["b"].requires_grad) == ((2, 3), False)


def test_tags_are_never_alike():
    assert len({make_tag(3) for _ in range(100)}) == 100
