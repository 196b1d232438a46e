"""Tensors that leave a GPU: places that stay, in few blocks, and copies that land where they are asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from geo_sokoban_pipeline.distributed.host_memory import HostMemory, copy_to
from geo_sokoban_pipeline.distributed.slices import own_part, with_part

SHAPES = st.lists(st.sampled_from([(), (0, 3), (3,), (5, 7), (40, 50), (1, 2, 3)]), min_size=1, max_size=12)
KINDS = st.sampled_from([torch.float32, torch.bfloat16, torch.int64])


def filled(shape: tuple[int, ...], kind: torch.dtype, value: int) -> Tensor:
    return torch.full(shape, value).to(kind)


@given(first=SHAPES, more=SHAPES, kind=KINDS)
def test_each_tensor_has_a_place_of_its_own_that_stays(first: Any, more: Any, kind: Any) -> None:
    memory = HostMemory()
    tensors = [filled(shape, kind, number) for number, shape in enumerate(first)]
    places = memory.hold(tensors)
    later = [*tensors, *(filled(shape, torch.float32, 100 + number) for number, shape in enumerate(more))]
    moved = memory.hold(later)
    assert [place.data_ptr() for place in places] == [place.data_ptr() for place in moved[: len(places)]]
    for found in (moved, copy_to(moved, torch.device("cpu"))):
        for one, other in zip(later, found, strict=True):
            assert torch.equal(one, other) and one.dtype == other.dtype and one.shape == other.shape
    others = [*tensors[:-1], filled((2, 2), torch.float64, 7)]
    assert all(map(torch.equal, memory.hold(others), others))


def test_blocks_have_sizes_that_torch_does_not_round() -> None:
    """Weights and moments of 2B by its shapes, in thousandths: pinned one by one they would take a quarter more."""
    rows = {"embeddings": 151_936, **{f"layer {number}": 24_576 for number in range(28)}}
    tensors = [torch.empty(count, 2, dtype=torch.float32) for count in rows.values() for _ in range(3)]
    blocks = [place.untyped_storage() for place in HostMemory().hold(tensors)]
    sizes = {block.data_ptr(): block.nbytes() for block in blocks}
    assert all(size.bit_count() == 1 for size in sizes.values())
    each = sum(1 << (tensor.nbytes - 1).bit_length() for tensor in tensors)
    assert sum(sizes.values()) <= 1.1 * sum(tensor.nbytes for tensor in tensors) < 0.9 * each


@pytest.fixture
def placements() -> Any:
    """How two ranks of a mesh shard a tensor; the second one is not there."""
    if dist.is_initialized():  # by an earlier test that offloads
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    yield DTensor.from_local(torch.zeros(3, 4), mesh)
    dist.destroy_process_group()


def test_parts_leave_a_gpu_and_come_back(placements: DTensor) -> None:
    """Fake tensors have devices and no bytes: here they are on a GPU that is not there."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        part = torch.empty(3, 4, device="cuda")
        tensors = [part, with_part(part, placements), torch.empty((), device="cuda")]
        memory = HostMemory()
        for _ in range(2):
            away = memory.hold(tensors)
            back = copy_to(away, torch.device("cuda:0"))
            assert {own_part(tensor).device.type for tensor in away} == {"cpu"}
            assert {own_part(tensor).device.type for tensor in back} == {"cuda"}
            assert [type(tensor) for tensor in back] == [type(tensor) for tensor in tensors]
            assert back[1].shape == tensors[1].shape == placements.shape
            tensors = back
