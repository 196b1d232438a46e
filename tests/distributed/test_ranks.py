"""Ranks: a failed one is named, whatever the others wait for; sums have equal bits on all ranks and in equal runs."""

from __future__ import annotations

import pytest
import torch

from geo_sokoban_pipeline.distributed.launch import RankError
from rank_jobs import FailThenSum, SumGradients, start


@pytest.mark.slow
def test_sums_of_four_ranks() -> None:
    found = []
    ranks, own = start(4)
    try:
        for _ in range(2):
            found += ranks.run(lambda: SumGradients()(own), [SumGradients()] * 3)
    finally:
        ranks.close()
        assert own.group is not None
        own.group.close()
    parts = []
    for rank in range(4):
        generator = torch.Generator().manual_seed(rank)
        parts.append([torch.randn(count, generator=generator) for count in (40_001, 3)])
    for gradients in found:
        for gradient, *terms in zip(gradients, *parts, strict=False):
            torch.testing.assert_close(gradient, torch.stack(terms).sum(0))
        torch.testing.assert_close(gradients[2], torch.ones(2))
        assert gradients[3] is None, "no rank had one"
        assert all(torch.equal(one, other) for one, other in zip(gradients[:3], found[0], strict=False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"(?s)process 3 of 3 \(pid \d+\) failed:.*Traceback.*ValueError: out of luck"),
        ("kill", r"process 3 of 3 \(pid \d+\) ended with exit code -9 \(SIGKILL\)"),
    ],
)
def test_a_rank_that_fails_while_the_others_wait_for_it_is_named(how: str, message: str) -> None:
    ranks, own = start(3)
    try:
        with pytest.raises(RankError, match=message):
            ranks.run(lambda: FailThenSum()(own), [FailThenSum(), FailThenSum(how)])
        with pytest.raises(RankError, match="closed"):
            ranks.run(lambda: None, [])
    finally:
        assert own.group is not None
        own.group.close()
