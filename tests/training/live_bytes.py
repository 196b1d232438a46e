"""Bytes of tensors that are alive, and the most that were at once: what an accelerator's allocator would say."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make while it is entered, forward and backward.

    Attributes:
        live: bytes of those that are still there.
        peak: the largest `live` so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in given | self._known:
                self._count(storage)
        self.peak = max(self.peak, self.live)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        number, size = storage._cdata, storage.nbytes()
        self._known.add(number)
        self.live += size
        weakref.finalize(storage, self._forget, number, size)

    def _forget(self, number: int, size: int) -> None:
        self._known.discard(number)
        self.live -= size


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    """Of all tensors among the values; of a sharded one, this rank's part."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, DTensor):
            yield leaf._local_tensor.untyped_storage()
        elif isinstance(leaf, Tensor):
            yield leaf.untyped_storage()
