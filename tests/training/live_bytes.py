"""Bytes of tensors that are alive, and the most that were at once: what an accelerator's allocator would say."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
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
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
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
