"""Payloads of SGLang's `update_weights_from_tensor`, whose format is a pickle; they are written and never read.

One contains tensors by value, so a server may run on another machine. The other contains handles (CUDA IPC) of tensors
that stay in the memory of a GPU, which a server of this machine opens.
"""

from __future__ import annotations

import base64
import inspect
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions


def pack_tensors(named: list[tuple[str, Tensor]]) -> list[bytes]:
    """Base64 text, in pieces, of a pickled list of (name, CPU tensor).

    Args:
        named: tensors on any device; the list is empty afterwards. Each tensor is dropped when it is encoded, so that
            they are never in memory as tensors and as text.
    """
    writer = _Base64Writer()
    pickler = pickle.Pickler(writer, pickle.HIGHEST_PROTOCOL)
    pickler.fast = True  # without a memo, which would keep every tensor
    pickler.dump(_Emptied(named))
    return writer.close()


def pack_handles(named: Sequence[tuple[str, Tensor]]) -> list[bytes]:
    """Base64 text of a pickled list of (name, handle of a GPU tensor), for one process of a server.

    The tensors must live until the server has answered. Each process needs handles of its own, because torch counts who
    has opened them.
    """
    writer = _Base64Writer()
    pickle.Pickler(writer, pickle.HIGHEST_PROTOCOL).dump([(name, _Handle(tensor)) for name, tensor in named])
    return writer.close()


class _Handle:
    """Pickled as torch pickles a GPU tensor for another process, with the GPU's identifier in place of its number.

    A server counts the GPUs that it sees, so a number may mean another GPU there. SGLang accepts either.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, values = reductions.reduce_tensor(self._tensor)
        place = list(inspect.signature(rebuild).parameters).index("storage_device")
        identifier = str(torch.cuda.get_device_properties(values[place]).uuid)
        return rebuild, (*values[:place], identifier, *values[place + 1 :])


class _Emptied:
    """Pickled as a list, item by item; each is taken out of the list before."""

    def __init__(self, named: list[tuple[str, Tensor]]) -> None:
        self._named = named

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (), None, self._items()

    def _items(self) -> Iterator[tuple[str, Tensor]]:
        self._named.reverse()
        while self._named:
            name, tensor = self._named.pop()
            own = tensor.detach().cpu()
            if own.untyped_storage().nbytes() > own.nbytes or not own.is_contiguous():
                own = own.clone().contiguous()  # a pickled view would contain its whole storage
            yield name, own


class _Base64Writer:
    """A binary file whose content is kept as pieces of base64 text."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._rest = b""  # fewer than three bytes, which base64 writes together

    def write(self, data: Any) -> int:
        """Append bytes."""
        view = memoryview(data)
        count = view.nbytes
        if self._rest:
            missing = 3 - len(self._rest)
            self._rest, view = self._rest + bytes(view[:missing]), view[missing:]
            if len(self._rest) < 3:
                return count
            self._pieces.append(base64.b64encode(self._rest))
        end = len(view) - len(view) % 3
        if end:
            self._pieces.append(base64.b64encode(view[:end]))
        self._rest = bytes(view[end:])
        return count

    def close(self) -> list[bytes]:
        """The pieces."""
        return [*self._pieces, base64.b64encode(self._rest)]
