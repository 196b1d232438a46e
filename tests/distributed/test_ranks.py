"""Ranks: a failed one is named, whatever the others wait for; sums have equal bits on all ranks and in equal runs."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from geo_sokoban_pipeline.distributed.group import Group
from geo_sokoban_pipeline.distributed.messages import RankError
from rank_jobs import FailThenSum, SumGradients, start


@pytest.mark.slow
def test_sums_of_four_ranks() -> None:
    # The second is longer than what is mapped by then, the last too large for shared memory.
    counts = (101, 40_001, 9_000_000)
    found: dict[int, list[list[torch.Tensor | None]]] = {}
    ranks, own = start(4)
    try:
        for count in [*counts, *counts[:2]]:
            job = SumGradients(count)
            found.setdefault(count, []).extend(ranks.run(partial(job, own), [job] * 3))
    finally:
        ranks.close()
        assert own.group is not None
        own.group.close()
    for count, answers in found.items():
        parts = []
        for rank in range(4):
            generator = torch.Generator().manual_seed(rank)
            parts.append([torch.randn(length, generator=generator) for length in (count, 3)])
        for gradients in answers:
            for gradient, *terms in zip(gradients, *parts, strict=False):
                torch.testing.assert_close(gradient, torch.stack(terms).sum(0))
            torch.testing.assert_close(gradients[2], torch.ones(2))
            assert gradients[3] is None, "no rank had one"
            assert all(torch.equal(one, other) for one, other in zip(gradients[:3], answers[0], strict=False))


@pytest.mark.slow
@pytest.mark.parametrize(("gradients", "connected"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"(?s)process 3 of 3 \(pid \d+\) failed:.*Traceback.*ValueError: out of luck"),
        ("reset", r"(?s)process 3 of 3 \(pid \d+\) failed:.*Traceback.*ConnectionResetError: a server of its own"),
        ("kill", r"process 3 of 3 \(pid \d+\) ended with exit code -9 \(SIGKILL\)"),
    ],
)
def test_a_rank_that_fails_while_the_others_wait_for_it_is_named(
    how: str, message: str, gradients: bool, connected: bool
) -> None:
    ranks, own = start(3)
    try:
        with pytest.raises(RankError, match=message):
            others = [FailThenSum(failing, gradients, connected) for failing in ("", how)]
            ranks.run(lambda: others[0](own), others)
        with pytest.raises(RankError, match="closed"):
            ranks.run(lambda: None, [])
    finally:
        assert own.group is not None
        own.group.close()


def test_a_process_that_was_alone_joins_others() -> None:
    """Both have the same sums, and no gradient where neither had one: an optimizer step leaves its weight alone."""
    Group.alone("cpu")
    ranks, own = start(2)
    try:
        assert own.group is not None
        found = ranks.run(lambda: SumGradients()(own), [SumGradients()])
    finally:
        ranks.close()
        assert own.group is not None
        own.group.close()
    assert all(torch.equal(one, other) for one, other in zip(found[0][:3], found[1][:3], strict=True))
    assert [gradients[3] for gradients in found] == [None, None]
