"""Safetensors files written tensor by tensor, with the digest taken on the way.

A file equals what the safetensors library writes, byte for byte (tested), but a writer never needs more than one of its
tensors in memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from geo_sokoban_pipeline.events import Event, emit
from geo_sokoban_pipeline.progress import note_progress
from geo_sokoban_pipeline.runs.storage import Files

if TYPE_CHECKING:
    from torch import Tensor


SHARD_BYTES = 2_000_000_000  # at most, unless a single tensor is larger
WEIGHT_METADATA = {"format": "pt"}
# safetensors' names and bytes of torch's types, in the order in which a file holds them.
_TYPES = {"float64": ("F64", 8), "float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}


@dataclass(frozen=True)
class TensorSpec:
    """Type, by torch's name, and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Of a tensor."""
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def bytes(self) -> int:
        """Size in a file."""
        return math.prod(self.shape) * _TYPES[self.dtype][1]


def order_tensors(specs: Mapping[str, TensorSpec]) -> list[str]:
    """Names of tensors in the order in which a file holds them."""
    kinds = list(_TYPES)
    return sorted(specs, key=lambda name: (kinds.index(specs[name].dtype), name))


class TensorFile:
    """A safetensors file that is being written; a context manager.

    Args:
        specs: of all its tensors.
        metadata: of the file.

    Attributes:
        names: of the tensors, in the order in which they are to be written.
        record: size and digest of the written file, for a manifest; set when the file closes.
    """

    def __init__(self, path: Path, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None) -> None:
        self.names = order_tensors(specs)
        self.record: dict[str, Any] = {}
        self._specs, self._waiting = specs, list(reversed(self.names))
        self._digest = hashlib.blake2b(digest_size=16)
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        end = 0
        for name in self.names:
            first, end = end, end + specs[name].bytes
            kind, shape = _TYPES[specs[name].dtype][0], list(specs[name].shape)
            header[name] = {"dtype": kind, "shape": shape, "data_offsets": [first, end]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._file = path.open("wb")
        self._put(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor.

        Raises:
            ValueError: it is another one than the next of `names`, or has another type or shape than announced.
        """
        import torch

        found, expected = TensorSpec.of(tensor), self._waiting[-1] if self._waiting else None
        if name != expected or found != self._specs[name]:
            wanted = "nothing more" if expected is None else f"{expected}, {self._specs[expected]}"
            raise ValueError(f"{self._file.name} takes {wanted}, not {name}, {found}.")
        note_progress()
        self._waiting.pop()
        self._put(memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()))
        emit(Event.TENSOR, Path(self._file.name).name)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                if self._waiting:
                    raise ValueError(f"{self._file.name}: {self._waiting[-1]} was not written.")
                self._file.flush()
                os.fsync(self._file.fileno())
                self.record = {"bytes": self._file.tell(), "blake2b": self._digest.hexdigest()}
        finally:
            self._file.close()

    def _put(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._digest.update(data)


def write_tensors(
    path: Path,
    specs: Mapping[str, TensorSpec],
    read: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> Files:
    """Write a file of tensors, each of which is read by its name when its turn comes; returns its record."""
    with TensorFile(path, specs, metadata) as file:
        for name in file.names:
            file.write(name, read(name))
    return {path.name: file.record}


def read_tensors(folder: Path, stem: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the safetensors files of a folder by its name, one at a time, in memory of its own.

    Args:
        stem: of the files' names, such as `model`.
    """
    from safetensors import safe_open

    for path in sorted(folder.glob(f"{stem}*.safetensors")):
        with safe_open(path, "pt") as file:
            names = list(file.keys())
        for name in names:
            # Opened anew for each tensor: what was read of an open file counts in this process's memory.
            with safe_open(path, "pt") as file:
                tensor = file.get_tensor(name).clone()
            note_progress()
            yield name, tensor


def plan_weight_files(specs: Mapping[str, TensorSpec], largest: int = SHARD_BYTES) -> dict[str, list[str]]:
    """Tensors by file, in the layout of Hugging Face checkpoints: one file where they fit.

    Args:
        specs: in the order of the model.
        largest: bytes of a file.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    plan = split_state_dict_into_shards_factory(
        dict(specs),
        get_storage_size=lambda spec: spec.bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=largest,
    )
    files: dict[str, list[str]] = plan.filename_to_tensors
    return files


def write_weight_index(folder: Path, files: Mapping[str, list[str]], specs: Mapping[str, TensorSpec]) -> None:
    """Write the index of a checkpoint, unless it is a single file, which needs none."""
    if len(files) == 1:
        return
    index = {
        "metadata": {
            "total_parameters": sum(math.prod(spec.shape) for spec in specs.values()),
            "total_size": sum(spec.bytes for spec in specs.values()),
        },
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
