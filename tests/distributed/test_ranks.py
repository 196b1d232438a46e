"""Ranks: a failed one is named, whatever the others wait for; sums have equal bits on all ranks and in equal runs."""

from __future__ import annotations

import pytest
import torch

from geo_sokoban_pipeline.distributed.group import Group
from geo_sokoban_pipeline.distributed.process import WorkerError
from rank_jobs import close, run, start


@pytest.mark.slow
def test_sums_of_four_ranks() -> None:
    # The second is longer than what is mapped by then, the last too large for shared memory.
    counts = (101, 40_001, 9_000_000)
    found: dict[int, list[list[torch.Tensor | None]]] = {}
    ranks, own = start(4)
    try:
        for count in [*counts, *counts[:2]]:
            found.setdefault(count, []).extend(run(ranks, "sum_gradients", [(count,)] * 4))
    finally:
        close(ranks)
        own.leave()
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
        with pytest.raises(WorkerError, match=message):
            run(ranks, "fail_then_sum", [(failing, gradients, connected) for failing in ("", "", how)])
    finally:
        close(ranks, patient=False)
        own.leave()


def test_a_process_that_was_alone_joins_others() -> None:
    """Both have the same sums, and no gradient where neither had one: an optimizer step leaves its weight alone."""
    Group.alone("cpu")
    ranks, own = start(2)
    try:
        found = run(ranks, "sum_gradients", [()] * 2)
    finally:
        close(ranks)
        own.leave()
    assert all(torch.equal(one, other) for one, other in zip(found[0][:3], found[1][:3], strict=True))
    assert [gradients[3] for gradients in found] == [None, None]


def test_a_parameter_without_a_gradient_keeps_none() -> None:
    """As in one process; with zeros weight decay would move it."""
    with_one, without = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))
    with_one.grad = torch.tensor([1.0, 2.0, 3.0])
    Group.alone("cpu").sum_gradients([with_one, without])
    assert with_one.grad.tolist() == [1.0, 2.0, 3.0]
    assert without.grad is None
