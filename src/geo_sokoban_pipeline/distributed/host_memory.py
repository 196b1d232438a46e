"""Memory of the CPU for tensors that leave a GPU and come back, as a trainer's do while servers have its GPU.

It is pinned, so that copies run side by side at the speed of the link, and kept, because pinning takes longer than
copying. torch rounds every pinned allocation up to a power of two: tensors lie in a few blocks of such sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor

from geo_sokoban_pipeline.distributed.slices import own_part, with_part

_ALIGNMENT = 64  # bytes: tensors of a block begin at multiples of it


class HostMemory:
    """Memory in which the tensors of a list have their places; lists that begin alike share them."""

    def __init__(self) -> None:
        self._places: list[Tensor] = []

    @torch.no_grad()
    def hold(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors with this rank's parts copied to this memory, over what it held; one wait for all copies."""
        parts = [own_part(tensor) for tensor in tensors]
        known = zip(self._places, parts, strict=False)
        same = takewhile(lambda pair: pair[0].shape == pair[1].shape and pair[0].dtype == pair[1].dtype, known)
        count = len(list(same))
        del self._places[count:]
        self._places += _allocate(parts[count:])
        for place, part in zip(self._places, parts, strict=True):
            place.copy_(part, non_blocking=True)
        return _finished(self._places, tensors)


@torch.no_grad()
def copy_to(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors with this rank's parts copied to a device; one wait for all copies."""
    return _finished([own_part(tensor).to(device, non_blocking=True, copy=True) for tensor in tensors], tensors)


def _finished(parts: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # until then both sides are in use
    return [with_part(part, tensor) for part, tensor in zip(parts, tensors, strict=True)]


def _allocate(parts: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of the same shapes and types in few blocks, the largest first."""
    sizes = [-(-part.nbytes // _ALIGNMENT) * _ALIGNMENT for part in parts]
    left, places = sum(sizes), dict[int, Tensor]()
    block, used = torch.empty(0, dtype=torch.uint8), 0
    for number in sorted(range(len(parts)), key=lambda each: -sizes[each]):
        if used + sizes[number] > len(block):
            # The largest power of two that is filled, or the smallest one for this tensor.
            length = 1 << max(left.bit_length() - 1, (sizes[number] - 1).bit_length())
            block, used = torch.empty(length, dtype=torch.uint8, pin_memory=torch.cuda.is_available()), 0
        like = parts[number]
        places[number] = block[used : used + like.nbytes].view(like.dtype).view(like.shape)
        used, left = used + sizes[number], left - sizes[number]
    return [places[number] for number in range(len(parts))]
