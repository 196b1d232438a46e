"""Named tensors in one block of shared memory that several processes map.

One block needs one file descriptor, however many tensors it holds; the system frees it with the last process that maps
it. Each tensor starts at a multiple of 64 bytes, so a view is as fast as a separate tensor.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 64
_SHARED_MEMORY = Path("/dev/shm")


class SharedMemoryError(RuntimeError):
    """The machine has too little shared memory for a model's tensors."""


@dataclass(frozen=True)
class SharedTensors:
    """Named tensors in one shared block; every process that receives the object maps the same memory.

    Attributes:
        block: (bytes,) uint8.
        places: (first byte, shape, dtype) of each tensor by name.
    """

    block: Tensor
    places: dict[str, tuple[int, torch.Size, torch.dtype]]

    def views(self) -> dict[str, Tensor]:
        """All tensors by name; every process sees a write to one."""
        return {
            name: self.block[first : first + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for name, (first, shape, dtype) in self.places.items()
        }


def share_like(tensors: Mapping[str, Tensor]) -> SharedTensors:
    """A zeroed shared block with the names, shapes and types of CPU tensors.

    Raises:
        SharedMemoryError: it would not fit; names the bytes needed and free.
    """
    places, size = {}, 0
    for name, tensor in tensors.items():
        places[name] = (size, tensor.shape, tensor.dtype)
        size += math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT
    # Beyond the free space the first write to a page ends the process with a bus error.
    free = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else None
    if free is not None and size > free:
        raise SharedMemoryError(
            f"sharing {size:,} bytes between processes needs as much free in {_SHARED_MEMORY}, which has {free:,}; "
            "raise its size (in a container: --shm-size), or set processes=1."
        )
    return SharedTensors(torch.zeros(size, dtype=torch.uint8).share_memory_(), places)


def model_tensors(model: Any) -> dict[str, Tensor]:
    """Parameters and buffers of a model by name, tied ones once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def share_model(model: Any) -> SharedTensors:
    """Move a model's parameters and buffers into shared memory, in place: optimizers on them stay valid.

    Raises:
        ValueError: the model is not on the CPU.
    """
    if model.device.type != "cpu":
        raise ValueError(f"processes share weights in CPU memory, but the model is on {model.device}; set processes=1.")
    tensors = model_tensors(model)
    shared = share_like(tensors)
    for name, view in shared.views().items():
        view.copy_(tensors[name].detach())
        tensors[name].data = view
    return shared


def adopt_tensors(model: Any, shared: SharedTensors) -> None:
    """Replace the tensors of a model of the same shape by shared ones."""
    tensors = model_tensors(model)
    for name, view in shared.views().items():
        tensors[name].data = view
